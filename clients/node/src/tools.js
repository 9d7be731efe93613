// Tools of a chat, the choice among them, and the calls that an output makes.
import { InvalidRequestError } from "./errors.js";

const MAX_WHITESPACE = 16;

/**
 * parameters: a JSON schema of an object.
 *
 * @typedef {{name: string, description?: string, parameters?: object}} Tool
 */
/** @typedef {"auto" | "none" | "required" | {name: string}} ToolChoice one tool by its name, or how free the model is */
/** @typedef {{name: string, arguments: Record<string, unknown>}} ToolCall */
/**
 * Free text that may come before what a constraint is about. isAlways: outputs begin inside one, whatever the prompt ends with.
 *
 * @typedef {{begin?: string, end?: string, isAlways?: boolean}} Thought
 */

/** As chat templates read them. @param {Tool[]} tools */
export function toolsJson(tools) {
  if (!tools.every((tool) => typeof tool?.name === "string")) {
    throw new InvalidRequestError("tools takes a list of {name, parameters}: send those", "INVALID_ARGUMENT", { field: "tools" });
  }
  return JSON.stringify(
    tools.map(({ name, description = "", parameters = { type: "object" } }) => ({
      type: "function",
      function: { name, description, parameters },
    })),
  );
}

/** @param {unknown} choice @returns {boolean} whether a call is required */
export function mustCall(choice) {
  if (choice == null || choice === "auto" || choice === "none") return false;
  if (choice === "required" || typeof (/** @type {any} */ (choice).name) === "string") return true;
  throw new InvalidRequestError(`toolChoice is ${String(choice)}: send auto, none, required or {name}`, "INVALID_ARGUMENT", { field: "toolChoice" });
}

/**
 * The structural tag that makes an output a JSON list of calls, at least one.
 *
 * @param {Tool[]} tools
 * @param {ToolChoice} choice
 * @param {boolean} isParallel
 */
export function callsTag(tools, choice, isParallel) {
  const named = typeof choice === "object" ? choice.name : null;
  const chosen = tools.filter(({ name }) => named === null || name === named);
  if (!chosen.length) {
    const wanted = named === null ? "at all" : `named ${named}`;
    throw new InvalidRequestError(`toolChoice asks for a call, and there is no tool ${wanted}`, "INVALID_ARGUMENT", { field: "tools" });
  }
  const tags = chosen.map(({ name, parameters = { type: "object" } }) => ({
    type: "tag",
    begin: `{"name": ${JSON.stringify(name)}, "arguments": `,
    content: { type: "json_schema", json_schema: parameters, max_whitespace_cnt: MAX_WHITESPACE },
    end: "}",
  }));
  const calls = { type: "tags_with_separator", separator: ", ", at_least_one: true, stop_after_first: named !== null || !isParallel, tags };
  const elements = [{ type: "const_string", value: "[" }, calls, { type: "const_string", value: "]" }];
  return JSON.stringify({ type: "structural_tag", format: { type: "sequence", elements } });
}

/**
 * The calls of an output whose toolChoice required one. Throws SyntaxError where the text is no list of calls, because its
 * length cut it off or nothing required one.
 *
 * @param {string} text
 * @param {Thought} [thought] as the request had it
 * @returns {ToolCall[]}
 */
export function toolCalls(text, thought) {
  const calls = listOf(text, thought);
  const isCall = (/** @type {any} */ call) => typeof call?.name === "string" && typeof call.arguments === "object" && call.arguments !== null;
  if (!Array.isArray(calls) || !calls.every(isCall)) throw new SyntaxError(`the output is no list of calls: ${text.slice(0, 100)}`);
  return calls.map(({ name, arguments: given }) => ({ name, arguments: given }));
}

/** @param {string} text @param {Thought} [thought] */
function listOf(text, thought) {
  try {
    return JSON.parse(text);
  } catch (error) {
    if (!thought) throw error;
    // Behind the first end: an argument may contain that text too.
    const [, ...behind] = text.split(thought.end ?? "</think>");
    return JSON.parse(behind.join(thought.end ?? "</think>"));
  }
}
