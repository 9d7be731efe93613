// Calls of the router's own HTTP API. The key lives in this tab alone.

const KEY = "radixmesh.key";

export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

/** An answer that is not 2xx: the router's message, its code, and the HTTP status. */
export class ApiError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message ?? `the router answered ${status}`);
    this.status = status;
    this.code = error.code ?? "";
  }
}

function headers() {
  const key = getKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** GET as JSON. Throws ApiError, or TypeError if the router is not reached. */
export async function get(path, signal) {
  const response = await fetch(path, { headers: headers(), signal });
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(response.status, body);
  return body;
}

/** POSTs and yields the JSON of every event until [DONE]. Throws ApiError; Error if the stream is cut short. */
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => null));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(200, event);
    yield event;
  }
  throw new Error("the stream was cut short: the router may have been restarted");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
