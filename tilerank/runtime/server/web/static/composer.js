/* The form in which users write messages and attach pictures, videos and sound. */
import { at, button, element } from "./dom.js";

const NAMES = { image: "pictures", video: "videos", audio: "sound" };
let kinds = [];             // of media that the model takes
let attached = [];          // media of the message that is being written: kind, name and url

export function takeMedia(accepted) {
  kinds = accepted;
  at("attach").hidden = !kinds.length;
  at("file").accept = kinds.map((kind) => `${kind}/*`).join();
}

// Shows whether an answer is being written; it can then be stopped, and nothing can be sent.
export function showRunning(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

// Calls `send` with each message that is written. It returns whether it takes it.
export function onMessage(send) {
  const form = at("form"), prompt = at("prompt");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if ((!text && !attached.length) || !send(text, attached)) return;
    prompt.value = "";
    attached = [];
    show();
    grow();
  });
  prompt.addEventListener("keydown", (event) => {
    // On a touch screen the key starts a new line: there is no Shift at hand.
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (!sends || matchMedia("(pointer: coarse)").matches) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

export function player({ kind, name, url }) {
  if (kind === "image") return element("img", { src: url, alt: name });
  return element(kind, { src: url, controls: true, title: name });
}

async function attach(files) {
  at("refused").textContent = "";
  for (const file of files) {
    const kind = file.type.split("/")[0];
    if (kinds.includes(kind)) attached.push({ kind, name: file.name, url: await dataUrl(file) });
    else at("refused").textContent = `${file.name}: ${takes()}`;
  }
  show();
}

function takes() {
  return kinds.length ? `the model takes ${kinds.map((kind) => NAMES[kind]).join(" and ")}.` : "the model takes text only.";
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function show() {
  at("attached").replaceChildren(...attached.map((medium) => {
    const drop = () => {
      attached = attached.filter((other) => other !== medium);
      show();
    };
    const remove = button("×", drop, { className: "quiet", "aria-label": `Remove ${medium.name}` });
    return element("div", { className: "medium" }, player(medium), remove);
  }));
}

function grow() {
  const prompt = at("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;  // the borders
}

at("prompt").addEventListener("input", grow);
at("attach").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", async () => {
  await attach([...at("file").files]);
  at("file").value = "";
});
at("prompt").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
