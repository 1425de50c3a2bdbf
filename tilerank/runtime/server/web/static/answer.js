/* Asks the server for the next answer of a conversation, and writes what it streams into a message. */
import { events, post } from "./api.js";

// Fills an answer, and calls `changed` after each change. An error becomes a part of the answer.
export async function write(answer, before, parameters, signal, changed) {
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  try {
    const body = {
      ...parameters.body,
      messages: [...parameters.system, ...sendable(before)],
      stream: true,
      stream_options: { include_usage: true },
    };
    for await (const chunk of events(await post("v1/chat/completions", body, signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) take(answer, choice, since());
      if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") answer.end = "stopped";
    else answer.error = error.message;
  }
  answer.took = since();
}

function take(answer, { delta, finish_reason: reason }, now) {
  if (delta.reasoning_content || delta.content || delta.tool_calls) answer.first ??= now;
  if (delta.reasoning_content) answer.reasoning = (answer.reasoning ?? "") + delta.reasoning_content;
  if (delta.content || delta.tool_calls) answer.reasoned ??= now - answer.first;
  answer.text += delta.content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    answer.calls ??= [];
    answer.calls[index] ??= { id, name: called.name, arguments: "" };
    answer.calls[index].arguments += called.arguments ?? "";
  }
  if (reason) answer.end = reason;
}

// Returns the messages in the form of the API. A question whose answer failed is left out with it.
function sendable(messages) {
  const sent = [];
  for (const message of messages) {
    if (message.role !== "assistant") sent.push(message.role === "user" ? question(message) : result(message));
    else if (message.text || message.calls || message.reasoning) sent.push(answered(message));
    else if (sent.at(-1)?.role === "user") sent.pop();
  }
  return sent;
}

function question({ text, media }) {
  if (!media?.length) return { role: "user", content: text };
  const parts = media.map(({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

const result = ({ call, text }) => ({ role: "tool", tool_call_id: call, content: text });

function answered({ text, reasoning, calls }) {
  return {
    role: "assistant",
    content: text,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls ? { tool_calls: calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    })) } : {}),
  };
}
