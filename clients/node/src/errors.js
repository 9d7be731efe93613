// What can go wrong, by what a caller can do about it. Every error carries the mesh's own reason.
import { status as Status } from "@grpc/grpc-js";

import { decodeErrorInfo } from "./rpc-status.js";

const DETAILS_KEY = "grpc-status-details-bin";
// Without an ErrorInfo these come from the transport: the router died, was restarted, or a proxy hung up.
const TRANSPORT_CODES = new Set([Status.UNAVAILABLE, Status.CANCELLED, Status.INTERNAL, Status.UNKNOWN]);

/** Base of all errors. */
export class RadixMeshError extends Error {
  /**
   * @param {string} message one sentence that says what to do
   * @param {string} [reason] name of the ErrorReason, e.g. "EMPTY_PROMPT"
   * @param {Record<string, string>} [metadata] details, see common.proto
   * @param {ErrorOptions} [options]
   */
  constructor(message, reason = "INTERNAL", metadata = {}, options = undefined) {
    super(message, options);
    this.name = new.target.name;
    this.reason = reason;
    this.metadata = metadata;
  }
}

/** The request is wrong: sending it again gives the same answer. */
export class InvalidRequestError extends RadixMeshError {}

/** No such model or request. */
export class NotFoundError extends RadixMeshError {}

/** There is no room now, or never will be for a request of this size (NEVER_FITS). */
export class OverloadedError extends RadixMeshError {
  /** Milliseconds after which to try again; null if that cannot help or is not known. */
  get retryAfterMs() {
    const asked = this.metadata.retry_after_ms;
    return asked ? Number(asked) : null;
  }
}

/** Nobody could serve the request for as long as was agreed to wait. */
export class UnavailableError extends RadixMeshError {}

/** The request's own deadline passed. */
export class DeadlineExceededError extends RadixMeshError {}

/** Somebody aborted the request, or resumed it elsewhere. */
export class AbortedError extends RadixMeshError {}

/** This client read too slowly for too long, and its request was dropped. */
export class ClientStalledError extends RadixMeshError {}

/** The model is not the one that the stream began with, or daemons of the mesh disagree about it. */
export class MismatchError extends RadixMeshError {}

/** The mesh knows the option and does not offer it. */
export class UnsupportedError extends RadixMeshError {}

/** The API key is missing, unknown, or not for this verb. */
export class AuthenticationError extends RadixMeshError {}

/** The router sent a gap or a repetition: a bug. */
export class BrokenStreamError extends RadixMeshError {}

/** gRPC status: the class of error, and the reason where no ErrorInfo came with it. @type {Map<number, [typeof RadixMeshError, string]>} */
const BY_STATUS = new Map([
  [Status.INVALID_ARGUMENT, [InvalidRequestError, "INVALID_ARGUMENT"]],
  [Status.ALREADY_EXISTS, [InvalidRequestError, "DUPLICATE_REQUEST"]],
  [Status.NOT_FOUND, [NotFoundError, "INTERNAL"]],
  [Status.RESOURCE_EXHAUSTED, [OverloadedError, "TOO_LARGE"]],
  [Status.UNAVAILABLE, [UnavailableError, "NO_REPLICA"]],
  [Status.DEADLINE_EXCEEDED, [DeadlineExceededError, "DEADLINE_EXCEEDED"]],
  [Status.CANCELLED, [AbortedError, "ABORTED"]],
  [Status.ABORTED, [AbortedError, "ABORTED"]],
  [Status.FAILED_PRECONDITION, [MismatchError, "INTERNAL"]],
  [Status.UNAUTHENTICATED, [AuthenticationError, "UNAUTHENTICATED"]],
  [Status.PERMISSION_DENIED, [AuthenticationError, "PERMISSION_DENIED"]],
  [Status.UNIMPLEMENTED, [UnsupportedError, "UNSUPPORTED"]],
]);

/** Classes of the reasons that come within messages, where no gRPC status travels with them. @type {Record<string, typeof RadixMeshError>} */
const BY_REASON = {
  ...classOf(InvalidRequestError, "MALFORMED_MESSAGE MISSING_FIELD INVALID_ARGUMENT EMPTY_PROMPT PROMPT_TOO_LONG"),
  ...classOf(InvalidRequestError, "TOKEN_OUT_OF_VOCABULARY TOO_MANY_STOPS INVALID_CHAT INVALID_RESUME INVALID_GRAMMAR"),
  ...classOf(InvalidRequestError, "DUPLICATE_REQUEST"),
  ...classOf(NotFoundError, "UNKNOWN_MODEL UNKNOWN_REQUEST UNKNOWN_BLOB"),
  ...classOf(MismatchError, "STALE_ATTEMPT VERSION_MISMATCH MODEL_MISMATCH TOKENIZER_MISMATCH SAMPLER_MISMATCH"),
  ...classOf(MismatchError, "PROTOCOL_VIOLATION EPOCH_FENCED STEP_GAP SLOT_CONFLICT PAGE_CONFLICT GROUP_GENERATION"),
  ...classOf(UnsupportedError, "UNSUPPORTED"),
  ...classOf(AuthenticationError, "UNAUTHENTICATED PERMISSION_DENIED"),
  ...classOf(OverloadedError, "NEVER_FITS OVERLOADED JOURNAL_FULL BLOB_TOO_LARGE TOO_LARGE"),
  ...classOf(UnavailableError, "NO_REPLICA NOT_SERVING GROUP_LOST"),
  ...classOf(DeadlineExceededError, "DEADLINE_EXCEEDED STEP_TIMEOUT"),
  ...classOf(ClientStalledError, "CLIENT_STALLED"),
  ...classOf(AbortedError, "ABORTED SUPERSEDED TRANSFER_FAILED"),
};

/**
 * The error for one within a message (common.proto's Error).
 *
 * @param {{reason: string, message: string, metadata?: Record<string, string>}} error
 */
export function errorFromProto(error) {
  const reason = String(error.reason).replace(/^ERROR_REASON_/, "");
  return new (BY_REASON[reason] ?? RadixMeshError)(error.message, reason, { ...error.metadata });
}

/**
 * The error for a failed call.
 *
 * @param {import("@grpc/grpc-js").ServiceError} error
 */
export function errorFromRpc(error) {
  if (typeof error.code !== "number") {
    return new RadixMeshError(`the call failed: ${error.message}`, "INTERNAL", {}, { cause: error });
  }
  const info = errorInfoOf(error);
  const [byStatus, fallback] = BY_STATUS.get(error.code) ?? [RadixMeshError, "INTERNAL"];
  const kind = info?.reason === "CLIENT_STALLED" ? ClientStalledError : byStatus;
  return new kind(error.details || error.message, info?.reason ?? fallback, info?.metadata ?? {}, { cause: error });
}

/** Whether the connection failed rather than the request. @param {import("@grpc/grpc-js").ServiceError} error */
export function isTransportError(error) {
  return TRANSPORT_CODES.has(error.code) && !error.metadata?.get(DETAILS_KEY).length;
}

/** Whether another router, or the same one a little later, may take the request. @param {RadixMeshError} error */
export function isRetriable(error) {
  return error instanceof UnavailableError;
}

/** @param {import("@grpc/grpc-js").ServiceError} error */
function errorInfoOf(error) {
  const [details] = error.metadata?.get(DETAILS_KEY) ?? [];
  return Buffer.isBuffer(details) ? decodeErrorInfo(details) : null;
}

/** @param {typeof RadixMeshError} kind @param {string} reasons */
function classOf(kind, reasons) {
  return Object.fromEntries(reasons.split(" ").map((reason) => [reason, kind]));
}
