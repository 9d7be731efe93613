// The router's service, from the contracts as they are.
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

// In a published package the contracts lie beside src/; in the repository at its root.
const FOLDERS = ["../protos", "../../../protos"].map((path) => fileURLToPath(new URL(path, import.meta.url)));
const FILE = "radixmesh/router/v1/router.proto";

/**
 * Loads the contracts. Field names are camelCase, enums are names, 64-bit numbers are decimal strings (a seed has 64 bits,
 * a number 53), and a field that is optional and unset is absent.
 *
 * @returns {import("@grpc/grpc-js").ServiceClientConstructor}
 */
export function loadRouterService() {
  const folder = FOLDERS.find((candidate) => existsSync(`${candidate}/${FILE}`));
  if (!folder) throw new Error(`${FILE} is in none of ${FOLDERS.join(", ")}: the package is incomplete, install it again`);
  const definition = loadSync(FILE, { includeDirs: [folder], longs: String, enums: String, defaults: true });
  const loaded = /** @type {any} */ (loadPackageDefinition(definition));
  return loaded.radixmesh.router.v1.RouterService;
}
