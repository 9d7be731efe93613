// The richer status of gRPC (google.rpc.Status holding an ErrorInfo), which no package of gRPC for Node decodes.
import protobuf from "protobufjs";

const DOMAIN = "radixmesh";
const TYPE_URL = "type.googleapis.com/google.rpc.ErrorInfo";

// The fields of google/rpc/status.proto and error_details.proto that are read here, with their numbers.
const { root } = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Detail { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Detail details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }
`);
const StatusType = root.lookupType("google.rpc.Status");
const ErrorInfoType = root.lookupType("google.rpc.ErrorInfo");

/**
 * The mesh's ErrorInfo in the bytes of "grpc-status-details-bin"; null if there is none or the bytes are something else.
 *
 * @param {Uint8Array} bytes
 * @returns {{reason: string, metadata: Record<string, string>} | null}
 */
export function decodeErrorInfo(bytes) {
  try {
    const { details = [] } = StatusType.toObject(StatusType.decode(bytes));
    for (const { typeUrl, value } of details) {
      if (typeUrl !== TYPE_URL) continue;
      const info = ErrorInfoType.toObject(ErrorInfoType.decode(value), { defaults: true, objects: true });
      if (info.domain === DOMAIN) return { reason: info.reason, metadata: { ...info.metadata } };
    }
  } catch {
    // Some proxy's own details: the plain status has to do.
  }
  return null;
}
