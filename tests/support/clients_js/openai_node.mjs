// Users' calls of the `openai` package. `route` is "chat" or "completions".
import OpenAI from "openai";
import { numAborted, numRunning, waitRunning } from "./server.mjs";

function client({ url, apiKey }, options = {}) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0, ...options });
}

function resource({ route, ...server }, options) {
  const openai = client(server, options);
  return route === "chat" ? openai.chat.completions : openai.completions;
}

function described(error) {
  const { status, code, param, type, message, requestID } = error;
  return { name: error.constructor.name, status, code, param, type, message, requestID };
}

export async function create({ body, ...server }) {
  return await resource(server).create({ model: server.model, ...body });
}

export async function stream({ body, ...server }) {
  const chunks = [];
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const asked = { model: server.model, ...body, ...streaming };
  for await (const chunk of await resource(server).create(asked)) chunks.push(chunk);
  return chunks;
}

// The helper that puts chunks together.
export async function streamHelper({ body, ...server }) {
  const deltas = [];
  const asked = { model: server.model, ...body, stream_options: { include_usage: true } };
  const stream = client(server).chat.completions.stream(asked);
  stream.on("content", (delta) => deltas.push(delta));
  return {
    completion: await stream.finalChatCompletion(),
    content: await stream.finalContent(),
    usage: await stream.totalUsage(),
    deltas,
  };
}

export async function models({ model, ...server }) {
  const openai = client(server);
  const listed = [];
  for await (const found of openai.models.list()) listed.push(found.id);
  return { listed, one: await openai.models.retrieve(model) };
}

export async function requestIds({ body, ...server }) {
  const completions = resource(server);
  const asked = { model: server.model, ...body };
  const plain = await completions.create(asked);
  const headers = { "X-Request-Id": "mine/1" };
  const whole = await completions.create(asked, { headers }).withResponse();
  const streamed = await completions.create({ ...asked, stream: true }, { headers }).withResponse();
  streamed.data.controller.abort();
  return { plain: plain._request_id, given: whole.request_id, streamed: streamed.request_id };
}

// `method` is a path such as "models.retrieve".
export async function failure({ method, args, ...server }) {
  const path = method.split(".");
  const name = path.pop();
  try {
    const owner = path.reduce((object, part) => object[part], client(server));
    await owner[name](...args);
  } catch (error) {
    return described(error);
  }
  throw new Error(`${method} did not fail`);
}

// `leave` tells how a user leaves a stream early.
export async function leaveStream({ leave, body, ...server }) {
  const before = await numAborted(server.url);
  const controller = new AbortController();
  const { signal } = controller;
  const asked = { model: server.model, ...body, stream: true };
  const stream = await resource(server).create(asked, { signal });
  const leaving = {
    break: () => true,
    signal: () => controller.abort(),
    stream: () => stream.controller.abort(),
  };
  let numChunks = 0;
  let ran;
  for await (const chunk of stream) {
    if ((numChunks += 1) < 3) continue;
    ran ??= await numRunning(server.url);
    if (leaving[leave]()) break;
  }
  await waitRunning(server.url, 0);
  return { ran, aborted: (await numAborted(server.url)) - before };
}

export async function timeOut({ body, ...server }) {
  const before = await numAborted(server.url);
  try {
    await resource(server, { timeout: 500 }).create({ model: server.model, ...body });
  } catch (error) {
    await waitRunning(server.url, 0);
    return { name: error.constructor.name, aborted: (await numAborted(server.url)) - before };
  }
  throw new Error("no time-out");
}

// A stream takes all the room; a second request is refused, and repeated once the stream has left.
export async function retry({ body, filling, ...server }) {
  const { model } = server;
  const first = await resource(server).create({ model, ...filling, stream: true });
  await waitRunning(server.url, filling.n);
  const answers = [];
  const watched = async (...request) => {
    const response = await fetch(...request);
    answers.push({ atMs: performance.now(), status: response.status });
    first.controller.abort();
    return response;
  };
  const answer = await resource(server, { maxRetries: 2, fetch: watched }).create({ model, ...body });
  return {
    answer,
    statuses: answers.map(({ status }) => status),
    waitedMs: answers[1].atMs - answers[0].atMs,
  };
}

// A stream during which the server loses a rank.
export async function broken({ body, ...server }) {
  let numChunks = 0;
  try {
    const asked = { model: server.model, ...body, stream: true };
    for await (const chunk of await resource(server).create(asked)) {
      if ((numChunks += 1) === 3) console.log("streaming");
    }
  } catch (error) {
    return described(error);
  }
  throw new Error("the stream ended well");
}
