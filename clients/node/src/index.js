/**
 * Client of the radixmesh router: streams that survive the death of a router.
 *
 *     const mesh = new RadixMesh({ routers: ["127.0.0.1:50050"] });
 *     for await (const chunk of mesh.generate("Once upon a time", { maxTokens: 64 })) process.stdout.write(chunk.text);
 *     mesh.close();
 *
 * @module
 */
export { RadixMesh } from "./client.js";
export {
  AbortedError,
  AuthenticationError,
  BrokenStreamError,
  ClientStalledError,
  DeadlineExceededError,
  InvalidRequestError,
  MismatchError,
  NotFoundError,
  OverloadedError,
  RadixMeshError,
  UnavailableError,
  UnsupportedError,
} from "./errors.js";
export { GenerateStream } from "./stream.js";
export { toolCalls } from "./tools.js";
