import assert from "node:assert/strict";
import { test } from "node:test";

import { packInts } from "../src/arrays.js";
import { BrokenStreamError } from "../src/errors.js";
import { Tracker } from "../src/tracker.js";

const resolved = { requestId: "r", model: "m", seeds: ["18446744073709551615", "7"], promptIds: packInts([1], "") };

function message({ deltas = [], finished = [], ...more }) {
  return { resolved: null, promptLogprobs: null, deltas, finished, ...more };
}

function delta(index, firstOutputIndex, textOffset, ids, text) {
  return { index, firstOutputIndex, textOffset: String(textOffset), ids: packInts(ids, ""), text, logprobs: null };
}

function end(index, numOutput, textBytes) {
  const usage = { promptTokens: 1, outputTokens: numOutput, cachedTokens: 0 };
  return { index, numOutput, textBytes: String(textBytes), reason: "FINISH_REASON_STOP", usage, stop: "", error: null };
}

function begun() {
  const tracker = new Tracker();
  tracker.take(message({ resolved }));
  tracker.take(message({ deltas: [delta(1, 0, 0, [5, 6], "œ🗼"), delta(0, 0, 0, [9], "")] }));
  return tracker;
}

test("chunks come in order of index, positions count tokens and UTF-8 bytes", () => {
  const tracker = begun();
  const chunks = tracker.take(message({ deltas: [delta(1, 2, 6, [-1], "x"), delta(0, 1, 0, [2], "y")], finished: [end(0, 2, 1)] }));
  assert.deepEqual(chunks.map(({ index, text, ids }) => ({ index, text, ids })), [
    { index: 0, text: "y", ids: [2] },
    { index: 1, text: "x", ids: [-1] },
  ]);
  assert.equal(chunks[0].finish.reason, "stop");
  assert.equal(tracker.isComplete, false);
  tracker.take(message({ finished: [end(1, 3, 7)] }));
  assert.equal(tracker.isComplete, true);
});

test("the state for another router holds ids, bytes and what has finished, and rises", () => {
  const tracker = begun();
  tracker.take(message({ finished: [end(0, 1, 0)] }));
  const expected = [
    { outputIds: packInts([9], ""), textBytes: "0", isFinished: true },
    { outputIds: packInts([5, 6], ""), textBytes: "6", isFinished: false },
  ];
  assert.deepEqual(tracker.resume(), { resolved, outputs: expected, resumption: 1 });
  assert.equal(tracker.resume().resumption, 2);
});

for (const [what, broken] of Object.entries({
  "a token twice": { deltas: [delta(1, 1, 6, [6], "")] },
  "a missing token": { deltas: [delta(1, 3, 6, [6], "")] },
  "text twice": { deltas: [delta(1, 2, 3, [6], "")] },
  "missing text": { deltas: [delta(1, 2, 7, [6], "")] },
  "an output that was not asked for": { deltas: [delta(2, 0, 0, [6], "")] },
  "an end with too few tokens": { finished: [end(1, 1, 6)] },
  "an end with too much text": { finished: [end(1, 2, 9)] },
  "another request": { resolved: { ...resolved, requestId: "s" } },
  "another seed": { resolved: { ...resolved, seeds: ["18446744073709551614", "7"] } },
})) {
  test(`${what} is a broken stream`, () => {
    assert.throws(() => begun().take(message(broken)), BrokenStreamError);
  });
}

test("nothing may follow an end", () => {
  const tracker = begun();
  tracker.take(message({ finished: [end(1, 2, 6)] }));
  assert.throws(() => tracker.take(message({ deltas: [delta(1, 2, 6, [1], "")] })), BrokenStreamError);
});

test("prompt logprobs come in parts, again after a resumption, and never with a gap", () => {
  const tracker = begun();
  const part = (...values) => {
    const tokenLogprobs = Buffer.alloc(4 * values.length);
    values.forEach((value, i) => tokenLogprobs.writeFloatLE(value, 4 * i));
    return { tokenLogprobs, numTop: 0, topIds: Buffer.alloc(0), topLogprobs: Buffer.alloc(0) };
  };
  tracker.take(message({ promptLogprobs: part(-1, -2), promptLogprobsStart: 1 }));
  tracker.take(message({ promptLogprobs: part(-3), promptLogprobsStart: 3 }));
  tracker.take(message({ promptLogprobs: part(-1, -2, -3, -4), promptLogprobsStart: 0 }));
  assert.deepEqual(tracker.promptLogprobs.tokenLogprobs, [-1, -2, -3, -4]);
  assert.throws(() => tracker.take(message({ promptLogprobs: part(-6), promptLogprobsStart: 6 })), BrokenStreamError);
});
