import assert from "node:assert/strict";
import { test } from "node:test";

import { unpackFloats, unpackInts } from "../src/arrays.js";
import { InvalidRequestError } from "../src/errors.js";
import { requestFrom } from "../src/options.js";

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

test("a constraint is one of four, and choices are a grammar", () => {
  assert.equal(requestFrom("x", {}).grammar, undefined);
  assert.deepEqual(requestFrom("x", { jsonSchema: { type: "object" } }).grammar, { jsonSchema: '{"type":"object"}' });
  assert.deepEqual(requestFrom("x", { regex: "a+" }).grammar, { regex: "a+" });
  assert.deepEqual(requestFrom("x", { choices: ["a b", "é"] }).grammar, { ebnf: 'root ::= "a\\U00000020b" | "\\U000000E9"' });
  for (const wrong of [{ regex: "a", ebnf: "b" }, { choices: [] }, { choices: [""] }, { jsonSchema: 5 }, { regex: 5 }]) {
    assert.throws(() => requestFrom("x", /** @type {any} */ (wrong)), InvalidRequestError);
  }
});
