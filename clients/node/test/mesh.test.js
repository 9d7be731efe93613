// Against a running mesh on the tiny model. RADIXMESH_NODE_TEST: JSON with routers ({address: pid}, two of them) and the
// path of the model's recitations; tests/mesh/test_node_client.py starts the mesh and sets it.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readFileSync } from "node:fs";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { AbortedError, DeadlineExceededError, InvalidRequestError, NotFoundError, RadixMesh, UnavailableError } from "../src/index.js";

const given = process.env.RADIXMESH_NODE_TEST;
const { routers = {}, recitations: path = "" } = given ? JSON.parse(given) : {};
const options = { skip: given ? false : "RADIXMESH_NODE_TEST is not set: pytest tests/mesh/test_node_client.py sets it" };
const addresses = Object.keys(routers);
const recitations = given ? JSON.parse(readFileSync(path, "utf8")) : [];
const mesh = given ? new RadixMesh({ routers: addresses }) : null;
after(() => mesh?.close());

function inputOf({ prompt, messages }) {
  return messages ? { messages } : prompt;
}

function recitation(name) {
  return recitations.find((entry) => entry.name === name);
}

test("every recitation but the long ones, several at a time", options, async () => {
  const greedy = { temperature: 0 };
  const queue = recitations.filter((entry) => entry.expected_ids.length < 320);
  assert.ok(queue.length > 20);
  async function work() {
    for (let entry = queue.shift(); entry; entry = queue.shift()) {
      const done = await mesh.complete(inputOf(entry), greedy);
      assert.deepEqual(done.promptIds, entry.prompt_ids, entry.name);
      assert.deepEqual(done.outputs[0].ids, entry.expected_ids, entry.name);
      assert.equal(done.text, entry.expected, entry.name);
      const { reason, usage } = done.outputs[0].finish;
      assert.deepEqual([reason, usage.outputTokens], ["stop", entry.expected_ids.length]);
    }
  }
  await Promise.all(Array.from({ length: 12 }, work));
});

test("several sampled outputs with logprobs, equal by seed", options, async () => {
  const asked = { n: 2, seed: 2n ** 64n - 1n, temperature: 1, logprobs: 3, promptLogprobs: true, maxTokens: 24, ignoreEos: true };
  const stream = mesh.generate("Lorelei", asked);
  const ids = [[], []];
  const logprobs = [];
  for await (const chunk of stream) {
    ids[chunk.index].push(...chunk.ids);
    logprobs.push(...(chunk.logprobs?.topLogprobs ?? []));
    if (chunk.finish) assert.deepEqual([chunk.finish.reason, chunk.finish.stopId], ["length", null]);
  }
  assert.equal(stream.seeds[0], 2n ** 64n - 1n);
  assert.deepEqual(ids.map((one) => one.length), [24, 24]);
  assert.notDeepEqual(ids[0], ids[1]);
  assert.equal(logprobs.length, 48);
  for (const top of logprobs) assert.ok(top.length === 3 && top[0] >= top[1] && top[1] >= top[2] && top[0] <= 0);
  assert.equal(stream.promptLogprobs.tokenLogprobs.length, stream.promptIds.length - 1);
  const again = await mesh.complete("Lorelei", { ...asked, promptLogprobs: false });
  assert.deepEqual(again.outputs.map((output) => output.ids), ids);
});

test("tokens of texts and chats, and the models", options, async () => {
  for (const name of ["jing-ye-si", "chat.name-ada"]) {
    assert.deepEqual(await mesh.tokenize(inputOf(recitation(name))), recitation(name).prompt_ids);
  }
  const [model] = await mesh.models();
  assert.deepEqual(model, { name: "tiny-llama", baseModel: "", vocabSize: 768, maxTotalLen: 2048, numSchedulers: 1 });
});

