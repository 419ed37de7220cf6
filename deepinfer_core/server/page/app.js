// Joins the parts: settings, keys, the conversation, and a look at /status once a second.

import { Chart } from "/page/charts.js";
import { Chat, problemOf } from "/page/chat.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;

// --- the server ---

let apiKey = ""; // in memory alone
let modelName = null;

function headers() {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}

function state(name, text) {
  $("state").dataset.state = name;
  $("state-text").textContent = text;
}

// --- the conversation ---

function settings() {
  const number = (id) => (Number.isFinite($(id).valueAsNumber) ? $(id).valueAsNumber : undefined);
  return {
    model: modelName,
    system: $("system").value.trim(),
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
  };
}

const chat = new Chat({
  log: $("log"),
  empty: $("empty"),
  settings,
  request: (body, signal) =>
    fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal,
    }),
});

function grow() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function buttons() {
  $("send").hidden = chat.busy;
  $("stop").hidden = !chat.busy;
  $("send").disabled = modelName === null || !$("message").value.trim();
}

async function send() {
  const text = $("message").value.trim();
  if (!text || chat.busy || modelName === null) return;
  $("message").value = "";
  grow();
  const answered = chat.send(text);
  buttons();
  await answered;
  buttons();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  $("message").focus();
});
$("message").addEventListener("input", () => {
  grow();
  buttons();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.querySelectorAll(".starter").forEach((button) =>
  button.addEventListener("click", () => {
    $("message").value = button.textContent;
    grow();
    buttons();
    $("message").focus();
  }),
);
$("new-chat").addEventListener("click", () => {
  chat.reset();
  buttons();
  $("message").focus();
});
document.addEventListener("keydown", (event) => {
  if ($("settings").open) return;
  if (event.key === "Escape" && chat.busy) {
    chat.stop();
    $("message").focus();
  }
  const typing = event.target.closest?.("input, textarea");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("message").focus();
  }
});

// --- settings and colours ---

$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => {
  apiKey = $("key").value.trim();
  look();
});

const THEMES = ["auto", "light", "dark"];
const NAMES = { auto: "Auto", light: "Light", dark: "Dark" };

function paint(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme-name").textContent = NAMES[theme];
  $("theme").setAttribute("aria-label", `Colours: ${NAMES[theme]}`);
}

