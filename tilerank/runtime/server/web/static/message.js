/* How a message of a conversation looks. */
import { player } from "./composer.js";
import { button, copy, element, number, seconds } from "./dom.js";
import { markdown } from "./markdown.js";

const LEAST_MS = 50;        // between two drawings of an answer that is being written

// Returns the element of a message. actions: names of buttons, and what they do with it. names: of tools, by call.
export function view(message, actions, names) {
  if (message.role === "assistant") return new AnswerView(message, actions);
  const body = element("div", { className: "text plain" }, message.text);
  const box = element("article", { className: `message ${message.role}` });
  if (message.role === "tool") box.append(element("h3", {}, `Result of ${names[message.call] ?? "a tool"}`));
  if (message.media?.length) box.append(element("div", { className: "media" }, ...message.media.map(player)));
  if (message.text) box.append(body);
  box.append(bar(message, actions, body));
  return { box };
}

function bar(message, actions, shown) {
  const copies = button("Copy", () => copy(copies, message.text, shown), { className: "quiet" });
  const others = Object.entries(actions).map(([name, act]) => button(name, act, { className: "quiet" }));
  return element("div", { className: "actions" }, copies, ...others);
}

class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.running = false;
    this.summary = element("summary", {});
    this.reasoning = element("div", { className: "plain" });
    this.folded = element("details", { className: "reasoning" }, this.summary, this.reasoning);
    this.text = element("div", { className: "text" });
    this.calls = element("div", {});
    this.error = element("p", { className: "bad", role: "alert" });
    this.note = element("p", { className: "soft note" });
    this.bar = bar(message, actions, this.text);
    this.box = element("article", { className: "message assistant" },
      this.folded, this.text, this.calls, this.error, this.note, this.bar);
    this.draw();
  }

  // Draws soon. A long answer takes longer to draw, and is drawn less often.
  change() {
    this.timer ??= setTimeout(() => this.draw(), Math.max(LEAST_MS, 4 * this.cost));
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now(), { message } = this;
    this.folded.hidden = !message.reasoning;
    this.summary.textContent = this.running && message.reasoned === undefined ? "Reasoning …"
      : `Reasoning${message.reasoned === undefined ? "" : `, ${seconds(message.reasoned)}`}`;
    this.reasoning.textContent = message.reasoning ?? "";
    this.text.replaceChildren(markdown(message.text));
    this.calls.replaceChildren(...(message.calls ?? []).map(callBox));
    this.error.textContent = message.error ?? "";
    this.note.textContent = this.running ? (message.first === undefined ? "waiting for the first token …" : "") : note(message);
    this.bar.hidden = this.running;
    this.box.classList.toggle("running", this.running);
    this.cost = performance.now() - began;
  }
}

function callBox({ name, arguments: given }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // the arguments are still being written
  }
  return element("div", { className: "code call" },
    element("div", { className: "code-head" }, `Call of ${name}`), element("pre", {}, element("code", {}, shown)));
}

function note({ end, first, tokens, took }) {
  const parts = [];
  if (tokens) parts.push(`${number(tokens)} tokens`);
  if (tokens > 1 && took > first) parts.push(`${((tokens - 1) / (took - first)).toFixed(1)} tokens/s`);
  if (first !== undefined) parts.push(`first token after ${seconds(first)}`);
  if (end === "stopped") parts.push("stopped");
  if (end === "length") parts.push("ended at the maximum of tokens");
  return parts.join(" · ");
}

// Returns a form in place of a message, whose text it changes.
export function editor(text, name, save, cancel) {
  const field = element("textarea", { value: text, "aria-label": "Text of the message" });
  const saves = button(name, () => save(field.value.trim()));
  const buttons = element("p", { className: "buttons" }, saves, button("Cancel", cancel, { className: "quiet" }));
  field.onkeydown = (event) => {
    if (event.key === "Escape") cancel();
  };
  return element("form", { className: "message editor", onsubmit: (event) => event.preventDefault() }, field, buttons);
}

// Returns a form that takes the results of calls, which are the user's to make.
export function resultForm(calls, send) {
  const fields = calls.map(({ name }, i) => element("textarea", { id: `result-${i}`, rows: 2, required: true, title: name }));
  const rows = calls.flatMap(({ name }, i) => [element("label", { htmlFor: `result-${i}` }, `Result of ${name}`), fields[i]]);
  return element("form", {
    id: "results",
    className: "message",
    onsubmit: (event) => {
      event.preventDefault();
      send(fields.map((field, i) => ({ role: "tool", call: calls[i].id, text: field.value })));
    },
  }, ...rows, element("p", { className: "buttons" }, element("button", {}, "Send results")));
}
