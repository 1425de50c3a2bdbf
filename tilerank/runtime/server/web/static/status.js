/* The status page: load, latencies, ranks and recent requests. */
import { hasKey, request } from "./api.js";
import { at, copy, element, number, seconds } from "./dom.js";

const POLL_MS = 2000, POINTS = 60, MOST_CORES = 256, ROWS = 10;
const CHART = { left: 44, top: 8, bottom: 128 };  // pixels
const speeds = [];
let before = null;          // the previous status

const bytes = (n) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024 || unit === "GiB") return `${n.toPrecision(3) * 1} ${unit}`;
    n /= 1024;
  }
};

function state(text, kind) {
  // Screen readers announce every assignment, so unchanged text is not assigned.
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").className = kind;
}

async function poll() {
  if (!document.hidden) {
    try {
      show(await (await request("status")).json());
    } catch (error) {
      forget(error.message, "bad");
    }
  }
  setTimeout(poll, POLL_MS);
}

function show(now) {
  at("model").textContent = document.title = now.model;
  at("version").textContent = now.version;
  connection(now.model);
  latest(now.latest, now.ended_in_last_minute);
  percentiles("first-token", now.first_token_s);
  percentiles("inter-token", now.inter_token_s);
  at("errors").textContent = number(now.errors);
  const context = now.ready ? `, context of ${number(now.context_length)} tokens` : "";
  at("about").textContent = `${now.weights}${context}, up for ${seconds(now.uptime_s)}`;
  if (!now.ready) return forget("not ready: the engine is starting or restarting", "wait");
  state(now.restarts ? `ready, restarted ${now.restarts === 1 ? "once" : `${now.restarts} times`}` : "ready", "good");
  speeds.push(rate(now, "generated_tokens"));
  if (speeds.length > POINTS) speeds.shift();
  at("speed").textContent = speeds.at(-1).toFixed(1);
  at("prompt-speed").textContent = number(Math.round(rate(now, "prompt_tokens")));
  before = now;
  at("running").textContent = number(now.running);
  at("waiting").textContent = number(now.waiting);
  const gigabytes = now.bytes_per_s / 1e9;
  at("bandwidth").textContent = gigabytes.toFixed(gigabytes < 10 ? 2 : gigabytes < 100 ? 1 : 0);
  const asked = now.cache_queried_tokens;
  at("hits").textContent = asked ? `${Math.round((100 * now.cache_hit_tokens) / asked)} %` : "–";
  at("cache").textContent = `${(100 * now.cache_used).toFixed(now.cache_used < 0.1 ? 1 : 0)} %`;
  at("cache-tokens").textContent = `of ${number(now.cache_tokens)} tokens`;
  at("cache-bar").style.width = `${100 * now.cache_used}%`;
  at("sources").hidden = !now.source_pages;
  at("source-pages").textContent = `${number(now.source_pages_used)} of ${number(now.source_pages)}`;
  chart();
  ranks(now.ranks);
}

// Growth of a total per second since the previous status.
function rate(now, name) {
  if (!before || now.clock_s <= before.clock_s || now[name] < before[name]) return 0;
  return (now[name] - before[name]) / (now.clock_s - before.clock_s);
}

function percentiles(row, found) {
  const cells = at(row).querySelectorAll("td");
  ["p50", "p95", "p99"].forEach((p, i) => { cells[i].textContent = found ? seconds(found[p]) : "–"; });
}

// The least number with one digit, times 1, 2 or 5, that is not below n.
function roundUp(n) {
  const power = 10 ** Math.floor(Math.log10(Math.max(n, 1)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((top) => top >= n);
}

function chart() {
  const top = roundUp(Math.max(...speeds));
  const { left, bottom } = CHART, height = bottom - CHART.top, right = at("history").clientWidth - 4;
  const x = (i) => left + ((right - left) * i) / (POINTS - 1);
  const y = (value) => bottom - (height * value) / top;
  const points = speeds.map((value, i) => `${x(i + POINTS - speeds.length)},${y(value)}`);
  at("history").querySelector("polyline").setAttribute("points", points.join(" "));
  const lines = [0, top / 2, top].flatMap((value) => [
    drawn("line", { x1: left, x2: right, y1: y(value), y2: y(value) }),
    drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)),
  ]);
  const times = [[0, "2 min ago", "start"], [POINTS - 1, "now", "end"]].map(([i, text, anchor]) =>
    drawn("text", { x: x(i), y: bottom + 18, "text-anchor": anchor }, text));
  at("axis").replaceChildren(...lines, ...times);
}

