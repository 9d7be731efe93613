// The options of a request, and the message they become.
import { packFloats, packInts } from "./arrays.js";
import { InvalidRequestError } from "./errors.js";
import { callsTag, mustCall, toolsJson } from "./tools.js";

/**
 * A chat message: role, content, and whatever else the model's template reads.
 *
 * @typedef {{role: string, content?: string | null, [key: string]: unknown}} Message
 */

/**
 * Every option may be left out; the defaults are the contract's (common.proto). null and undefined mean left out.
 *
 * @typedef {object} Options
 * @property {string} [model] name; the first model if left out
 * @property {number} [n] outputs, 1 to 128
 * @property {number} [temperature] 0 = greedy; default 1
 * @property {number} [topK]
 * @property {number} [topP]
 * @property {number} [minP]
 * @property {number} [repetitionPenalty]
 * @property {number} [frequencyPenalty]
 * @property {number} [presencePenalty]
 * @property {Record<number, number> | Map<number, number>} [logitBias]
 * @property {number | bigint | string} [seed] 64 bits: a bigint or decimal string beyond 2^53; chosen by the router if left out
 * @property {number} [logprobs] alternatives per output token; 0 = the token's own logprob only; left out = none
 * @property {boolean} [promptLogprobs]
 * @property {number} [promptLogprobsStart] the first prompt position that is told, from 1; what is before may come from the cache
 * @property {number} [maxTokens]
 * @property {number} [minTokens]
 * @property {string | string[]} [stop]
 * @property {Iterable<number>} [stopIds]
 * @property {boolean} [ignoreEos]
 * @property {boolean} [includeStop]
 * @property {boolean} [skipSpecialTokens]
 * @property {string | object} [jsonSchema] the output follows it; of this and the next five at most one
 * @property {boolean} [jsonObject] true: the output is JSON, any value
 * @property {string} [regex]
 * @property {string} [ebnf] GBNF notation, with the root rule "root"
 * @property {string[]} [choices] the output is one of them
 * @property {string | object} [structuralTag] xgrammar's: free text with constrained spans
 * @property {import("./tools.js").Thought} [thought] free text before what the constraint is about
 * @property {import("./tools.js").Tool[]} [tools] of a chat; so are the next five. Required calls come as a JSON list, for toolCalls()
 * @property {import("./tools.js").ToolChoice} [toolChoice] "auto" if left out
 * @property {boolean} [parallelToolCalls] several required calls; true if left out
 * @property {boolean} [enableThinking] an argument of the model's template, as the next two
 * @property {string} [reasoningEffort]
 * @property {Record<string, unknown>} [templateArgs]
 * @property {boolean} [idsOnly] no text is made
 * @property {string} [cacheSalt]
 * @property {number} [priority]
 * @property {string} [tenant]
 * @property {number} [deadlineMs] for the whole request, resumptions included
 * @property {string} [requestId] made if left out
 * @property {AbortSignal} [signal] aborts the request
 */

/** @typedef {string | Iterable<number> | {messages: Message[]}} Input a text, token ids, or a chat */

const UINT32 = 2n ** 32n;
const UINT64 = 2n ** 64n;

/** Fields of the request, of its sampling and of its stop parameters by option, and how a value is brought into shape. */
const REQUEST = {
  model: ["model", text],
  n: ["n", uint32],
  idsOnly: ["idsOnly", flag],
  cacheSalt: ["cacheSalt", text],
  priority: ["priority", int32],
  tenant: ["tenant", text],
};
const SAMPLING = {
  temperature: ["temperature", number],
  topK: ["topK", uint32],
  topP: ["topP", number],
  minP: ["minP", number],
  repetitionPenalty: ["repetitionPenalty", number],
  frequencyPenalty: ["frequencyPenalty", number],
  presencePenalty: ["presencePenalty", number],
  seed: ["seed", uint64],
  logprobs: ["numTopLogprobs", uint32],
  promptLogprobs: ["promptLogprobs", flag],
  promptLogprobsStart: ["promptLogprobsStart", uint32],
};
const STOP = {
  maxTokens: ["maxTokens", uint32],
  minTokens: ["minTokens", uint32],
  stop: ["stop", texts],
  stopIds: ["stopIds", packInts],
  ignoreEos: ["ignoreEos", flag],
  includeStop: ["includeStop", flag],
  skipSpecialTokens: ["skipSpecialTokens", flag],
};
const CONSTRAINTS = {
  jsonSchema: ["jsonSchema", schema],
  regex: ["regex", text],
  ebnf: ["ebnf", text],
  choices: ["ebnf", choiceGrammar],
  jsonObject: ["anyJson", flag],
  structuralTag: ["structuralTag", schema],
};
const CHAT = ["tools", "toolChoice", "parallelToolCalls", "enableThinking", "reasoningEffort", "templateArgs"];
const OTHERS = ["logitBias", "thought", ...CHAT, "deadlineMs", "requestId", "signal"];

