import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { unpackFloats, unpackInts } from "../src/arrays.js";
import { InvalidRequestError } from "../src/errors.js";
import { requestFrom } from "../src/options.js";
import { toolCalls } from "../src/tools.js";

test("what is left out stays unset, zeros are sent", () => {
  assert.deepEqual(requestFrom("x", { temperature: undefined, topK: null }), { text: "x", sampling: {}, stop: {} });
  const { sampling, stop } = requestFrom("x", { temperature: 0, topK: 0, seed: 0, logprobs: 0, minTokens: 0, ignoreEos: false });
  assert.deepEqual(sampling, { temperature: 0, topK: 0, seed: "0", numTopLogprobs: 0 });
  assert.deepEqual(stop, { minTokens: 0, ignoreEos: false });
});

test("inputs are a text, ids or a chat", () => {
  assert.deepEqual(unpackInts(requestFrom(new Int32Array([1, -2]), {}).promptIds), [1, -2]);
  assert.deepEqual(unpackInts(requestFrom([], {}).promptIds), []);
  const messages = [{ role: "user", content: "hi", name: "Ada" }, { role: "assistant", content: null }];
  assert.deepEqual(requestFrom({ messages }, {}).chat.messages, [
    { role: "user", content: "hi", extraJson: '{"name":"Ada"}' },
    { role: "assistant", content: "", extraJson: "" },
  ]);
});

test("a bias is two arrays side by side, from an object or a map", () => {
  for (const logitBias of [{ 7: 1.5, 9: -100 }, new Map([[7, 1.5], [9, -100]])]) {
    const { sampling } = requestFrom("x", { logitBias });
    assert.deepEqual(unpackInts(sampling.logitBiasIds), [7, 9]);
    assert.deepEqual(unpackFloats(sampling.logitBiasValues), [1.5, -100]);
  }
});

test("seeds have 64 bits", () => {
  const seeds = [2n ** 64n - 1n, "18446744073709551615", 5].map((seed) => requestFrom("x", { seed }).sampling.seed);
  assert.deepEqual(seeds, ["18446744073709551615", "18446744073709551615", "5"]);
});

for (const [what, options] of Object.entries({
  "an unknown option": { max_tokens: 5 },
  "a seed that a number cannot hold": { seed: 2 ** 60 },
  "a seed of 65 bits": { seed: 2n ** 64n },
  "a negative count": { maxTokens: -1 },
  "half a count": { topK: 1.5 },
  "text where a number belongs": { temperature: "hot" },
  "a number where text belongs": { stop: [1] },
  "a word where yes or no belongs": { ignoreEos: "yes" },
  "an id of 33 bits": { stopIds: [2 ** 31] },
  "a bias that is no number": { logitBias: { 1: "much" } },
})) {
  test(`${what} is refused before anything is sent`, () => {
    assert.throws(() => requestFrom("x", options), InvalidRequestError);
  });
}

test("so is an input that is none", () => {
  for (const input of [undefined, null, 5, {}, { messages: "hi" }, [1.5]]) {
    assert.throws(() => requestFrom(input, {}), InvalidRequestError);
  }
});

test("a constraint is one of six, and choices are a grammar", () => {
  assert.equal(requestFrom("x", {}).grammar, undefined);
  assert.deepEqual(requestFrom("x", { jsonSchema: { type: "object" } }).grammar, { jsonSchema: '{"type":"object"}' });
  assert.deepEqual(requestFrom("x", { regex: "a+" }).grammar, { regex: "a+" });
  assert.deepEqual(requestFrom("x", { choices: ["a b", "é"] }).grammar, { ebnf: 'root ::= "a\\U00000020b" | "\\U000000E9"' });
  for (const wrong of [{ regex: "a", ebnf: "b" }, { choices: [] }, { choices: [""] }, { jsonSchema: 5 }, { regex: 5 }]) {
    assert.throws(() => requestFrom("x", /** @type {any} */ (wrong)), InvalidRequestError);
  }
});

