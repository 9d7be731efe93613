// /openapi.json as a page.

import { get, ApiError } from "./api.js";
import { $, el } from "./dom.js";
import { setUpTheme } from "./theme.js";

function operation(path, method, described, schemas) {
  const reference = described.requestBody?.content["application/json"].schema.$ref;
  const schema = reference ? schemas[reference.split("/").at(-1)] : null;
  const key = described.security.length ? "" : "no key needed";
  const head = el("summary", "", el("b", `verb ${method}`, method.toUpperCase()), el("code", "", path), el("span", "sub", described.summary), el("span", "sub open", key));
  const details = el("details", "operation", head);
  if (schema) details.append(fields(schema), curl(path, schema));
  else details.append(el("pre", "", el("code", "", `curl ${location.origin}${path}`)));
  details.dataset.words = `${path} ${described.summary} ${schema ? Object.keys(schema.properties).join(" ") : ""}`.toLowerCase();
  return details;
}

function fields(schema) {
  const required = new Set(schema.required);
  const rows = Object.entries(schema.properties).map(([name, type]) =>
    el("tr", "", el("td", "", el("code", "", name), required.has(name) ? el("span", "needed", "required") : null), el("td", "", words(type))),
  );
  return el("table", "", el("tbody", "", ...rows));
}

function words(type) {
  if (type.anyOf) return type.anyOf.filter((each) => each.type !== "null").map(words).join(" or ");
  if (Array.isArray(type.type)) return type.type.join(" or ");
  if (type.items) return `list of ${words(type.items)}`;
  if (type.enum) return type.enum.map((value) => JSON.stringify(value)).join(", ");
  const range = type.minimum === undefined ? "" : `, ${type.minimum} to ${type.maximum}`;
  const length = type.maxLength === undefined ? "" : `, at most ${type.maxLength} characters`;
  return `${type.type ?? "any JSON: docs/http.md"}${range}${length}`;
}

function curl(path, schema) {
  const examples = { messages: [{ role: "user", content: "Hello" }], prompt: "Hello", input: "Hello", text: "Hello", tokens: [1, 2, 3], query: "a question", documents: ["one", "two"], items: ["one", "two"] };
  const names = schema.required.length ? schema.required : ["text", "prompt"].filter((name) => name in schema.properties).slice(0, 1);
  const body = JSON.stringify(Object.fromEntries(names.map((name) => [name, examples[name] ?? ""])));
  return el("pre", "", el("code", "", `curl ${location.origin}${path} \\\n  -H 'content-type: application/json' \\\n  -d '${body}'`));
}

async function start() {
  setUpTheme();
  try {
    const whole = await get("/openapi.json");
    $("version").textContent = whole.info.version;
    for (const [path, methods] of Object.entries(whole.paths))
      for (const [method, described] of Object.entries(methods)) $("paths").append(operation(path, method, described, whole.components.schemas));
  } catch (error) {
    const hint = error instanceof ApiError && error.status === 401 ? " Enter the key on the chat page first." : "";
    $("paths").append(el("p", "error", error.message + hint));
  }
  $("filter").addEventListener("input", () => {
    const wanted = $("filter").value.toLowerCase();
    for (const each of $("paths").children) each.hidden = !(each.dataset.words ?? "").includes(wanted);
  });
}

start();