test("errors say what is wrong, by class and reason", options, async () => {
  for (const [kind, reason, input, more] of [
    [InvalidRequestError, "EMPTY_PROMPT", [], {}],
    [InvalidRequestError, "TOKEN_OUT_OF_VOCABULARY", [100_000], {}],
    [InvalidRequestError, "INVALID_ARGUMENT", "x", { temperature: -1 }],
    [InvalidRequestError, "INVALID_CHAT", { messages: [{ role: "wizard", content: "x" }] }, {}],
    [NotFoundError, "UNKNOWN_MODEL", "x", { model: "gpt-0" }],
  ]) {
    await assert.rejects(mesh.complete(input, more), (error) => error instanceof kind && error.reason === reason);
  }
  await assert.rejects(mesh.complete([100_000]), ({ metadata }) => metadata.vocab_size === "768");
  await assert.rejects(mesh.tokenize({ messages: [] }), InvalidRequestError);
});

test("abort by id, by signal and by leaving the loop", options, async () => {
  const endless = { ignoreEos: true, maxTokens: 1900, requestId: "node-abort" };
  let reason;
  for await (const chunk of mesh.generate("Lorelei", endless)) {
    if (!reason && chunk.ids.length) reason = await mesh.abort("node-abort");
    if (chunk.finish) assert.equal(chunk.finish.reason, "abort");
  }
  assert.equal(reason, "found");
  assert.equal(await mesh.abort("node-nobody"), "unknown");

  const controller = new AbortController();
  const signalled = mesh.complete("Lorelei", { ...endless, requestId: "node-signal", signal: controller.signal });
  setTimeout(() => controller.abort(), 200);
  await assert.rejects(signalled, AbortedError);

  for await (const chunk of mesh.generate("Lorelei", { ...endless, requestId: "node-left" })) if (chunk.ids.length) break;
  for (const requestId of ["node-signal", "node-left"]) assert.notEqual(await later(requestId), "found");
});

test("a deadline ends the request, a mesh that is not there ends it too", options, async () => {
  await assert.rejects(mesh.complete("Lorelei", { ignoreEos: true, deadlineMs: 150 }), DeadlineExceededError);
  const nobody = new RadixMesh({ routers: ["127.0.0.1:1"], resumeTimeoutMs: 300 });
  await assert.rejects(nobody.complete("x"), UnavailableError);
  await assert.rejects(nobody.models(), UnavailableError);
  nobody.close();
});

test("kill -9 of the router in the middle of a stream: another one goes on", options, async () => {
  await survive(mesh, recitation("gettysburg-address"));
});

test("kill -9 of the only router: it goes on when the router is back", options, async () => {
  const [killed, alive] = [killedRouters[0], addresses.find((address) => address !== killedRouters[0])];
  assert.ok(killed && alive, "the test before kills one router");
  const lone = new RadixMesh({ routers: [alive] });
  await survive(lone, recitation("twelve-days"));
  lone.close();
});

test("the example runs", options, async () => {
  const script = fileURLToPath(new URL("../examples/stream.js", import.meta.url));
  const { stdout } = await promisify(execFile)(process.execPath, [script, "古池", ...addresses]);
  const { prompt, expected, expected_ids: ids } = recitation("furu-ike");
  assert.equal(stdout, `${prompt}${expected}\n[stop, ${ids.length} tokens, resumed 0 times]\n`);
});

const killedRouters = [];

/** Streams `entry` and kills the serving router after the tenth token: the answer must be whole. */
async function survive(client, entry) {
  const stream = client.generate(inputOf(entry), { temperature: 0 });
  const [ids, seen] = [[], new Set()];
  let [text, isKilled] = ["", false];
  for await (const chunk of stream) {
    ids.push(...chunk.ids);
    text += chunk.text;
    seen.add(stream.router);
    if (!isKilled && ids.length >= 10) {
      isKilled = true;
      killedRouters.push(stream.router);
      process.kill(routers[stream.router], "SIGKILL");
    }
  }
  assert.equal(isKilled, true);
  assert.ok(ids.length > 100, "the kill came in the middle");
  assert.ok(stream.numResumptions >= 1);
  assert.deepEqual(ids, entry.expected_ids);
  assert.equal(text, entry.expected);
}

/** What an abort finds once the mesh has had time to notice that the client left. Asked once: asking aborts, too. */
async function later(requestId) {
  await new Promise((resolve) => setTimeout(resolve, 1500));
  return mesh.abort(requestId);
}