/**
 * The request without request id and deadline. Throws InvalidRequestError for what no message can hold.
 *
 * @param {Input} input
 * @param {Options} options
 * @returns {Record<string, any>}
 */
export function requestFrom(input, options) {
  const known = new Set([...Object.keys({ ...REQUEST, ...SAMPLING, ...STOP, ...CONSTRAINTS }), ...OTHERS]);
  const unknown = Object.keys(options).filter((name) => !known.has(name));
  if (unknown.length) throw new InvalidRequestError(`no such option: ${unknown.join(", ")}`, "INVALID_ARGUMENT");
  const sampling = fieldsOf(SAMPLING, options);
  if (options.logitBias != null) {
    const bias = options.logitBias instanceof Map ? [...options.logitBias] : Object.entries(options.logitBias);
    sampling.logitBiasIds = packInts(bias.map(([id]) => Number(id)), "logitBias");
    sampling.logitBiasValues = packFloats(bias.map(([, value]) => value), "logitBias");
  }
  const given = CHAT.filter((name) => /** @type {any} */ (options)[name] != null);
  const asked = inputFrom(input);
  if (given.length && !asked.chat) throw new InvalidRequestError(`${given.join(", ")} are for chats: send messages`, "INVALID_ARGUMENT");
  if (asked.chat) Object.assign(asked.chat, templateFrom(options));
  return { ...fieldsOf(REQUEST, options), ...asked, sampling, stop: fieldsOf(STOP, options), ...grammarFrom(options) };
}

/** @param {Options} options */
function templateFrom(options) {
  const { tools = [], toolChoice, templateArgs, enableThinking, reasoningEffort } = options;
  /** @type {Record<string, unknown>} */
  const args = { ...templateArgs };
  if (enableThinking != null) args.enable_thinking = flag(enableThinking, "enableThinking");
  if (reasoningEffort != null) args.reasoning_effort = text(reasoningEffort, "reasoningEffort");
  return {
    ...(tools?.length && toolChoice !== "none" ? { toolsJson: toolsJson(tools) } : {}),
    ...(Object.keys(args).length ? { templateArgsJson: JSON.stringify(args) } : {}),
  };
}

/** The constraint, as a field of the request, or none. @param {Options} options */
function grammarFrom(options) {
  const names = Object.keys(CONSTRAINTS).filter((name) => ![null, undefined, false].includes(/** @type {any} */ (options)[name]));
  const { toolChoice, thought, tools } = options;
  const isCall = mustCall(toolChoice);
  if (names.length + Number(isCall) > 1) {
    const all = [...names, ...(isCall ? ["toolChoice"] : [])].join(", ");
    throw new InvalidRequestError(`of ${all} one at most can be followed`, "INVALID_ARGUMENT");
  }
  if (!names.length && !isCall) {
    if (thought != null) throw new InvalidRequestError("a thought comes before a constraint, and there is none", "INVALID_ARGUMENT");
    return {};
  }
  const grammar = isCall
    ? { structuralTag: callsTag(tools ?? [], /** @type {any} */ (toolChoice), options.parallelToolCalls !== false) }
    : fieldsOf({ [names[0]]: /** @type {any} */ (CONSTRAINTS)[names[0]] }, options);
  if (thought == null) return { grammar };
  const { begin = "<think>", end = "</think>", isAlways = false } = thought;
  return { grammar: { ...grammar, thought: { begin, end, isAlways } } };
}

