// What scripts ask the server without a client.

// The number of choices that it computes, by its own metrics.
export async function numRunning(url) {
  const metrics = await (await fetch(`${url}/metrics`)).text();
  return Number(/^aioengine:num_requests_running\{.*\} (\S+)$/m.exec(metrics)[1]);
}

// Scrapes until that many run.
export async function waitRunning(url, wanted) {
  const deadline = Date.now() + 60_000;
  let found = await numRunning(url);
  while (found !== wanted) {
    if (Date.now() > deadline) throw new Error(`${found} choices run, not ${wanted}`);
    found = await numRunning(url);
  }
}
