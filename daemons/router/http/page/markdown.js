// The little Markdown that models write: paragraphs, headings, lists, code, bold, italic. Makes nodes, never markup.

import { el } from "./dom.js";

/** Nodes of a text, complete or still growing. */
export function render(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  let list = null;
  const flush = () => {
    if (paragraph.length) nodes.push(el("p", "", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  const endList = () => {
    if (list) nodes.push(list);
    list = null;
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = line.match(/^\s*```\s*([\w+#.-]*)/);
    const heading = line.match(/^(#{1,4})\s+(.*)/);
    const item = line.match(/^\s*(?:([-*+])|(\d+)[.)])\s+(.*)/);
    if (fence) {
      flush();
      endList();
      const code = [];
      while (++i < lines.length && !/^\s*```\s*$/.test(lines[i])) code.push(lines[i]);
      nodes.push(codeBlock(code.join("\n"), fence[1]));
    } else if (heading) {
      flush();
      endList();
      nodes.push(el(`h${heading[1].length + 2}`, "", ...inline(heading[2])));
    } else if (item) {
      flush();
      const tag = item[1] ? "ul" : "ol";
      if (list && list.localName !== tag) endList();
      list ??= el(tag);
      if (item[2] && !list.children.length) list.start = Number(item[2]);
      list.append(el("li", "", ...inline(item[3])));
    } else if (!line.trim()) {
      flush();
      endList();
    } else {
      endList();
      paragraph.push(line);
    }
  }
  flush();
  endList();
  return nodes;
}

function codeBlock(code, language) {
  const copy = el("button", "link copy", "copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code);
    copy.textContent = "copied";
  });
  return el("div", "code", el("div", "code-head", el("span", "", language || "text"), copy), el("pre", "", el("code", "", code)));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    const [whole, code, bold, italic] = match;
    nodes.push(code !== undefined ? el("code", "", code) : bold !== undefined ? el("strong", "", bold) : el("em", "", italic));
    end = match.index + whole.length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}
