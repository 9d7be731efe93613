import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Metadata, status as Status } from "@grpc/grpc-js";

import { errorFromProto, errorFromRpc, isTransportError, OverloadedError } from "../src/errors.js";

const COMMON = new URL("../../../protos/radixmesh/common/v1/common.proto", import.meta.url);

/** ["EMPTY_PROMPT", "INVALID_ARGUMENT"], ... as the contract documents them. */
function reasons() {
  const pairs = readFileSync(COMMON, "utf8").matchAll(/\/\/ ([A-Z_]+)\. .*\n\s+ERROR_REASON_([A-Z_]+) = /g);
  return [...pairs].map(([, status, reason]) => [reason, status]);
}

test("every reason of the contract gives one class, whether it comes as status or within a message", () => {
  const known = reasons();
  assert.ok(known.length > 40, `${known.length} reasons were found`);
  for (const [reason, status] of known) {
    const rpcError = Object.assign(new Error("x"), { code: Status[status], details: "why", metadata: new Metadata() });
    const fromProto = errorFromProto({ reason: `ERROR_REASON_${reason}`, message: "why", metadata: { k: "v" } });
    const expected = reason === "CLIENT_STALLED" ? "ClientStalledError" : errorFromRpc(rpcError).name;
    assert.deepEqual([fromProto.name, fromProto.reason, fromProto.message, fromProto.metadata.k], [expected, reason, "why", "v"]);
  }
});

test("a status without details is the transport's", () => {
  const error = Object.assign(new Error("x"), { code: Status.UNAVAILABLE, details: "gone", metadata: new Metadata() });
  assert.equal(isTransportError(error), true);
  error.metadata.set("grpc-status-details-bin", Buffer.from("no status at all"));
  assert.equal(isTransportError(error), false);
  assert.deepEqual([errorFromRpc(error).reason, errorFromRpc(error).message], ["NO_REPLICA", "gone"]);
});

test("an overloaded mesh says when to come back, or that it never helps", () => {
  const [later, never] = [{ retry_after_ms: "250" }, {}].map((metadata) =>
    errorFromProto({ reason: "ERROR_REASON_OVERLOADED", message: "", metadata }),
  );
  assert.ok(later instanceof OverloadedError);
  assert.deepEqual([later.retryAfterMs, never.retryAfterMs], [250, null]);
});
