// What has been received of a request: enough to continue it at any router, and to notice any gap or repetition.
import { unpackInts } from "./arrays.js";
import { BrokenStreamError } from "./errors.js";
import { finishFrom, logprobsFrom } from "./results.js";

/** Positions of all outputs. No I/O. */
export class Tracker {
  constructor() {
    /** The stream's first message: the request with every default filled in. @type {any} */
    this.resolved = null;
    /** @type {import("./results.js").Logprobs | null} */
    this.promptLogprobs = null;
    this.resumption = 0;
    /** @type {{idParts: Buffer[], numIds: number, textBytes: number, isFinished: boolean}[]} */
    this.outputs = [];
  }

  /** Whether every output has finished. */
  get isComplete() {
    return this.outputs.length > 0 && this.outputs.every((output) => output.isFinished);
  }

  /**
   * What is new in a message, a chunk per index. Throws BrokenStreamError for a gap or a repetition.
   *
   * @param {any} response
   * @returns {import("./results.js").Chunk[]}
   */
  take(response) {
    if (response.resolved) this.#takeResolved(response.resolved);
    if (response.promptLogprobs) {
      this.#takePromptLogprobs(logprobsFrom(response.promptLogprobs), response.promptLogprobsStart ?? 0);
    }
    const deltas = new Map(response.deltas.map((/** @type {any} */ delta) => [delta.index, delta]));
    const ends = new Map(response.finished.map((/** @type {any} */ end) => [end.index, end]));
    const indices = [...new Set([...deltas.keys(), ...ends.keys()])].sort((a, b) => a - b);
    return indices.map((index) => this.#chunk(index, deltas.get(index), ends.get(index)));
  }

  /** The state for another router, as a higher resumption. */
  resume() {
    this.resumption += 1;
    const outputs = this.outputs.map(({ idParts, textBytes, isFinished }) => ({
      outputIds: Buffer.concat(idParts),
      textBytes: String(textBytes),
      isFinished,
    }));
    return { resolved: this.resolved, outputs, resumption: this.resumption };
  }

  /** @param {any} resolved */
  #takeResolved(resolved) {
    if (this.resolved === null) {
      this.resolved = resolved;
      this.outputs = resolved.seeds.map(() => ({ idParts: [], numIds: 0, textBytes: 0, isFinished: false }));
    } else if (resolved.requestId !== this.resolved.requestId || String(resolved.seeds) !== String(this.resolved.seeds)) {
      throw new BrokenStreamError("a resumed stream began with another request");
    }
  }

  /**
   * Parts follow each other from the position that was asked for; a resumed stream begins with the first one again.
   *
   * @param {import("./results.js").Logprobs} part
   * @param {number} start prompt position of its first value; 0: the first position, 1
   */
  #takePromptLogprobs(part, start) {
    const known = (this.promptLogprobs ??= { tokenLogprobs: [], topIds: [], topLogprobs: [] });
    const numKnown = known.tokenLogprobs.length;
    const first = Math.max(this.resolved?.sampling?.promptLogprobsStart ?? 0, 1);
    const numBefore = Math.max(start, 1) - first;
    if (numBefore > numKnown) throw new BrokenStreamError(`prompt logprobs from ${start} came where ${numKnown + first} was due`);
    this.promptLogprobs = {
      tokenLogprobs: known.tokenLogprobs.concat(part.tokenLogprobs.slice(numKnown - numBefore)),
      topIds: known.topIds.concat(part.topIds.slice(numKnown - numBefore)),
      topLogprobs: known.topLogprobs.concat(part.topLogprobs.slice(numKnown - numBefore)),
    };
  }

  /**
   * @param {number} index
   * @param {any} delta
   * @param {any} end
   * @returns {import("./results.js").Chunk}
   */
  #chunk(index, delta, end) {
    const output = this.outputs[index];
    if (!output) throw new BrokenStreamError(`output ${index} of ${this.outputs.length}`);
    if (output.isFinished) throw new BrokenStreamError(`output ${index} went on after its finish`);
    if (delta) {
      const got = `token ${delta.firstOutputIndex}, byte ${delta.textOffset}`;
      if (delta.firstOutputIndex !== output.numIds || Number(delta.textOffset) !== output.textBytes) {
        throw new BrokenStreamError(`${got} came where ${output.numIds}, ${output.textBytes} were due`);
      }
      output.idParts.push(delta.ids);
      output.numIds += delta.ids.length / 4;
      output.textBytes += Buffer.byteLength(delta.text);
    }
    if (end) {
      if (end.numOutput !== output.numIds || Number(end.textBytes) !== output.textBytes) {
        const got = `${end.numOutput} tokens, ${end.textBytes} bytes`;
        throw new BrokenStreamError(`finished with ${got} after ${output.numIds}, ${output.textBytes}`);
      }
      output.isFinished = true;
    }
    return {
      index,
      text: delta?.text ?? "",
      ids: delta ? unpackInts(delta.ids) : [],
      logprobs: delta?.logprobs ? logprobsFrom(delta.logprobs) : null,
      finish: end ? finishFrom(end) : null,
    };
  }
}
