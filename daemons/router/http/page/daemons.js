// The daemons as cards in the order that a request passes them, with lines between those that talk.

import { compact, el, percent, svg } from "./dom.js";

const MAX_CELLS = 128;
const GROUP_WORDS = { serving: "serving", connecting: "coming back", adopting: "reading its KV", standby: "standby" };

export function showDaemons(container, mesh, isFlowing) {
  const text = [
    card("Tokenizers", mesh.tokenizers.num_replicas ? "good" : "bad", "asked as needed", [["replicas", mesh.tokenizers.num_replicas]]),
    ...mesh.detokenizers.map((peer, i) => {
      const name = mesh.detokenizers.length > 1 ? `Detokenizer ${i + 1}` : "Detokenizer";
      return card(name, peer.is_connected ? "good" : "bad", peer.is_connected ? "connected" : "away", [["open outputs", peer.num_entries]]);
    }),
  ];
  const router = card("Router", mesh.status === "serving" ? "good" : "fair", mesh.status, [
    ["requests", compact(mesh.router.num_requests)],
    ["wait for a scheduler", compact(mesh.router.num_waiting_for_scheduler)],
    ["journal", percent(mesh.router.journal_bytes / (mesh.router.journal_max_bytes || 1))],
    ["submitted again", compact(mesh.router.resumed_total)],
  ]);
  const schedulers = mesh.schedulers.map((peer, i) => schedulerCard(peer, i, mesh.schedulers.length));
  const workers = mesh.schedulers.map((peer, i) => workerCard(peer, i, mesh.schedulers.length));
  const columns = [text, [router], schedulers, workers].map((cards) => el("div", "column", ...cards));
  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  container.replaceChildren(lines, ...columns);
  const links = [
    ...text.map((each) => [each, router]),
    ...schedulers.map((each) => [router, each]),
    ...schedulers.map((each, i) => [each, workers[i]]),
  ];
  drawLines(container, lines, links, isFlowing);
}

function card(name, kind, state, facts, extra = null) {
  const rows = facts.map(([label, value]) => el("div", "fact", el("span", "", label), el("b", "", String(value))));
  return el("article", `daemon ${kind}`, el("header", "", el("i", "dot"), el("h3", "", name), el("span", "daemon-state", state)), ...rows, extra);
}

function schedulerCard(peer, i, count) {
  const state = !peer.is_connected ? "away" : peer.is_draining ? "draining" : "connected";
  const kind = !peer.is_connected ? "bad" : peer.is_draining ? "fair" : "good";
  return card(count > 1 ? `Scheduler ${i + 1}` : "Scheduler", kind, state, [
    ["queued", compact(peer.num_waiting)],
    ["tokens to prefill", compact(peer.waiting_tokens)],
    ["prefix hits", percent(peer.hit_rate)],
    ["epoch", peer.epoch || "–"],
  ]);
}

function workerCard(peer, i, count) {
  const group = peer.is_connected ? peer.group : "";
  const kind = group === "serving" ? "good" : group === "connecting" || !group ? "bad" : "fair";
  const name = count > 1 ? `Worker group ${i + 1}` : "Worker group";
  return card(name, kind, GROUP_WORDS[group] ?? "not known", [
    ["slots", peer.num_slots ? `${peer.num_running} of ${peer.num_slots}` : peer.num_running],
    ["KV in use", `${compact(peer.kv_used_tokens)} of ${compact(peer.kv_tokens)}`],
    ["KV cached", `${compact(peer.kv_cached_tokens)} tokens`],
  ], slotCells(peer));
}

function slotCells(peer) {
  const count = Math.min(peer.num_slots, MAX_CELLS);
  const busy = Math.round((peer.num_running / (peer.num_slots || 1)) * count);
  const cells = el("div", "slots");
  cells.setAttribute("aria-hidden", "true");
  for (let i = 0; i < count; i++) cells.append(el("i", i < busy ? "busy" : ""));
  return cells;
}

function drawLines(container, lines, links, isFlowing) {
  const origin = container.getBoundingClientRect();
  lines.setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
  for (const [from, to] of links) {
    const [a, b] = [from.getBoundingClientRect(), to.getBoundingClientRect()];
    if (b.left <= a.right) continue; // Stacked on a narrow screen: the order says it.
    const [x1, y1, x2, y2] = [a.right - origin.left, a.top + 24 - origin.top, b.left - origin.left, b.top + 24 - origin.top];
    const middle = (x1 + x2) / 2;
    const isWell = ![from, to].some((each) => each.classList.contains("bad"));
    lines.append(svg("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, class: isWell ? (isFlowing ? "flowing" : "") : "broken" }));
  }
}
