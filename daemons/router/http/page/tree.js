// Prefix trees as pictures: a block is a run of tokens, what continues it stands to its right. Widths are logarithms of
// lengths, so that a long system prompt leaves room for what differs behind it.

import { getKey } from "./api.js";
import { compact, el, svg } from "./dom.js";

const [ROW, GAP, MIN_WIDTH] = [17, 2, 6];
const MAX_ROWS = 90;
const seen = new Map();

export function showTrees(container, note, mesh) {
  note.textContent = mesh.trees.map((tree) => `${compact(tree.num_tokens)} tokens in ${compact(tree.num_nodes)} runs`).join(" · ");
  if (!mesh.trees.length) {
    container.replaceChildren(el("p", "note", reason(mesh)));
    return;
  }
  const pictures = mesh.trees.map((tree) => {
    const title = mesh.trees.length > 1 ? el("h3", "", `Scheduler ${tree.scheduler + 1}`) : null;
    if (!tree.nodes.length) return el("figure", "tree", title, el("p", "note", "Nothing is cached."));
    return el("figure", "tree", title, draw(tree, container.clientWidth || 700));
  });
  container.replaceChildren(...pictures);
}

function reason(mesh) {
  if (getKey()) return "No scheduler reports its cache now, or this key is a tenant's.";
  const isAway = mesh.schedulers.some((peer) => peer.group === "connecting" || peer.group === "adopting");
  return isAway ? "The cache went with its worker. It fills again once the worker is back." : "No scheduler has reported its cache yet.";
}

function draw(tree, width) {
  const nodes = tree.nodes.map(([parent, start, tokens, subtree, number]) => ({ parent, start, tokens, subtree, number, children: [], depth: 0, rows: 0 }));
  const roots = [];
  for (const node of nodes) {
    const parent = nodes[node.parent];
    (parent ? parent.children : roots).push(node);
    node.depth = parent ? parent.depth + 1 : 0;
    node.left = parent ? parent.left + parent.width + GAP : 0;
    node.width = MIN_WIDTH + 9 * Math.log2(1 + node.tokens);
  }
  // Children come after their parents.
  for (const node of nodes.toReversed()) node.rows = Math.max(1, node.children.reduce((rows, child) => rows + child.rows, 0));
  const rows = Math.min(MAX_ROWS, place(roots, 0));
  const right = Math.max(...nodes.map((node) => node.left + node.width));
  const scale = (width - 2) / right;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${rows * ROW}`, class: "tree-picture", role: "img" });
  picture.setAttribute("height", String(rows * ROW));
  picture.append(svg("title", {}, `The prefix cache: ${tree.num_tokens} tokens in ${tree.num_nodes} runs`));
  const known = seen.get(tree.scheduler);
  for (const node of nodes) if (node.top < MAX_ROWS) picture.append(block(node, scale, known && !known.has(node.number)));
  seen.set(tree.scheduler, new Set(nodes.map((node) => node.number)));
  return picture;
}

/** Gives siblings their rows, the largest first; the number of the row behind them. */
function place(siblings, top) {
  for (const node of siblings) {
    node.top = top;
    place(node.children, top);
    top += node.rows;
  }
  return top;
}

function block(node, scale, isFresh) {
  const [x, y] = [node.left * scale, node.top * ROW];
  const [width, height] = [Math.max(2, node.width * scale), node.rows * ROW - GAP];
  const group = svg("g", { class: `run depth-${Math.min(node.depth, 5)}${isFresh ? " fresh" : ""}` });
  group.append(svg("rect", { x, y, width, height, rx: 3 }));
  const text = `${compact(node.tokens)}`;
  if (width > 8 * text.length + 6 && height >= 13) group.append(svg("text", { x: x + 6, y: y + Math.min(height / 2, 160) + 4 }, text));
  const below = node.children.length ? `, ${node.subtree} with all below` : "";
  group.append(svg("title", {}, `${node.tokens} tokens, positions ${node.start} to ${node.start + node.tokens}${below}`));
  return group;
}
