/* The parameters of answers, which this browser keeps. Empty fields take the defaults of the model. */
import { at } from "./dom.js";

const KEPT = "tilerank-parameters";
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const FIELDS = [...NUMBERS, "system", "reasoning", "tools"];

// Returns the fields of a request and the messages before the first one.
export function parameters() {
  const body = {};
  for (const name of NUMBERS) {
    const value = at(name).valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  const reasoning = at("reasoning").value;
  if (reasoning === "on" || reasoning === "off") body.chat_template_kwargs = { enable_thinking: reasoning === "on" };
  else if (reasoning) body.reasoning_effort = reasoning;
  const tools = at("tools").value.trim();
  if (tools) body.tools = JSON.parse(tools);
  const system = at("system").value.trim();
  return { body, system: system ? [{ role: "system", content: system }] : [] };
}

function toolsError() {
  const text = at("tools").value.trim();
  if (!text) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "Tools: expected a list of tools in JSON.";
  } catch (error) {
    return `Tools: ${error.message}`;
  }
}

function open() {
  at("parameters").showModal();
}

function close(event) {
  event.preventDefault();
  at("tools").setCustomValidity(toolsError());
  if (!at("parameters-form").reportValidity()) return;
  localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, at(name).value]))));
  at("parameters").close();
}

function reset() {
  for (const name of FIELDS) at(name).value = "";
}

const kept = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
for (const name of FIELDS) at(name).value = kept[name] ?? "";
at("open-parameters").addEventListener("click", open);
at("parameters-form").addEventListener("submit", close);
at("parameters").addEventListener("cancel", close);  // Escape keeps what was entered, as the button does
at("reset-parameters").addEventListener("click", reset);
at("tools").addEventListener("input", () => at("tools").setCustomValidity(""));
