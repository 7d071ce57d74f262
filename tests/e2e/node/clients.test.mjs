// The JavaScript clients, unmodified, against the scripted model that BALEEN_URL names. `node --test` runs this file;
// tests/e2e/test_node_clients.py starts the server and knows the script.

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = `${process.env.BALEEN_URL}/v1`;
const TALE = `Once${" upon a time".repeat(100)}`; // as tests/harness/script.py has it
const ADD = {
  type: "function",
  function: {
    name: "add",
    parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] },
  },
};

async function activeRequests() {
  const text = await (await fetch(`${process.env.BALEEN_URL}/metrics`)).text();
  return Number(/^baleen_active_requests(?:\{.*\})? (\S+)$/m.exec(text)[1]);
}

// An answer that nobody leaves goes on for longer than this waits.
async function untilIdle() {
  for (let turn = 0; turn < 500; turn += 1) {
    if ((await activeRequests()) === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.fail("a request that its client left is still active");
}

describe("openai", () => {
  const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
  const ask = (messages, more = {}) =>
    client.chat.completions.create({
      model: "micro",
      messages: typeof messages === "string" ? [{ role: "user", content: messages }] : messages,
      ...more,
    });

  test("chat", async () => {
    const answer = await ask("Say hello.");
    assert.equal(answer.choices[0].message.content, "Hello there, friend.");
    assert.equal(answer.choices[0].finish_reason, "stop");
  });

  test("stream", async () => {
    let text = "";
    let usage;
    for await (const chunk of await ask("Say hello.", { stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, "Hello there, friend.");
    assert.ok(usage.completion_tokens > 0);
  });

  test("reasoning", async () => {
    const { message } = (await ask("Think first.", { thinking: { type: "enabled" } })).choices[0];
    assert.equal(message.reasoning_content, "A greeting is due.");
    assert.equal(message.content, "Hello.");
  });

  test("tool loop with two parallel calls", async () => {
    const messages = [{ role: "user", content: "Add 2 and 3, and 40 and 2." }];
    const { message } = (await ask(messages, { tools: [ADD] })).choices[0];
    messages.push(message);
    for (const made of message.tool_calls) {
      const { a, b } = JSON.parse(made.function.arguments);
      messages.push({ role: "tool", tool_call_id: made.id, content: String(a + b) });
    }
    assert.deepEqual(messages.slice(2).map((result) => result.content), ["5", "42"]);
    assert.equal((await ask(messages, { tools: [ADD] })).choices[0].message.content, "The sums are 5 and 42.");
  });

  test("abort", async () => {
    const stream = await ask("Talk for long.", { stream: true, max_tokens: 15_000 });
    for await (const _ of stream) break;
    stream.controller.abort();
    await untilIdle();
  });

  test("structured output", async () => {
    const format = {
      type: "json_schema",
      json_schema: { name: "sum", schema: { type: "object", properties: { sum: { type: "integer" } }, required: ["sum"] } },
    };
    const answer = await ask("Write a sum as JSON.", { response_format: format });
    assert.deepEqual(JSON.parse(answer.choices[0].message.content), { sum: 42 });
  });

  test("a bad request says what is wrong", async () => {
    await assert.rejects(ask("Say hello.", { temperature: 9 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  });
});

describe("ai", () => {
  const model = createOpenAICompatible({ name: "baleen", baseURL, includeUsage: true })("micro");
  const add = tool({
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => a + b,
  });

  test("generateText", async () => {
    const { text, usage } = await generateText({ model, prompt: "Say hello.", maxRetries: 0 });
    assert.equal(text, "Hello there, friend.");
    assert.ok(usage.outputTokens > 0);
  });

  test("streamText", async () => {
    const pieces = [];
    for await (const piece of streamText({ model, prompt: "Tell a tale.", maxRetries: 0 }).textStream) pieces.push(piece);
    assert.equal(pieces.join(""), TALE);
    assert.ok(pieces.length > 1);
  });

  test("reasoning", async () => {
    const { text, reasoningText } = await generateText({
      model,
      prompt: "Think first.",
      maxRetries: 0,
      providerOptions: { baleen: { thinking: { type: "enabled" } } },
    });
    assert.equal(text, "Hello.");
    assert.equal(reasoningText, "A greeting is due.");
  });

  test("tool loop with two parallel calls", async () => {
    const { text, steps } = await generateText({
      model,
      prompt: "Add 2 and 3, and 40 and 2.",
      tools: { add },
      stopWhen: isStepCount(3),
      maxRetries: 0,
    });
    assert.equal(text, "The sums are 5 and 42.");
    assert.deepEqual(steps[0].toolResults.map((result) => result.output), [5, 42]);
  });

  test("abort", async () => {
    const abort = new AbortController();
    const { textStream } = streamText({
      model,
      prompt: "Talk for long.",
      maxOutputTokens: 15_000,
      maxRetries: 0,
      abortSignal: abort.signal,
    });
    for await (const _ of textStream) {
      abort.abort();
      break;
    }
    await untilIdle();
  });
});
