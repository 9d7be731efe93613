// Types of the package. Options are documented in options.js, results in results.js, errors in README.md.

export type Message = { role: string; content?: string | null; [key: string]: unknown };
export type Input = string | Iterable<number> | { messages: Message[] };

/** parameters: a JSON schema of an object. */
export interface Tool {
  name: string;
  description?: string;
  parameters?: object;
}
export type ToolChoice = "auto" | "none" | "required" | { name: string };
export interface ToolCall {
  name: string;
  arguments: Record<string, unknown>;
}
/** Free text before what a constraint is about; `<think>` to `</think>` where nothing else is said. */
export interface Thought {
  begin?: string;
  end?: string;
  isAlways?: boolean;
}

/** Of jsonSchema, jsonObject, regex, ebnf, choices and structuralTag at most one. null and undefined mean left out. */
export interface Options {
  model?: string | null;
  n?: number | null;
  temperature?: number | null;
  topK?: number | null;
  topP?: number | null;
  minP?: number | null;
  repetitionPenalty?: number | null;
  frequencyPenalty?: number | null;
  presencePenalty?: number | null;
  logitBias?: Record<number, number> | Map<number, number> | null;
  seed?: number | bigint | string | null;
  logprobs?: number | null;
  promptLogprobs?: boolean | null;
  promptLogprobsStart?: number | null;
  maxTokens?: number | null;
  minTokens?: number | null;
  stop?: string | string[] | null;
  stopIds?: Iterable<number> | null;
  ignoreEos?: boolean | null;
  includeStop?: boolean | null;
  skipSpecialTokens?: boolean | null;
  jsonSchema?: string | object | null;
  jsonObject?: boolean | null;
  regex?: string | null;
  ebnf?: string | null;
  choices?: string[] | null;
  structuralTag?: string | object | null;
  thought?: Thought | null;
  tools?: Tool[] | null;
  toolChoice?: ToolChoice | null;
  parallelToolCalls?: boolean | null;
  enableThinking?: boolean | null;
  reasoningEffort?: string | null;
  templateArgs?: Record<string, unknown> | null;
  idsOnly?: boolean | null;
  cacheSalt?: string | null;
  priority?: number | null;
  tenant?: string | null;
  deadlineMs?: number | null;
  requestId?: string | null;
  signal?: AbortSignal | null;
}

export interface Logprobs {
  tokenLogprobs: number[];
  topIds: number[][];
  topLogprobs: number[][];
}
export interface Usage {
  promptTokens: number;
  outputTokens: number;
  cachedTokens: number;
}
export interface Finish {
  reason: "stop" | "length" | "abort" | "error";
  usage: Usage;
  stop: string;
  stopId: number | null;
  error: RadixMeshError | null;
}
export interface Chunk {
  index: number;
  text: string;
  ids: number[];
  logprobs: Logprobs | null;
  finish: Finish | null;
}
export type CompletionOutput = Chunk;
export interface Completion {
  requestId: string;
  model: string;
  promptIds: number[];
  outputs: CompletionOutput[];
  text: string;
  promptLogprobs: Logprobs | null;
  numResumptions: number;
}
export interface Model {
  name: string;
  baseModel: string;
  vocabSize: number;
  maxTotalLen: number;
  numSchedulers: number;
}
export interface Tls {
  ca: Uint8Array;
  cert?: Uint8Array;
  key?: Uint8Array;
  peerName?: string;
}

export class GenerateStream implements AsyncIterable<Chunk> {
  private constructor();
  router: string;
  numResumptions: number;
  get requestId(): string;
  get model(): string;
  get promptIds(): number[];
  get seeds(): bigint[];
  get promptLogprobs(): Logprobs | null;
  [Symbol.asyncIterator](): AsyncIterator<Chunk>;
}

export class RadixMesh {
  constructor(config: { routers: string[]; resumeTimeoutMs?: number; apiKey?: string; tls?: Tls });
  close(): void;
  generate(input: Input, options?: Options): GenerateStream;
  complete(input: Input, options?: Options): Promise<Completion>;
  abort(requestId: string): Promise<"found" | "finished" | "unknown">;
  tokenize(input: string | { messages: Message[] }, options?: { model?: string }): Promise<number[]>;
  models(): Promise<Model[]>;
}

/** The calls of an output whose toolChoice required one. Throws SyntaxError for any other text. */
export function toolCalls(text: string, thought?: Thought): ToolCall[];

export class RadixMeshError extends Error {
  constructor(message: string, reason?: string, metadata?: Record<string, string>, options?: ErrorOptions);
  reason: string;
  metadata: Record<string, string>;
}
export class AbortedError extends RadixMeshError {}
export class AuthenticationError extends RadixMeshError {}
export class BrokenStreamError extends RadixMeshError {}
export class ClientStalledError extends RadixMeshError {}
export class DeadlineExceededError extends RadixMeshError {}
export class InvalidRequestError extends RadixMeshError {}
export class MismatchError extends RadixMeshError {}
export class NotFoundError extends RadixMeshError {}
export class OverloadedError extends RadixMeshError {
  get retryAfterMs(): number | null;
}
export class UnavailableError extends RadixMeshError {}
export class UnsupportedError extends RadixMeshError {}
