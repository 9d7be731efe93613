// The chat: one conversation, one answer at a time.

import { ApiError, stream } from "./api.js";
import { $, el, duration } from "./dom.js";
import { render } from "./markdown.js";
import { isChat, sampling, systemMessage } from "./settings.js";

const STORED = "radixmesh.conversation";

let conversation = JSON.parse(sessionStorage.getItem(STORED) ?? "[]");
let running = null;

export function setUpChat(askForKey) {
  const input = $("input");
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return stop();
    const text = input.value.trim();
    if (!text) return;
    input.value = "";
    fit(input);
    conversation.push({ role: "user", content: text });
    show();
    answer(askForKey);
  });
  input.addEventListener("input", () => fit(input));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!running) $("composer").requestSubmit();
    }
  });
  $("new-button").addEventListener("click", startAnew);
  $("retry-button").addEventListener("click", () => retry(askForKey));
  show();
}

export function stop() {
  running?.abort();
}

export function startAnew() {
  stop();
  conversation = [];
  show();
  $("input").focus();
}

/** Drops the last answer and asks again. */
export function retry(askForKey) {
  if (running) return;
  while (conversation.length && conversation.at(-1).role !== "user") conversation.pop();
  if (!conversation.length) return;
  show();
  answer(askForKey);
}

async function answer(askForKey) {
  const message = { role: "assistant", content: "" };
  const started = performance.now();
  running = new AbortController();
  conversation.push(message);
  const view = messageView(message);
  $("messages").append(view.element);
  setBusy(true);
  let first = 0;
  let usage = null;
  try {
    for await (const event of stream(...request(), running.signal)) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      const text = (isChat() ? choice?.delta?.content : choice?.text) ?? "";
      if (text && !first) first = performance.now();
      message.content += text;
      message.reason = choice?.finish_reason ?? message.reason;
      view.update(message, true);
      follow();
    }
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped";
    else message.error = error.message;
    if (error instanceof ApiError && error.status === 401) askForKey();
  }
  running = null;
  message.note = note(message, usage, started, first);
  view.update(message, false);
  setBusy(false);
  store();
  follow();
}

function request() {
  const common = { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true }, ...sampling() };
  const said = conversation.slice(0, -1).filter((message) => !message.error || message.content);
  if (!isChat()) return ["/v1/completions", { max_tokens: 128, ...common, prompt: said.at(-1).content }];
  const system = systemMessage();
  const messages = said.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  return ["/v1/chat/completions", { ...common, messages }];
}

function note(message, usage, started, first) {
  const parts = [];
  const seconds = (performance.now() - (first || started)) / 1000;
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${(usage.completion_tokens / seconds).toFixed(0)} tok/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  if (first) parts.push(`first after ${duration((first - started) / 1000)}`);
  if (message.reason === "length") parts.push("cut at max tokens");
  if (message.reason === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function messageView(message) {
  const body = el("div", "body");
  const foot = el("div", "foot");
  const element = el("li", `message ${message.role}`, el("div", "who", message.role === "user" ? "You" : "Model"), body, foot);
  const update = (now, isGrowing) => {
    body.replaceChildren(...(now.role === "user" ? [el("p", "", now.content)] : render(now.content)));
    if (now.error) body.append(el("p", "error", now.error));
    else if (isGrowing) (body.lastElementChild ?? body).append(el("span", "caret"));
    foot.textContent = now.note ?? "";
    element.classList.toggle("growing", isGrowing);
  };
  update(message, false);
  return { element, update };
}

function show() {
  $("messages").replaceChildren(...conversation.map((message) => messageView(message).element));
  setBusy(false);
  store();
  follow(true);
}

function setBusy(isBusy) {
  $("empty").hidden = conversation.length > 0;
  const send = $("send-button");
  send.textContent = isBusy ? "Stop" : "Send";
  send.classList.toggle("stop", isBusy);
  $("retry-button").disabled = isBusy || !conversation.some((message) => message.role === "user");
}

function store() {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(conversation));
  } catch {
    // Larger than the browser keeps: the conversation lasts as long as the tab is not reloaded.
  }
}

function follow(always = false) {
  const scroll = $("scroll");
  const isNearEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120;
  if (always || isNearEnd) scroll.scrollTop = scroll.scrollHeight;
}

function fit(input) {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 220)}px`;
}
