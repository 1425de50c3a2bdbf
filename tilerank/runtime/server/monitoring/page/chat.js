/* The chat: a conversation that this page keeps, and the server does not. */
let controller = null;      // aborts the running request
let turns = [];             // messages of the conversation

async function ask(event) {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || controller) return;
  settle();
  controller = new AbortController();
  busy(true);
  const began = performance.now();
  try {
    const urls = await Promise.all([...at("picture").files].map(dataUrl));
    const parts = [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
    turns.push({ role: "user", content: urls.length ? parts : text });
    at("history-of-chat").append(turn("user", text, urls));
    at("prompt").value = at("picture").value = "";
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: controller.signal,
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(request()),
    });
    if (!response.ok) throw new Error(await sentence(response));
    for await (const chunk of events(response.body)) take(chunk, began);
  } catch (error) {
    if (error.name === "AbortError") at("note").textContent = "stopped";
    else fail(error instanceof TypeError ? "The server does not respond." : error.message);
  }
  controller = null;
  busy(false);
}

function request() {
  const system = at("system").value.trim();
  const temperature = at("temperature").valueAsNumber;
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    max_tokens: at("length").valueAsNumber,
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// Moves the finished answer into the conversation. An answer that failed leaves it, with its question.
function settle() {
  const answer = at("answer").textContent;
  if (at("answer").className === "bad") turns.pop();
  else if (turns.length) turns.push({ role: "assistant", content: answer });
  if (answer) at("history-of-chat").append(turn(at("answer").className || "assistant", answer, []));
  at("answer").className = "";
  at("reasoning").textContent = at("answer").textContent = at("note").textContent = "";
}

function turn(kind, text, urls) {
  const made = element("div", undefined, `turn ${kind}`);
  for (const url of urls) {
    const picture = element("img");
    picture.src = url;
    picture.alt = "picture of the message";
    made.append(picture);
  }
  made.append(text);
  return made;
}

function reset() {
  controller?.abort();
  turns = [];
  at("history-of-chat").replaceChildren();
  at("answer").className = "";
  at("reasoning").textContent = at("answer").textContent = at("note").textContent = "";
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

function take(chunk, began) {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const { delta } of chunk.choices) {
    at("reasoning").append(delta.reasoning_content ?? "");
    at("answer").append(delta.content ?? "");
  }
  if (chunk.usage) {
    const s = (performance.now() - began) / 1000;
    at("note").textContent = `${number(chunk.usage.completion_tokens)} tokens in ${seconds(s)}`;
  }
}

// Yields the data of server-sent events from network chunks of any size.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function fail(text) {
  at("answer").className = "bad";
  at("answer").append(`${at("answer").textContent ? "\n" : ""}${text}`);
}

function busy(is) {
  at("send").disabled = is;
  at("stop").disabled = !is;
}

at("form").addEventListener("submit", ask);
at("stop").addEventListener("click", () => controller?.abort());
at("reset").addEventListener("click", reset);
poll();
