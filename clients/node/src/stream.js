// One request: goes on at another router, or the same once it is back, when one dies.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { unpackInts } from "./arrays.js";
import { AbortedError, OverloadedError, UnavailableError, errorFromRpc, isRetriable, isTransportError } from "./errors.js";
import { Tracker } from "./tracker.js";

const MIN_PAUSE_MS = 50;
const MAX_PAUSE_MS = 250;

/**
 * Iterate once, with `for await`; leaving early (break, return, an exception, the signal) aborts the request.
 *
 * @implements {AsyncIterable<import("./results.js").Chunk>}
 */
export class GenerateStream {
  #routers;
  #request;
  #isIdGiven;
  #deadline;
  #resumeTimeoutMs;
  #signal;
  #tracker = new Tracker();
  #numTries = 0;
  /** @type {import("@grpc/grpc-js").ClientReadableStream<any> | null} */
  #call = null;
  #cancel = () => this.#call?.cancel();
  #chunks;

  /** Address of the router that serves the request now; "" before the first try. */
  router = "";
  /** How often the stream was continued after a loss. */
  numResumptions = 0;

  /**
   * Made by RadixMesh.generate.
   *
   * @param {{address: string, stub: any, metadata: any}[]} routers in the order in which they are tried
   * @param {Record<string, any>} request
   * @param {import("./options.js").Options} options
   * @param {number} resumeTimeoutMs
   */
  constructor(routers, request, { requestId, deadlineMs, signal }, resumeTimeoutMs) {
    this.#routers = routers;
    this.#isIdGiven = Boolean(requestId);
    this.#request = { ...request, requestId: requestId || randomUUID() };
    this.#deadline = deadlineMs == null ? null : performance.now() + deadlineMs;
    this.#resumeTimeoutMs = resumeTimeoutMs;
    this.#signal = signal;
    this.#chunks = this.#run();
  }

  /** Under which the mesh knows the request; final once the first chunk has come. */
  get requestId() {
    return this.#request.requestId;
  }

  /** Name of the model that answers; "" before the first chunk. */
  get model() {
    return this.#tracker.resolved?.model ?? "";
  }

  /** The prompt as token ids; empty before the first chunk. */
  get promptIds() {
    const resolved = this.#tracker.resolved;
    return resolved ? unpackInts(resolved.promptIds) : [];
  }

  /** One per output. */
  get seeds() {
    return (this.#tracker.resolved?.seeds ?? []).map(BigInt);
  }

  /** If asked for, once the first chunk of output 0 has come. */
  get promptLogprobs() {
    return this.#tracker.promptLogprobs;
  }

  [Symbol.asyncIterator]() {
    return this.#chunks;
  }

  /** Chunks of all tries; throws the first error of an output after its last chunk. */
  async *#run() {
    /** @type {number | null} */
    let lostSince = null;
    let numLost = 0;
    let failure = null;
    while (!this.#tracker.isComplete) {
      let error;
      try {
        for await (const response of this.#open()) {
          if (response.resolved && this.#tracker.resumption) this.numResumptions += 1;
          [lostSince, numLost] = [null, 0];
          for (const chunk of this.#tracker.take(response)) {
            if (chunk.finish?.reason === "error") failure ??= chunk.finish.error;
            yield chunk;
          }
        }
        if (this.#tracker.isComplete) break;
        error = new UnavailableError("the router ended the stream too early", "NO_REPLICA");
      } catch (rpcError) {
        if (this.#signal?.aborted) throw new AbortedError("the request was aborted by its signal", "ABORTED", {}, { cause: rpcError });
        if (typeof rpcError?.code !== "number") throw rpcError;
        error = errorFromRpc(rpcError);
        if (!this.#tracker.isComplete && !this.#canGoOn(rpcError, error, numLost)) throw error;
      } finally {
        this.#signal?.removeEventListener("abort", this.#cancel);
        this.#cancel();
      }
      lostSince ??= performance.now();
      if (performance.now() - lostSince > this.#resumeTimeoutMs) throw error;
      numLost += 1;
      await this.#pause(numLost);
    }
    if (failure) throw failure;
  }

  /** Starts the next try at the next router. */
  #open() {
    this.#signal?.throwIfAborted();
    const { address, stub, metadata } = this.#routers[this.#numTries % this.#routers.length];
    const call = stub.generate(this.#nextRequest(), metadata);
    // Cancelling a call that nobody reads any more still makes it emit its error.
    call.on("error", () => {});
    this.#signal?.addEventListener("abort", this.#cancel);
    [this.router, this.#call] = [address, call];
    return call;
  }

  /** Waits when every router has been tried. @param {number} numLost */
  async #pause(numLost) {
    const numRounds = numLost / this.#routers.length;
    if (Number.isInteger(numRounds)) {
      await sleep(Math.min(MAX_PAUSE_MS, MIN_PAUSE_MS * 2 ** (numRounds - 1)));
    }
  }

  /**
   * @param {import("@grpc/grpc-js").ServiceError} rpcError
   * @param {import("./errors.js").RadixMeshError} error
   * @param {number} numLost
   */
  #canGoOn(rpcError, error, numLost) {
    if (isTransportError(rpcError) || isRetriable(error)) return true;
    const hasBegun = this.#tracker.resolved !== null;
    if (error instanceof OverloadedError && error.retryAfterMs !== null) {
      // A stream that had begun is worth waiting for; a new request tries every router once.
      return hasBegun || numLost + 1 < this.#routers.length;
    }
    // The router may not have noticed yet that the first connection broke.
    return error.reason === "DUPLICATE_REQUEST" && numLost > 0 && !hasBegun;
  }

  #nextRequest() {
    if (this.#tracker.resolved === null && this.#numTries && !this.#isIdGiven) {
      // An earlier try may still be known somewhere: nothing of it was received, so this one is another request.
      this.#request = { ...this.#request, requestId: randomUUID() };
    }
    this.#numTries += 1;
    const request = this.#tracker.resolved === null ? { ...this.#request } : { resume: this.#tracker.resume() };
    if (this.#deadline !== null) request.deadlineMs = Math.max(0, Math.floor(this.#deadline - performance.now()));
    return request;
  }
}
