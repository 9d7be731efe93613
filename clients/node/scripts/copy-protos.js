// Puts the contracts into the package: `npm pack` takes nothing from outside its folder.
import { cpSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";

const target = fileURLToPath(new URL("../protos", import.meta.url));
rmSync(target, { recursive: true, force: true });
cpSync(fileURLToPath(new URL("../../../protos", import.meta.url)), target, { recursive: true });
