// What a client gets: chunks of streams and whole completions, made of messages.
import { unpackFloats, unpackInts } from "./arrays.js";
import { errorFromProto } from "./errors.js";

/**
 * Natural logarithms of the model's own distribution, one entry a token; alternatives most likely first.
 *
 * @typedef {{tokenLogprobs: number[], topIds: number[][], topLogprobs: number[][]}} Logprobs
 */
/** @typedef {{promptTokens: number, outputTokens: number, cachedTokens: number}} Usage */
/**
 * How an output ended. stop, stopId: what ended it, if that did.
 *
 * @typedef {{reason: "stop" | "length" | "abort" | "error", usage: Usage, stop: string, stopId: number | null,
 *   error: import("./errors.js").RadixMeshError | null}} Finish
 */
/**
 * New output of one index. Text may lag behind ids; finish is set on an index's last chunk.
 *
 * @typedef {{index: number, text: string, ids: number[], logprobs: Logprobs | null, finish: Finish | null}} Chunk
 */
/** @typedef {Chunk} CompletionOutput one whole output */
/**
 * All outputs of a request, in order of index. text: of the first.
 *
 * @typedef {{requestId: string, model: string, promptIds: number[], outputs: CompletionOutput[], text: string,
 *   promptLogprobs: Logprobs | null, numResumptions: number}} Completion
 */
/** @typedef {{name: string, baseModel: string, vocabSize: number, maxTotalLen: number, numSchedulers: number}} Model */

/** @param {any} message @returns {Logprobs} */
export function logprobsFrom(message) {
  const tokenLogprobs = unpackFloats(message.tokenLogprobs);
  const [ids, values] = [unpackInts(message.topIds), unpackFloats(message.topLogprobs)];
  /** @param {number[]} flat */
  const rows = (flat) => tokenLogprobs.map((_, i) => flat.slice(i * message.numTop, (i + 1) * message.numTop));
  return { tokenLogprobs, topIds: rows(ids), topLogprobs: rows(values) };
}

/** @param {any} message @returns {Finish} */
export function finishFrom(message) {
  const { promptTokens = 0, outputTokens = 0, cachedTokens = 0 } = message.usage ?? {};
  return {
    reason: message.reason.replace(/^FINISH_REASON_/, "").toLowerCase(),
    usage: { promptTokens, outputTokens, cachedTokens },
    stop: message.stop,
    stopId: message.stopId ?? null,
    error: message.error ? errorFromProto(message.error) : null,
  };
}

/** @param {any} info @returns {Model} */
export function modelFrom(info) {
  const { name, vocabSize, maxTotalLen } = info.model;
  return { name, baseModel: info.baseModel, vocabSize, maxTotalLen, numSchedulers: info.numSchedulers };
}

/**
 * Appends a chunk to its output.
 *
 * @param {CompletionOutput} output
 * @param {Chunk} chunk
 */
export function addChunk(output, chunk) {
  output.text += chunk.text;
  for (const id of chunk.ids) output.ids.push(id);
  if (chunk.logprobs) {
    output.logprobs ??= { tokenLogprobs: [], topIds: [], topLogprobs: [] };
    output.logprobs.tokenLogprobs.push(...chunk.logprobs.tokenLogprobs);
    output.logprobs.topIds.push(...chunk.logprobs.topIds);
    output.logprobs.topLogprobs.push(...chunk.logprobs.topLogprobs);
  }
  output.finish = chunk.finish ?? output.finish;
}