const TOOLS = [{ name: "weather", description: "By city.", parameters: { type: "object", properties: { city: { enum: ["Rome"] } } } }, { name: "time" }];
const CHAT = { messages: [{ role: "user", content: "hi" }] };

test("any JSON, structural tags and thoughts", () => {
  assert.deepEqual(requestFrom("x", { jsonObject: true }).grammar, { anyJson: true });
  assert.equal(requestFrom("x", { jsonObject: false }).grammar, undefined);
  const thought = { begin: "<think>", end: "</think>", isAlways: false };
  assert.deepEqual(requestFrom("x", { structuralTag: { format: 1 }, thought: {} }).grammar, { structuralTag: '{"format":1}', thought });
});

test("tools and reasoning are the template's", () => {
  const { chat, grammar } = requestFrom(CHAT, { tools: TOOLS, enableThinking: false, reasoningEffort: "low", templateArgs: { x: 1 } });
  assert.deepEqual(JSON.parse(chat.toolsJson).map((/** @type {any} */ tool) => tool.function.name), ["weather", "time"]);
  assert.deepEqual(JSON.parse(chat.templateArgsJson), { x: 1, enable_thinking: false, reasoning_effort: "low" });
  assert.equal(grammar, undefined);
  assert.equal(requestFrom(CHAT, { tools: TOOLS, toolChoice: "none" }).chat.toolsJson, undefined);
});

test("a required call is a list of calls of the chosen tools", () => {
  const tags = (/** @type {any} */ options) => JSON.parse(requestFrom(CHAT, { tools: TOOLS, ...options }).grammar.structuralTag).format.elements[1];
  assert.equal(tags({ toolChoice: "required" }).tags.length, 2);
  assert.equal(tags({ toolChoice: "required" }).stop_after_first, false);
  assert.equal(tags({ toolChoice: "required", parallelToolCalls: false }).stop_after_first, true);
  const [only, ...others] = tags({ toolChoice: { name: "time" } }).tags;
  assert.deepEqual([only.begin, others], ['{"name": "time", "arguments": ', []]);
  const text = '<think>[1]</think>[{"name": "time", "arguments": {}}]';
  assert.deepEqual(toolCalls(text, {}), [{ name: "time", arguments: {} }]);
  const quoting = '[{"name": "time", "arguments": {"at": "</think>"}}]';
  for (const whole of [quoting, `1</think>\n${quoting}`]) assert.equal(toolCalls(whole, {})[0].arguments.at, "</think>");
  for (const cut of ["", "[", "5", "[5]", text]) assert.throws(() => toolCalls(cut), SyntaxError);
});

for (const [input, options] of /** @type {[any, any][]} */ ([
  ["x", { tools: TOOLS }],
  ["x", { enableThinking: true }],
  [CHAT, { toolChoice: "required" }],
  [CHAT, { tools: [{ type: "function", function: { name: "x" } }], toolChoice: "required" }],
  [CHAT, { tools: TOOLS, toolChoice: { name: "other" } }],
  [CHAT, { tools: TOOLS, toolChoice: "any" }],
  [CHAT, { tools: TOOLS, toolChoice: "required", regex: "a" }],
  [CHAT, { thought: {} }],
  [CHAT, { jsonObject: true, regex: "a" }],
])) {
  test(`${JSON.stringify(options).slice(-60)} is refused`, () => {
    assert.throws(() => requestFrom(input, options), InvalidRequestError);
  });
}

test("the types have every option, and no other", () => {
  const [types, code] = ["index.d.ts", "options.js"].map((name) => readFileSync(new URL(`../src/${name}`, import.meta.url), "utf8"));
  const body = /export interface Options \{\n([^]*?)\n\}/.exec(types)?.[1] ?? "";
  const typed = [...body.matchAll(/^  (\w+)\?:/gm)].map(([, name]) => name);
  const documented = [...code.matchAll(/@property \{.*\} \[(\w+)\]/g)].map(([, name]) => name);
  assert.deepEqual(typed.sort(), documented.sort());
  assert.ok(typed.length > 30);
});
