// `npm pack` takes nothing from outside its folder: the contracts are put into it, and taken away again ("--remove"), so
// that a checkout always reads the ones at its root.
import { cpSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";

const target = fileURLToPath(new URL("../protos", import.meta.url));
rmSync(target, { recursive: true, force: true });
if (!process.argv.includes("--remove")) {
  cpSync(fileURLToPath(new URL("../../../protos", import.meta.url)), target, { recursive: true });
}
