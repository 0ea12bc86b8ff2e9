// What scripts ask the server without a client: sums of its metrics over engines.

async function figure(url, name, label = "") {
  const metrics = await (await fetch(`${url}/metrics`)).text();
  const samples = metrics.split("\n").filter((line) => line.startsWith(`aioengine:${name}{`));
  const values = samples.filter((line) => line.includes(label)).map((line) => line.split(" ").at(-1));
  return values.reduce((sum, value) => sum + Number(value), 0);
}

// Choices that are computed.
export function numRunning(url) {
  return figure(url, "num_requests_running");
}

// Choices that ended because their client left.
export function numAborted(url) {
  return figure(url, "request_success_total", 'finished_reason="abort"');
}

// Scrapes until that many choices run.
export async function waitRunning(url, wanted) {
  const deadline = Date.now() + 60_000;
  let found = await numRunning(url);
  while (found !== wanted) {
    if (Date.now() > deadline) throw new Error(`${found} choices run, not ${wanted}`);
    found = await numRunning(url);
  }
}
