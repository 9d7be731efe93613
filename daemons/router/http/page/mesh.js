// The live view: asks /mesh twice a second while it is looked at, and draws what has come.

import { getKey, get, ApiError } from "./api.js";
import { showDaemons } from "./daemons.js";
import { $, compact, el, duration, percent } from "./dom.js";
import { Changes } from "./changes.js";
import { sparkline } from "./sparkline.js";
import { showTrees } from "./tree.js";

const PERIOD_MS = 500;
const HIDDEN_PERIOD_MS = 5000;
const KEPT = 120;

const rates = [];
const changes = new Changes();
let isShown = false;
let last = null;
let timer = 0;

export function setUpMesh() {
  document.addEventListener("visibilitychange", tick);
  tick();
}

export function showMesh(isNowShown) {
  isShown = isNowShown;
  tick();
}

async function tick() {
  clearTimeout(timer);
  const isLive = isShown && !document.hidden;
  try {
    if (isLive) take(await get("/mesh"));
    else setStatus((await get("/health")).status);
  } catch (error) {
    lose(error);
  }
  clearTimeout(timer);
  timer = setTimeout(tick, isLive ? PERIOD_MS : HIDDEN_PERIOD_MS);
}

function lose(error) {
  const isAway = !(error instanceof ApiError);
  setStatus(isAway ? "router away" : error.status === 503 ? "not serving" : "key refused");
  if (isAway) changes.routerLost();
  banner(isAway ? "The router does not answer. This page tries again by itself." : error.message);
  showEvents();
}

function take(mesh) {
  setStatus(mesh.status);
  if (mesh.access === "limited") {
    banner(getKey() ? "The key is not taken: only state and version are shown." : "Without a key, this router shows its state and version alone. Press the key to enter one.");
    $("tiles").replaceChildren(tile("State", mesh.status), tile("Version", mesh.version));
    return;
  }
  banner("");
  changes.take(mesh);
  const rate = rateSince(last, mesh);
  if (rate !== null) rates.push(rate);
  if (rates.length > KEPT) rates.shift();
  last = mesh;
  showTiles(mesh);
  showDaemons($("daemons"), mesh, (rate ?? 0) > 0);
  showTrees($("trees"), $("tree-note"), mesh);
  showRequests(mesh);
  showEvents();
}

/** Output tokens a second between two answers; null if the counters do not belong together. */
function rateSince(before, now) {
  if (!before || now.time_s === before.time_s) return null;
  const tokens = now.router.output_tokens_total - before.router.output_tokens_total;
  return tokens < 0 ? null : tokens / (now.time_s - before.time_s);
}

function showTiles(mesh) {
  const sum = (name) => mesh.schedulers.reduce((total, scheduler) => total + scheduler[name], 0);
  const slots = sum("num_slots");
  const [running, waiting] = [sum("num_running"), sum("num_waiting") + mesh.router.num_waiting_for_scheduler];
  const kv = sum("kv_tokens");
  const cached = sum("kv_cached_tokens");
  const used = sum("kv_used_tokens");
  const served = mesh.schedulers.filter((scheduler) => scheduler.is_connected);
  const hits = served.length ? served.reduce((total, scheduler) => total + scheduler.hit_rate, 0) / served.length : 0;
  // The mean of the last three: loads come twice a second.
  const recent = rates.slice(-3);
  const rate = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
  $("tiles").replaceChildren(
    tile("Output", compact(rate), "tok/s", sparkline(rates, Math.max(24, rates.length))),
    tile("Running", compact(running), slots ? `of ${compact(slots)} slots` : "outputs", bar([[running / (slots || running || 1), "used"]])),
    tile("Queued", compact(waiting), waiting ? `${compact(sum("waiting_tokens"))} tokens to prefill` : "nothing waits"),
    tile("KV memory", kv ? percent(used / kv) : "–", `in use, ${percent(cached / (kv || 1))} cached`, bar([[used / (kv || 1), "used"], [cached / (kv || 1), "cached"]])),
    tile("Prefix hits", percent(hits), "of prompt tokens", bar([[hits, "cached"]])),
    tile("Since start", compact(mesh.router.output_tokens_total), `tokens, ${compact(mesh.router.requests_total)} requests, ${duration(mesh.time_s - mesh.up_since_s)}`),
  );
}

function tile(name, value, note = "", picture = null) {
  return el("div", "tile", el("div", "tile-name", name), el("div", "tile-value", value), el("div", "tile-note", note), picture);
}

function bar(parts) {
  const whole = el("div", "meter");
  for (const [share, kind] of parts) {
    const part = el("i", kind);
    part.style.width = `${Math.min(100, 100 * share)}%`;
    whole.append(part);
  }
  return whole;
}

function showRequests(mesh) {
  const count = mesh.router.num_requests;
  $("requests-note").textContent = count ? `${compact(count)} at this router${count > mesh.requests.length ? `, the oldest ${mesh.requests.length} shown` : ""}` : "";
  if (!mesh.requests.length) {
    $("requests").replaceChildren(el("p", "note", "No request runs or waits."));
    return;
  }
  const rows = mesh.requests.map((request) => {
    const progress = bar([[request.output_tokens / (request.max_tokens || 1), "used"]]);
    const state = el("span", `state ${request.state.split(" ")[0]}`, request.state);
    const where = request.scheduler === null ? "–" : `scheduler ${request.scheduler + 1}`;
    return el("tr", "", cell(state), cell(request.model), cell(where), cell(compact(request.prompt_tokens), "number"), cell(compact(request.output_tokens), "number"), cell(progress), cell(duration(request.age_s), "number"));
  });
  const heads = ["State", "Model", "At", "Prompt", "Output", "of max tokens", "Age"].map((name, i) => el("th", [3, 4, 6].includes(i) ? "number" : "", name));
  $("requests").replaceChildren(el("table", "", el("thead", "", el("tr", "", ...heads)), el("tbody", "", ...rows)));
}

const cell = (content, className = "") => el("td", className, content);

function showEvents() {
  const entries = changes.entries;
  if ($("events").childElementCount === entries.length && entries.length && $("events").dataset.first === String(entries[0].number)) return;
  $("events").dataset.first = String(entries[0]?.number ?? "");
  const items = entries.map(({ kind, time, text }) => el("li", kind, el("time", "", time), el("span", "", text)));
  $("events").replaceChildren(...(items.length ? items : [el("li", "quiet-event", el("span", "", "Nothing has happened since this page was opened."))]));
}

function banner(text) {
  $("mesh-banner").hidden = !text;
  $("mesh-banner").textContent = text;
}

function setStatus(state) {
  $("status").lastElementChild.textContent = state;
  $("status").className = `status ${state === "serving" ? "good" : state === "router away" ? "bad" : "fair"}`;
}
