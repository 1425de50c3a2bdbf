// Node clients against a server: node node.mjs URL. Prints a line a check; the first that fails ends it.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const url = process.argv[2];
const zone = z.object({ zone: z.string() });
const schema = { type: "object", properties: { zone: { type: "string" } } };

async function check(name, run) {
  await run();
  console.log(`ok: ${name}`);
}

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });

await check("openai: chat", async () => {
  const whole = await openai.chat.completions.create({ model: "it", messages: [{ role: "user", content: "When?" }] });
  assert.equal(whole.choices[0].message.content, "Moses came.");
});
await check("openai: responses", async () => {
  const whole = await openai.responses.create({ model: "it", input: "When?" });
  assert.equal(whole.output_text, "Moses came.");
  const next = await openai.responses.create({ model: "it", input: "At noon?", previous_response_id: whole.id });
  assert.equal(next.output_text, "It is noon.");
  const stream = openai.responses.stream({ model: "it", input: "When?" });
  let text = "";
  stream.on("response.output_text.delta", (event) => { text += event.delta; });
  const final = await stream.finalResponse();
  assert.equal(text, "Moses came.");
  assert.equal(final.output_text, text);
});
await check("openai: responses with a function", async () => {
  const tools = [{ type: "function", name: "now", parameters: schema, strict: false }];
  const input = [{ role: "user", content: "When?" }];
  const first = await openai.responses.create({ model: "it", input, tools });
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { zone: "Köln" });
  const output = { type: "function_call_output", call_id: call.call_id, output: "noon" };
  const second = await openai.responses.create({ model: "it", input: [...input, ...first.output, output], tools });
  assert.equal(second.output_text, "It is noon.");
});

const anthropic = new Anthropic({ baseURL: url, apiKey: "any", maxRetries: 0 });

await check("anthropic: message, stream and tool", async () => {
  const fields = { model: "it", max_tokens: 100 };
  const messages = [{ role: "user", content: "When?" }];
  const final = await anthropic.messages.stream({ messages, ...fields }).finalMessage();
  assert.deepEqual(final.content.map((block) => block.type), ["thinking", "text"]);
  const tools = [{ name: "now", input_schema: schema }];
  const first = await anthropic.messages.create({ messages, tools, ...fields });
  assert.deepEqual(first.content.at(-1).input, { zone: "Köln" });
});

const model = createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" })("it"); // the default: /v1/responses
const now = tool({ description: "The time", inputSchema: zone, execute: async () => "noon" });

await check("vercel ai: text and stream", async () => {
  const whole = await generateText({ model, prompt: "When?" });
  assert.equal(whole.text, "Moses came.");
  assert.ok(whole.usage.inputTokens > 0);
  const streamed = streamText({ model, prompt: "When?" });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, "Moses came.");
  assert.equal(await streamed.finishReason, "stop");
});
await check("vercel ai: tools in several steps", async () => {
  const whole = await generateText({ model, prompt: "When?", tools: { now }, stopWhen: stepCountIs(3) });
  assert.equal(whole.text, "It is noon.");
  assert.equal(whole.steps.length, 2);
  const streamed = streamText({ model, prompt: "When?", tools: { now }, stopWhen: stepCountIs(3) });
  assert.equal(await streamed.text, "It is noon.");
  const messages = [{ role: "user", content: "When?" }, ...whole.response.messages, { role: "user", content: "So?" }];
  assert.equal((await generateText({ model, messages, tools: { now } })).text, "It is noon.");
});
await check("vercel ai: objects", async () => {
  const found = await generateObject({ model, prompt: "JSON please", schema: z.object({ name: z.string() }) });
  assert.deepEqual(found.object, { name: "Moses" });
});
