// The openai SDK for Node: whole answers, streams, a stream that is left, schemas, tool calls, embeddings, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Who are you?" }];

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const whole = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16 });
let text = "";
for await (const part of await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 16, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
const left = await client.completions.create({ model, prompt: "The Tyger", max_tokens: 1500, stream: true });
for await (const part of left) if (part.choices[0].text) break;
assert.equal((await client.embeddings.create({ model, input: ["a", "b"] })).data.length, 2);
await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), (error) => error.status === 404 && error.code === "model_not_found");
console.log("checked text streams embeddings errors");
const schema = { type: "object", properties: { side: { enum: ["left", "right"] } }, required: ["side"], additionalProperties: false };
const isSide = (value) => ["left", "right"].includes(value.side);
const response_format = { type: "json_schema", json_schema: { name: "turn", schema, strict: true } };
const shaped = await client.chat.completions.create({ model, messages, response_format, temperature: 0, max_tokens: 400 });
assert.ok(isSide(JSON.parse(shaped.choices[0].message.content)));
console.log("checked structured");
const tools = [{ type: "function", function: { name: "turn", description: "Turns.", parameters: schema } }];
const asked = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 400 };
const called = await client.chat.completions.create(asked);
assert.ok(isSide(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments)));
const { tool_calls } = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0].message;
assert.ok(isSide(JSON.parse(tool_calls[0].function.arguments)));
const answered = called.choices[0].message;
const history = [...messages, answered, { role: "tool", tool_call_id: answered.tool_calls[0].id, content: "turned" }];
assert.ok((await client.chat.completions.create({ ...asked, messages: history })).choices[0].message.tool_calls.length);
console.log("checked tools");