/**
 * The oneof of an input, as GenerateRequest spells it (with promptIds) and EncodeItem (text and chat only).
 *
 * @param {Input} input
 * @returns {Record<string, any>}
 */
export function inputFrom(input) {
  if (typeof input === "string") return { text: input };
  if (input != null && typeof input === "object") {
    if ("messages" in input && Array.isArray(input.messages)) return { chat: chatFrom(input.messages) };
    if (Symbol.iterator in input) return { promptIds: packInts(input, "promptIds") };
  }
  throw new InvalidRequestError("give a text, token ids, or {messages: [...]}", "MISSING_FIELD", { field: "input" });
}

/** @param {Message[]} messages */
function chatFrom(messages) {
  return {
    messages: messages.map(({ role, content, ...extra }) => ({
      role: String(role ?? ""),
      content: String(content ?? ""),
      extraJson: Object.keys(extra).length ? JSON.stringify(extra) : "",
    })),
  };
}

/**
 * @param {Record<string, any[]>} table
 * @param {Record<string, any>} options
 * @returns {Record<string, any>}
 */
function fieldsOf(table, options) {
  /** @type {Record<string, any>} */
  const fields = {};
  for (const [option, [field, shape]] of Object.entries(table)) {
    if (options[option] != null) fields[field] = shape(options[option], option);
  }
  return fields;
}

/** @param {unknown} value @param {string} option @param {string} wanted @returns {never} */
function refuse(value, option, wanted) {
  throw new InvalidRequestError(`${option} is ${String(value)}: send ${wanted}`, "INVALID_ARGUMENT", { field: option });
}

/** @param {unknown} value @param {string} option */
function text(value, option) {
  return typeof value === "string" ? value : refuse(value, option, "a string");
}

/** @param {unknown} value @param {string} option */
function texts(value, option) {
  return (Array.isArray(value) ? value : [value]).map((one) => text(one, option));
}

/** @param {unknown} value @param {string} option */
function schema(value, option) {
  if (typeof value === "string") return value;
  return value !== null && typeof value === "object" ? JSON.stringify(value) : refuse(value, option, "a schema, or JSON of one");
}

/**
 * EBNF of a text that is one of these: what is not plain ASCII goes by its code.
 *
 * @param {unknown} value
 * @param {string} option
 */
function choiceGrammar(value, option) {
  if (!Array.isArray(value) || !value.length || !value.every(Boolean)) refuse(value, option, "one text at least, and none that is empty");
  const code = (/** @type {string} */ char) => `\\U${(char.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(8, "0")}`;
  const quoted = texts(value, option).map((one) => `"${[...one].map((char) => (/[A-Za-z0-9]/.test(char) ? char : code(char))).join("")}"`);
  return `root ::= ${quoted.join(" | ")}`;
}

/** @param {unknown} value @param {string} option */
function flag(value, option) {
  return typeof value === "boolean" ? value : refuse(value, option, "true or false");
}

/** @param {unknown} value @param {string} option */
function number(value, option) {
  return typeof value === "number" ? value : refuse(value, option, "a number");
}

/** @param {unknown} value @param {string} option */
function int32(value, option) {
  return value === (Number(value) | 0) ? value : refuse(value, option, "a 32-bit whole number");
}

/** @param {unknown} value @param {string} option */
function uint32(value, option) {
  return Number(whole(value, option, UINT32, "a whole number from 0 to 2^32 - 1"));
}

/** @param {unknown} value @param {string} option */
function uint64(value, option) {
  if (typeof value === "number" && !Number.isSafeInteger(value)) refuse(value, option, "a bigint beyond 2^53");
  return String(whole(value, option, UINT64, "a whole number from 0 to 2^64 - 1"));
}

/** @param {unknown} value @param {string} option @param {bigint} end @param {string} wanted */
function whole(value, option, end, wanted) {
  const isWhole = typeof value === "bigint" || Number.isInteger(value) || (typeof value === "string" && /^\d+$/.test(value));
  if (!isWhole) refuse(value, option, wanted);
  const exact = BigInt(/** @type {any} */ (value));
  return exact >= 0n && exact < end ? exact : refuse(value, option, wanted);
}
