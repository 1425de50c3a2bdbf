/* The chat: shows one conversation of several, which this browser keeps, and asks for answers. */
import { write } from "./answer.js";
import { request } from "./api.js";
import { onMessage, showRunning, takeMedia } from "./composer.js";
import * as kept from "./conversations.js";
import { at, button, element } from "./dom.js";
import { editor, resultForm, view } from "./message.js";
import { parameters } from "./parameters.js";

const POLL_MS = 2000, SAVE_MS = 1000, TITLE = 60, NEAR = 80;  // pixels from the end
const running = new Map();  // from id of a conversation to the answer that is being written in it
let current = null;         // the conversation that is shown
let shown = [];             // the views of its messages

/* ---- answers ---- */

async function answer() {
  const conversation = current, before = [...conversation.messages];
  const message = { role: "assistant", text: "" }, controller = new AbortController();
  running.set(conversation.id, { conversation, controller });
  conversation.messages.push(message);
  conversation.time = Date.now();
  show();
  await keep(conversation);
  let saved = performance.now();
  await write(message, before, parameters(), controller.signal, () => {
    viewOf(message)?.change();
    if (performance.now() - saved < SAVE_MS) return;
    saved = performance.now();
    kept.save(conversation).catch(sayNotKept);
  });
  if (!running.delete(conversation.id)) return;  // the conversation has been deleted
  if (current === conversation) show();
  await keep(conversation);
}

function send(text, media) {
  if (running.has(current.id)) return false;
  if (!current.messages.length) current.title = (text || media[0].name).slice(0, TITLE);
  current.messages.push({ role: "user", text, media });
  answer();
  return true;
}

// Drops the messages from `index` on, puts others in their place, and asks for the answer.
function again(index, ...messages) {
  current.messages.splice(index, Infinity, ...messages);
  answer();
}

const stop = () => running.get(current.id)?.controller.abort();

/* ---- the conversation ---- */

function show() {
  const { messages } = current, active = running.has(current.id);
  const names = Object.fromEntries(messages.flatMap(({ calls }) => calls ?? []).map(({ id, name }) => [id, name]));
  shown = messages.map((message, index) => view(message, active ? {} : actions(message, index), names));
  if (active) {
    shown.at(-1).running = true;
    shown.at(-1).draw();
  }
  at("messages").replaceChildren(...shown.map(({ box }) => box));
  const calls = messages.at(-1)?.calls;
  if (calls && !active) at("messages").append(resultForm(calls, (results) => again(messages.length, ...results)));
  at("messages").setAttribute("aria-busy", active);
  at("welcome").hidden = messages.length > 0;
  showRunning(active);
  toEnd();
}

const viewOf = (message) => shown.find((one) => one.message === message);

function actions(message, index) {
  const remove = async () => {
    current.messages.splice(index);
    await keep(current);
    show();
  };
  const edit = () => {
    const isQuestion = message.role === "user";
    const save = async (text) => {
      if (isQuestion) return again(index, { ...message, text });
      message.text = text;
      await keep(current);
      return show();
    };
    const form = editor(message.text, isQuestion ? "Send" : "Save", save, show);
    shown[index].box.replaceWith(form);
    form.querySelector("textarea").focus();
  };
  const retry = message.role === "assistant" ? { Regenerate: () => again(index) } : {};
  return { ...retry, Edit: edit, Delete: remove };
}

const scroller = () => at("scroll");
let follows = true;         // does the view stay at the end while an answer grows?

function toEnd() {
  scroller().scrollTop = scroller().scrollHeight;
}

/* ---- conversations ---- */

function create() {
  current = { id: `${Date.now()}-${Math.random()}`, title: "", time: Date.now(), messages: [] };
  show();
  list();
  at("prompt").focus();
}

async function select(id) {
  current = running.get(id)?.conversation ?? await kept.load(id);
  at("side").classList.remove("open");
  show();
  list();
}

async function forget(id) {
  running.get(id)?.controller.abort();
  running.delete(id);
  await kept.remove(id);
  if (current.id === id) create();
  else list();
}

async function keep(conversation) {
  await kept.save(conversation).catch(sayNotKept);
  await list();
}

function sayNotKept(error) {
  at("kept").textContent = `This browser does not keep conversations: ${error.message}`;
}

async function list() {
  const found = await kept.list().catch((error) => {
    sayNotKept(error);
    return [];
  });
  at("conversations").replaceChildren(...found.map(({ id, title }) => {
    const opens = button(title || "Without a title", () => select(id), { className: "quiet title" });
    if (id === current.id) opens.setAttribute("aria-current", "true");
    const drops = button("×", () => forget(id), { className: "quiet", "aria-label": `Delete ${title}` });
    return element("li", {}, opens, drops);
  }));
}

/* ---- the server ---- */

async function poll() {
  try {
    const status = await (await request("status")).json();
    at("model").textContent = document.title = status.model;
    at("version").textContent = status.version;
    takeMedia(status.takes);
    at("state").textContent = status.ready ? "" : "The model is loading.";
    if (status.ready) return;
  } catch (error) {
    at("state").textContent = error.message;
  }
  setTimeout(poll, POLL_MS);
}

onMessage(send);
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", create);
at("open-side").addEventListener("click", () => at("side").classList.add("open"));
at("close-side").addEventListener("click", () => at("side").classList.remove("open"));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
scroller().addEventListener("scroll", () => {
  const { scrollHeight, scrollTop, clientHeight } = scroller();
  follows = scrollHeight - scrollTop - clientHeight < NEAR;
});
new ResizeObserver(() => { if (follows) toEnd(); }).observe(at("messages"));
create();
poll();
