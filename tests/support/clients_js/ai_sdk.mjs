// Users' calls of the `ai` package with the provider `@ai-sdk/openai-compatible`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, jsonSchema, streamText, tool } from "ai";
import { numAborted, numRunning, waitRunning } from "./server.mjs";

const SCHEMA = jsonSchema({
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
});

function provider({ url, apiKey }, options = {}) {
  return createOpenAICompatible({
    name: "aioengine",
    baseURL: `${url}/v1`,
    apiKey,
    includeUsage: true,
    ...options,
  });
}

// `kind` is "chat" or "completion".
function languageModel({ kind = "chat", model, ...server }, options) {
  const models = provider(server, options);
  return kind === "chat" ? models.chatModel(model) : models.completionModel(model);
}

export async function generate({ settings, ...asked }) {
  const result = await generateText({ model: languageModel(asked), ...settings });
  const { text, finishReason, usage, warnings, response } = result;
  return { text, finishReason, usage, warnings, model: response.modelId };
}

export async function stream({ settings, ...asked }) {
  const result = streamText({ model: languageModel(asked), ...settings });
  const deltas = [];
  for await (const delta of result.textStream) deltas.push(delta);
  return {
    deltas,
    text: await result.text,
    finishReason: await result.finishReason,
    usage: await result.usage,
    warnings: await result.warnings,
    model: (await result.response).modelId,
  };
}

function described(error) {
  const { name, message, statusCode, isRetryable, data, responseHeaders } = error;
  return { name, message, statusCode, isRetryable, data, requestId: responseHeaders?.["x-request-id"] };
}

// Requests for what servers may lack.
const ASKING = {
  text: {},
  tools: { tools: { weather: tool({ description: "of a city", inputSchema: SCHEMA }) } },
  object: { output: Output.object({ schema: SCHEMA }) },
};

export async function failure({ asking = "text", settings = {}, options, ...asked }) {
  const model = languageModel(asked, options);
  try {
    await generateText({ model, prompt: "Hello", maxRetries: 0, ...ASKING[asking], ...settings });
  } catch (error) {
    return described(error);
  }
  throw new Error("nothing failed");
}

// The same, as the user of a stream sees it.
export async function streamFailure({ asking = "text", settings = {}, options, ...asked }) {
  const model = languageModel(asked, options);
  const errors = [];
  const onError = ({ error }) => errors.push(error);
  const called = { model, prompt: "Hello", maxRetries: 0, ...ASKING[asking], ...settings, onError };
  await streamText(called).consumeStream();
  if (errors.length !== 1) throw new Error(`${errors.length} errors`);
  return described(errors[0]);
}

export async function embedding({ model, ...server }) {
  try {
    await embed({ model: provider(server).embeddingModel(model), value: "Hello", maxRetries: 0 });
  } catch (error) {
    return described(error);
  }
  throw new Error("there are embeddings");
}

export async function leaveStream({ settings, ...asked }) {
  const before = await numAborted(asked.url);
  const controller = new AbortController();
  const abortSignal = controller.signal;
  const result = streamText({ model: languageModel(asked), ...settings, abortSignal });
  const kinds = [];
  let ran;
  for await (const part of result.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta" && ran === undefined) {
      ran = await numRunning(asked.url);
      controller.abort();
    }
  }
  await waitRunning(asked.url, 0);
  return { ran, aborted: (await numAborted(asked.url)) - before, last: kinds.at(-1) };
}

// A stream takes all the room; a second request is refused, and repeated once the stream has left.
export async function retry({ settings, filling, ...asked }) {
  const controller = new AbortController();
  const { url, apiKey, model } = asked;
  await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${apiKey}`, "Content-Type": "application/json" },
    body: JSON.stringify({ ...filling, model, stream: true }),
    signal: controller.signal,
  });
  await waitRunning(url, filling.n);
  const answers = [];
  const watched = async (...request) => {
    const response = await fetch(...request);
    answers.push({ atMs: performance.now(), status: response.status });
    controller.abort();
    return response;
  };
  const result = await generateText({
    model: languageModel(asked, { fetch: watched }),
    ...settings,
  });
  return {
    text: result.text,
    statuses: answers.map(({ status }) => status),
    waitedMs: answers[1].atMs - answers[0].atMs,
  };
}

// A stream during which the server loses a rank.
export async function broken({ settings, ...asked }) {
  const errors = [];
  let numDeltas = 0;
  const onError = ({ error }) => errors.push(error);
  const result = streamText({ model: languageModel(asked), ...settings, onError });
  for await (const delta of result.textStream) {
    if ((numDeltas += 1) === 3) console.log("streaming");
  }
  if (errors.length !== 1) throw new Error(`${errors.length} errors`);
  const { type, message } = errors[0];
  return { type, message, finishReason: await result.finishReason };
}
