// The Vercel AI SDK: whole answers, streams, schemas, tool calls that it runs, embeddings, errors.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";

const [url, model] = process.argv.slice(2);
const schema = { type: "object", properties: { side: { enum: ["left", "right"] } }, required: ["side"], additionalProperties: false };
const isSide = (value) => ["left", "right"].includes(value.side);

const provider = createOpenAICompatible({ name: "radixmesh", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const answer = await generateText({ model: provider(model), prompt: "Who are you?", temperature: 0, maxOutputTokens: 16 });
assert.ok(answer.text);
assert.ok(answer.usage.outputTokens > 0);
const stream = streamText({ model: provider(model), prompt: "Who are you?", temperature: 0, maxOutputTokens: 16 });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
assert.equal(streamed, answer.text);
assert.ok((await stream.usage).outputTokens > 0);
console.log("checked text streams");
const turn = { model: provider(model), prompt: "Where?", temperature: 0, maxOutputTokens: 400 };
const { output } = await generateText({ ...turn, output: Output.object({ schema: jsonSchema(schema) }) });
assert.ok(isSide(output));
console.log("checked structured");
const tooled = { ...turn, tools: { turn: tool({ description: "Turns.", inputSchema: jsonSchema(schema) }) }, toolChoice: "required" };
const { toolCalls } = await generateText(tooled);
assert.ok(toolCalls.length && toolCalls.every((call) => call.toolName === "turn" && isSide(call.input)));
const calls = await streamText(tooled).toolCalls;
assert.ok(calls.length && calls.every((call) => isSide(call.input)));
const execute = ({ side }) => `turned ${side}`;
const run = { ...tooled, tools: { turn: tool({ inputSchema: jsonSchema(schema), execute }) }, stopWhen: stepCountIs(2) };
const { steps } = await generateText(run);
assert.ok(steps.length === 2 && steps[0].toolResults[0].output.startsWith("turned "));
console.log("checked tools");
const { embedding } = await embed({ model: provider.embeddingModel?.(model) ?? provider.textEmbeddingModel(model), value: "The Tyger" });
assert.ok(embedding.length > 8);
console.log("checked embeddings");
const unknown = generateText({ model: provider("nobody"), prompt: "Where?", maxRetries: 0 });
await assert.rejects(unknown, (error) => error.statusCode === 404 && error.message.includes("nobody"));
console.log("checked errors");
