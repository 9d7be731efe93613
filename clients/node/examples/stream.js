// node examples/stream.js "The Tyger" [router ...]: streams an answer; kill a router meanwhile and see that nothing happens.
import { RadixMesh } from "../src/index.js";

const [prompt = "The Tyger", ...routers] = process.argv.slice(2);
const mesh = new RadixMesh({ routers: routers.length ? routers : ["127.0.0.1:50050"] });
const leaving = new AbortController();
process.once("SIGINT", () => leaving.abort());
// A reader that has left (`| head -1`) wants no more.
let hasReader = true;
process.stdout.on("error", (error) => {
  if (error.code !== "EPIPE") throw error;
  hasReader = false;
  leaving.abort();
});
try {
  const stream = mesh.generate(prompt, { temperature: 0, maxTokens: 256, signal: leaving.signal });
  process.stdout.write(prompt);
  for await (const { text, finish } of stream) {
    process.stdout.write(text);
    if (finish) console.log(`\n[${finish.reason}, ${finish.usage.outputTokens} tokens, resumed ${stream.numResumptions} times]`);
  }
} catch (error) {
  if (hasReader) {
    console.error(`\n${error.reason ?? error.name}: ${error.message}`);
    process.exitCode = 1;
  }
} finally {
  mesh.close();
}
