import { Metadata, credentials } from "@grpc/grpc-js";

import { unpackInts } from "./arrays.js";
import { errorFromProto, errorFromRpc, isRetriable, isTransportError } from "./errors.js";
import { inputFrom, requestFrom } from "./options.js";
import { loadRouterService } from "./protos.js";
import { addChunk, modelFrom } from "./results.js";
import { GenerateStream } from "./stream.js";

const CALL_TIMEOUT_MS = 30_000;
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
  "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  // A router that is silent without having closed (stopped, cut off) fails its streams after 2 + 3 s.
  "grpc.keepalive_time_ms": 2_000,
  "grpc.keepalive_timeout_ms": 3_000,
  // A router that was restarted is found again at once, not after grpc's backoff of up to 120 s.
  "grpc.initial_reconnect_backoff_ms": 50,
  "grpc.max_reconnect_backoff_ms": 250,
  // A name is asked for again once a second after a loss, not every 30 s: a container may come back at another address.
  "grpc.dns_min_time_between_resolutions_ms": 1_000,
  // One client's closing or backoff is no other's.
  "grpc.use_local_subchannel_pool": 1,
  // Routers are given by address: an http_proxy of the environment is never meant for them.
  "grpc.enable_http_proxy": 0,
};

/** Talks to one or several routers of one mesh. */
export class RadixMesh {
  #routers;
  #resumeTimeoutMs;
  #turn = 0;

  /**
   * @param {object} config
   * @param {string[]} config.routers addresses, "host:port" or "unix:/path"; requests take turns
   * @param {number} [config.resumeTimeoutMs] how long a request may be without any router before it fails with the last
   *   error; what the router said of the request itself is never retried
   * @param {string} [config.apiKey] for routers that ask for one
   * @param {Tls} [config.tls] for routers that serve under TLS; left out = plain
   */
  constructor({ routers, resumeTimeoutMs = 120_000, apiKey = "", tls }) {
    if (!Array.isArray(routers) || routers.length === 0) throw new TypeError("routers is an array of at least one address");
    const RouterService = loadRouterService();
    this.#routers = routers.map((address) => ({
      address,
      stub: /** @type {any} */ (new RouterService(address, credentialsOf(tls), { ...CHANNEL_OPTIONS, ...nameOptions(tls, address) })),
      metadata: metadataOf(apiKey),
    }));
    this.#resumeTimeoutMs = resumeTimeoutMs;
  }

  /** Ends the connections, and with them all streams. */
  close() {
    for (const { stub } of this.#routers) stub.close();
  }

  /**
   * Starts a request. Iterate over the stream for chunks.
   *
   * Throws InvalidRequestError at once for options that cannot be sent; everything else comes while iterating.
   *
   * @param {import("./options.js").Input} input a text, token ids, or {messages: [...]}
   * @param {import("./options.js").Options} [options]
   * @returns {GenerateStream}
   */
  generate(input, options = {}) {
    return new GenerateStream(this.#inTurn(), requestFrom(input, options), options, this.#resumeTimeoutMs);
  }

  /**
   * Runs a request to its end.
   *
   * @param {import("./options.js").Input} input
   * @param {import("./options.js").Options} [options]
   * @returns {Promise<import("./results.js").Completion>}
   */
  async complete(input, options = {}) {
    const stream = this.generate(input, options);
    /** @type {Map<number, import("./results.js").CompletionOutput>} */
    const byIndex = new Map();
    for await (const chunk of stream) {
      const { index } = chunk;
      if (!byIndex.has(index)) byIndex.set(index, { index, text: "", ids: [], logprobs: null, finish: null });
      addChunk(/** @type {any} */ (byIndex.get(index)), chunk);
    }
    const { requestId, model, promptIds, promptLogprobs, numResumptions } = stream;
    const outputs = [...byIndex.values()].sort((a, b) => a.index - b.index);
    return { requestId, model, promptIds, outputs, text: outputs[0].text, promptLogprobs, numResumptions };
  }

  /**
   * Ends a request, whoever runs it.
   *
   * @param {string} requestId
   * @returns {Promise<"found" | "finished" | "unknown">} finished: shortly before
   */
  async abort(requestId) {
    const { outcome } = await this.#ask("abort", { requestId });
    return outcome.replace(/^ABORT_OUTCOME_/, "").toLowerCase();
  }

  /**
   * Token ids of a text, or of a chat as the model's template renders it.
   *
   * @param {string | {messages: import("./options.js").Message[]}} input
   * @param {{model?: string}} [options]
   * @returns {Promise<number[]>}
   */
  async tokenize(input, { model = "" } = {}) {
    const { items } = await this.#ask("tokenize", { model, items: [inputFrom(input)] });
    if (items[0].error) throw errorFromProto(items[0].error);
    return unpackInts(items[0].ids);
  }

  /**
   * The models that can be asked for.
   *
   * @returns {Promise<import("./results.js").Model[]>}
   */
  async models() {
    const { models } = await this.#ask("getModelInfo", {});
    return models.map(modelFrom);
  }

  /** All routers, another one first each time. */
  #inTurn() {
    const first = this.#turn++ % this.#routers.length;
    return [...this.#routers.slice(first), ...this.#routers.slice(0, first)];
  }

  /**
   * Asks routers in turn until one answers. Throws what the last one said.
   *
   * @param {string} method
   * @param {object} request
   * @returns {Promise<any>}
   */
  async #ask(method, request) {
    let last;
    for (const { stub, metadata } of this.#inTurn()) {
      try {
        return await unary(stub, method, request, metadata);
      } catch (rpcError) {
        last = errorFromRpc(rpcError);
        if (!isTransportError(rpcError) && !isRetriable(last)) break;
      }
    }
    throw last;
  }
}

/**
 * Files of TLS, in PEM, as they were read.
 *
 * @typedef {object} Tls
 * @property {Buffer} ca authorities of the routers
 * @property {Buffer} [cert] certificate of this client, for routers that ask
 * @property {Buffer} [key] its key
 * @property {string} [peerName] name in the routers' certificates, instead of their addresses'
 */

/** @param {Tls | undefined} tls */
function credentialsOf(tls) {
  return tls ? credentials.createSsl(tls.ca, tls.key ?? null, tls.cert ?? null) : credentials.createInsecure();
}

/** The name that a router's certificate must have; behind a unix socket nobody has one. @param {Tls | undefined} tls @param {string} address */
function nameOptions(tls, address) {
  const name = tls?.peerName ?? (tls && address.startsWith("unix:") ? "localhost" : undefined);
  return name ? { "grpc.ssl_target_name_override": name } : {};
}

/** @param {string} apiKey */
function metadataOf(apiKey) {
  const metadata = new Metadata();
  if (apiKey) metadata.set("authorization", `Bearer ${apiKey}`);
  return metadata;
}

/** @param {any} stub @param {string} method @param {object} request @param {Metadata} metadata */
function unary(stub, method, request, metadata) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + CALL_TIMEOUT_MS;
    stub[method](request, metadata, { deadline }, (/** @type {any} */ error, /** @type {any} */ answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}
