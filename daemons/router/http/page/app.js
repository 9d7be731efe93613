// The page's frame: views, theme, key, models.

import { ApiError, get, getKey, setKey } from "./api.js";
import { retry, setUpChat, startAnew, stop } from "./chat.js";
import { $, el } from "./dom.js";
import { setUpMesh, showMesh } from "./mesh.js";
import { setUpSettings } from "./settings.js";
import { setUpTheme } from "./theme.js";

const VIEWS = ["chat", "mesh"];

function open(view, { focus = false } = {}) {
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    $(`view-${name}`).hidden = name !== view;
    if (focus && name === view) tab.focus();
  }
  if (location.hash !== `#${view}`) history.replaceState(null, "", `#${view}`);
  showMesh(view === "mesh");
  if (view === "chat" && !focus) $("input").focus();
}

function askForKey() {
  $("key-input").value = getKey();
  $("key-dialog").showModal();
}

async function loadModels() {
  try {
    const { data } = await get("/v1/models");
    const chosen = $("model").value;
    $("model").replaceChildren(...data.map(({ id }) => Object.assign(el("option", "", id), { value: id })));
    if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
    nameModel();
    if (!data.length) setTimeout(loadModels, 2000);
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askForKey();
    else setTimeout(loadModels, 2000);
  }
}

function nameModel() {
  $("empty-model").textContent = $("model").value || "the model";
}

function onKey(event) {
  if (event.key === "Escape" && !$("key-dialog").open) stop();
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const actions = {
    Digit1: () => open("chat"),
    Digit2: () => open("mesh", { focus: true }),
    KeyN: startAnew,
    KeyR: () => retry(askForKey),
  };
  const action = actions[event.code];
  if (action) {
    event.preventDefault();
    action();
  }
}

function start() {
  setUpTheme();
  setUpSettings();
  setUpChat(askForKey);
  setUpMesh();
  for (const name of VIEWS) {
    $(`tab-${name}`).addEventListener("click", () => open(name, { focus: name === "mesh" }));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) open(VIEWS[(VIEWS.indexOf(name) + step + VIEWS.length) % VIEWS.length], { focus: true });
    });
  }
  $("model").addEventListener("input", nameModel);
  $("key-button").addEventListener("click", askForKey);
  $("key-dialog").addEventListener("close", () => {
    if ($("key-dialog").returnValue !== "ok") return;
    setKey($("key-input").value.trim());
    loadModels();
  });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", () => open(location.hash === "#mesh" ? "mesh" : "chat"));
  open(location.hash === "#mesh" ? "mesh" : "chat");
  loadModels();
}

start();
