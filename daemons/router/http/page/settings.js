// Sampling settings: fields that are left empty are not sent, so the model's own defaults hold.

import { $, el } from "./dom.js";

const STORED = "radixmesh.settings";
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.05 }],
];
const TEXTS = ["form", "system", "stop"];

/** Makes the fields, filled as they were left. */
export function setUpSettings() {
  for (const [name, label, limits] of FIELDS) {
    const input = el("input");
    Object.assign(input, { id: name, type: "number", placeholder: "default", ...limits });
    $("sampling").append(el("label", "field", el("span", "", label), input));
  }
  const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  for (const name of names()) if (stored[name] !== undefined) $(name).value = stored[name];
  for (const name of names()) $(name).addEventListener("input", store);
  $("form").addEventListener("input", showForm);
  $("reset-button").addEventListener("click", () => {
    for (const [name] of FIELDS) $(name).value = "";
    store();
  });
  showForm();
}

/** The fields that are set, as the API takes them. */
export function sampling() {
  const chosen = {};
  for (const [name] of FIELDS) if ($(name).value.trim() !== "") chosen[name] = Number($(name).value);
  const stops = $("stop").value.split("|").filter(Boolean);
  if (stops.length) chosen.stop = stops;
  return chosen;
}

export const isChat = () => $("form").value === "chat";
export const systemMessage = () => (isChat() ? $("system").value.trim() : "");

const names = () => [...FIELDS.map(([name]) => name), ...TEXTS];

function store() {
  localStorage.setItem(STORED, JSON.stringify(Object.fromEntries(names().map((name) => [name, $(name).value]))));
}

function showForm() {
  $("system-field").hidden = !isChat();
}