addEventListener("resize", chart);

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function forget(text, kind) {
  state(text, kind);
  before = null;
  for (const id of ["speed", "prompt-speed", "running", "waiting", "bandwidth", "cache"]) at(id).textContent = "–";
  at("cache-tokens").textContent = "";
  at("cache-bar").style.width = "0";
}

function ranks(list) {
  const nodes = new Map();
  const hosts = new Set(list.map((rank) => rank.host)).size > 1;
  for (const rank of list) {
    const name = (hosts ? `${rank.host}, ` : "") + (rank.nodes === "any" ? "not bound to a node" : `node ${rank.nodes}`);
    if (!nodes.has(name)) nodes.set(name, []);
    nodes.get(name).push(rank);
  }
  at("ranks").replaceChildren(...[...nodes].map(([name, members]) => {
    const node = element("div", { className: "node" });
    node.append(element("h3", {}, name), ...members.map(shown));
    return node;
  }));
}

function shown(rank) {
  const made = element("div", { className: "rank" });
  const title = element("p");
  title.append(element("strong", {}, `rank ${rank.rank}`), element("span", { className: "soft" }, rank.isa));
  const cores = element("div", { className: "cores" });
  cores.setAttribute("aria-hidden", "true");
  for (let i = Math.min(count(rank.cores), MOST_CORES); i > 0; i--) cores.append(element("i"));
  const waits = rank.wait_share === null ? "" : `, waits for other ranks ${Math.round(100 * rank.wait_share)} % of the time`;
  const local = rank.local_memory === null ? "" : `, ${Math.round(100 * rank.local_memory)} % in local memory`;
  made.append(title, cores,
    element("p", { className: "soft" }, rank.cores === "any" ? "any core" : `core${count(rank.cores) > 1 ? "s" : ""} ${rank.cores}${waits}`),
    element("p", { className: "soft" }, `${bytes(rank.weight_bytes)} weights, ${bytes(rank.cache_bytes)} cache${local}`));
  return made;
}

// Number of cores in a list: "0-3,8" is 5.
function count(list) {
  if (list === "any") return 0;
  return list.split(",").reduce((sum, part) => {
    const [first, last = first] = part.split("-").map(Number);
    return sum + last - first + 1;
  }, 0);
}

// Those that run come first; the line above the table counts the ends of the last minute.
function latest(list, ends) {
  const rows = [...list.filter((r) => r.took_s === null), ...list.filter((r) => r.took_s !== null)].slice(0, ROWS);
  at("none").hidden = list.length > 0;
  const counts = Object.entries(ends).map(([end, n]) => `${number(n)} ${end}`);
  at("ends").textContent = counts.length ? `Ended in the last minute: ${counts.join(", ")}` : "";
  at("latest").replaceChildren(...rows.map((request) => {
    const row = element("tr");
    const s = (request.took_s ?? request.age_s) - request.first_s;
    const fast = request.first_s !== null && request.completion_tokens > 1 && s > 0;
    row.append(
      element("td", {}, `${seconds(request.age_s)} ago`),
      element("td", {}, number(request.prompt_tokens)),
      element("td", {}, number(request.completion_tokens)),
      element("td", { className: "wide" }, request.first_s === null ? "" : seconds(request.first_s)),
      element("td", { className: "wide" }, fast ? ((request.completion_tokens - 1) / s).toFixed(1) : ""),
      element("td", {}, request.took_s === null ? "" : seconds(request.took_s)),
      element("td", {}, request.end ?? (request.first_s === null ? "waiting" : "running")));
    return row;
  }));
}

// Lines that connect a program with this server. The shell has the key, not the line.
function connection(model) {
  const base = new URL("v1", location.href).href;
  at("base-url").textContent = base;
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] });
  const quoted = `'${body.replaceAll("'", "'\\''")}'`;
  const shown = hasKey() ? '-H "Authorization: Bearer $TILERANK_API_KEY" ' : "";
  at("curl").textContent = `curl ${base}/chat/completions ${shown}-H 'Content-Type: application/json' -d ${quoted}`;
  const key = hasKey() ? 'os.environ["TILERANK_API_KEY"]' : '"any"';
  const imports = `${hasKey() ? "import os; " : ""}from openai import OpenAI`;
  at("python").textContent = `${imports}; client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})`;
  at("needs-key").hidden = !hasKey();
}

for (const button of document.querySelectorAll("[data-copies]")) {
  const code = at(button.dataset.copies);
  button.addEventListener("click", () => copy(button, code.textContent, code));
}
poll();
