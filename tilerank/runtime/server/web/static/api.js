/* Requests to the server, and the API key, which this tab keeps and asks for where the server requires it. */
import { button, element } from "./dom.js";

const KEY = "tilerank-key";
let dialog = null;          // resolves when a key is entered or the dialog is closed

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

// Returns the response to a request. Throws an Error with a sentence for users.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { cache: "no-store", ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not respond.");
    });
    if (response.ok) return response;
    const message = await sentence(response);
    if (response.status !== 401 || !await askForKey(key)) throw new Error(message);
  }
}

export const post = (path, body, signal) => request(path, {
  method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
});

// Yields the objects of a stream of server-sent events, which network chunks cut anywhere.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The connection to the server broke.");
    });
    if (done) throw new Error("The server ended the answer before it was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;  // empty, or a comment that keeps the connection open
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server responded with status ${response.status}.`;
  }
}

// Returns whether there is another key than `refused`, which the server did not take. All requests share one dialog.
function askForKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return Promise.resolve(true);
  dialog ??= new Promise((done) => {
    const field = element("input", {
      id: "key", type: "password", autocomplete: "off", spellcheck: false, required: true,
    });
    const says = refused ? "The server does not accept this API key." : "This server requires an API key.";
    const box = element("dialog", { id: "key-dialog", "aria-labelledby": "key-title" });
    let entered = false;
    const form = element("form", {
      onsubmit: (event) => {
        event.preventDefault();
        sessionStorage.setItem(KEY, field.value.trim());
        entered = true;
        box.close();
      },
    }, element("h2", { id: "key-title" }, "API key"), element("p", { className: refused ? "bad" : "" }, says),
    element("label", { htmlFor: "key" }, "Key, which only this tab keeps"), field,
    element("p", { className: "buttons" }, element("button", {}, "Continue"),
      button("Cancel", () => box.close(), { className: "quiet" })));
    box.append(form);
    box.onclose = () => {
      box.remove();
      dialog = null;
      done(entered);
    };
    document.body.append(box);
    box.showModal();
  });
  return dialog;
}