$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  paint(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
paint("auto");

// --- live figures ---

const count = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value < 10 ? value.toFixed(1) : count(value));
const time = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${seconds.toFixed(2)} s`);
const percent = (share) => `${Math.round(share * 100)}%`;

const charts = {
  rate: new Chart($("plot-rate"), { what: "Tokens generated a second", series: ["now"], show: (v) => `${rate(v)}/s` }),
  ttft: new Chart($("plot-ttft"), { what: "Time to first token", series: ["p50", "p95"], show: time }),
  tpot: new Chart($("plot-tpot"), { what: "Time for each further token", series: ["p50", "p95"], show: time }),
  pool: new Chart($("plot-pool"), { what: "KV pages in use", series: ["used"], show: percent, top: 1, unmarked: true }),
};
const lanes = new Map();

/** Return the parts of a lane's row, made when it is first seen. */
function laneRow(name) {
  if (!lanes.has(name)) {
    const row = document.createElement("li");
    row.className = "lane";
    const head = document.createElement("div");
    head.className = "head";
    const title = document.createElement("span");
    title.textContent = name;
    const value = document.createElement("b");
    head.append(title, value);
    const meter = document.createElement("div");
    meter.className = "meter";
    meter.setAttribute("role", "meter");
    meter.setAttribute("aria-label", `Lane ${name} busy`);
    meter.setAttribute("aria-valuemin", "0");
    meter.setAttribute("aria-valuemax", "100");
    const busy = document.createElement("i");
    busy.className = "busy";
    meter.append(busy);
    const plot = document.createElement("figure");
    plot.className = "plot";
    row.append(head, meter, plot);
    $("lanes").append(row);
    const chart = new Chart(plot, { what: `Lane ${name} busy`, series: ["busy"], show: percent, top: 1, unmarked: true });
    lanes.set(name, { value, meter, busy, chart });
  }
  return lanes.get(name);
}

let before = null;

/** Show a status, and what has changed since the one before. */
function show(status) {
  const { engine, server } = status;
  const now = { at: server.uptime_seconds, made: engine.generated_tokens_total, read: engine.prompt_tokens_total, lanes: engine.lanes };
  if (before && now.at < before.at) before = null; // the server was started again
  const seconds = before ? now.at - before.at : 0;
  const made = seconds > 0 ? (now.made - before.made) / seconds : 0;
  const read = seconds > 0 ? (now.read - before.read) / seconds : 0;
  $("rate").textContent = rate(made);
  $("rate-in").textContent = rate(read);
  $("total").textContent = count(now.made);
  charts.rate.push(made);

  for (const [id, name] of [["ttft", "ttft_seconds"], ["tpot", "tpot_seconds"]]) {
    const { p50 = null, p95 = null } = engine.latency[name];
    $(id).textContent = p50 === null ? "\u2013" : time(p50);
    $(`${id}95`).textContent = p95 === null ? "\u2013" : time(p95);
    charts[id].push(p50, p95);
  }

  const { total_pages: total, available_pages: available, cached_pages: cached } = engine.pool;
  const used = total - available;
  const idle = Math.min(cached, available); // cached pages that somebody reads count as used
  $("pool").textContent = count((100 * used) / total);
  $("pool-used").textContent = count(used);
  $("pool-cached").textContent = count(idle);
  $("pool-total").textContent = count(total);
  const meter = $("pool-meter");
  meter.setAttribute("aria-valuenow", String(Math.round((100 * used) / total)));
  meter.querySelector(".used").style.width = `${(100 * used) / total}%`;
  meter.querySelector(".cached").style.width = `${(100 * idle) / total}%`;
  charts.pool.push(used / total);

  for (const [name, { busy_seconds: busy }] of Object.entries(now.lanes)) {
    const row = laneRow(name);
    const share = seconds > 0 ? Math.min(1, Math.max(0, (busy - (before.lanes[name]?.busy_seconds ?? 0)) / seconds)) : 0;
    row.value.textContent = percent(share);
    row.meter.setAttribute("aria-valuenow", String(Math.round(100 * share)));
    row.busy.style.width = percent(share);
    row.chart.push(share);
  }
  const overlap = engine.prefill_decode_overlap ? "" : ", no overlap";
  $("policy").textContent = `policy ${engine.policy}${overlap}`;
  const { waiting, prefilling, decoding } = engine.queues;
  $("running").textContent = count(prefilling + decoding);
  $("waiting").textContent = count(waiting);
  $("done").textContent = count(engine.finished.stop + engine.finished.length);
  before = now;
}

let looking = false;

/** Ask the server how it is; what goes wrong is said in the bar, and asked again. */
async function look() {
  if (looking || document.hidden) return;
  looking = true;
  try {
    const response = await fetch("/status", { headers: headers(), cache: "no-store" });
    if (response.status === 401) {
      state("down", "needs an API key");
      modelName = null;
      return;
    }
    if (!response.ok && response.status !== 503) throw new Error(await problemOf(response));
    const status = await response.json();
    const ready = status.server?.state === "ready" && status.engine;
    modelName = ready ? status.model.name : null;
    state(ready ? "ready" : "wait", ready ? "ready" : (status.server?.state ?? "loading"));
    if (status.model) $("model").textContent = `${status.model.name}, ${count(status.model.max_model_len)} tokens of context`;
    if (status.engine) show(status);
    $("stale").textContent = "";
  } catch {
    modelName = null;
    state("down", "no answer");
    $("stale").textContent = "The figures are the last that the server gave.";
  } finally {
    looking = false;
    buttons();
  }
}

look();
setInterval(look, EVERY_MS);
document.addEventListener("visibilitychange", look);
$("message").focus({ preventScroll: true });
