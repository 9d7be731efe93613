"""Errors as OpenAI's clients read them: the mesh's reasons as codes, and the HTTP status that says whether to retry."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from radixmesh.daemons.router.http.request_types.client_names import as_sent
from radixmesh.daemons.runtime.errors import MeshError

JsonValue = object
JsonObject = dict[str, JsonValue]
# Paths whose clients read errors of another form than OpenAI's.
ANTHROPIC_PATHS = "/v1/messages"
OLLAMA_PATHS = "/api/"
CLIENT_CLOSED = 499

_STATUS_TO_HTTP: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    # A feature that is not offered is the request's to leave out: a 5xx would be retried by clients.
    "UNIMPLEMENTED": 400,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 408,
    "CANCELLED": CLIENT_CLOSED,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
}
_REASON_TO_HTTP: Mapping[str, int] = {
    # Retrying cannot help.
    "NEVER_FITS": 400,
    "TOO_LARGE": 413,
    "BLOB_TOO_LARGE": 413,
    "CLIENT_STALLED": 408,
    "SUPERSEDED": 409,
    "STALE_ATTEMPT": 409,
}
_HTTP_TO_TYPE: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    CLIENT_CLOSED: "request_cancelled",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRY_AFTER_S = 1
# Libraries tell this one by its code, or by "maximum context length", and cut the conversation.
# The other tells "no such model" from any other 404 or 400: litellm looks for these very words.
_CODES: Mapping[str, str] = {"PROMPT_TOO_LONG": "context_length_exceeded", "UNKNOWN_MODEL": "model_not_found"}


def http_status(error: MeshError) -> int:
    """The HTTP status of an error: 400 to 499 say that the request is to be changed, but 408, 429 and 503 to retry."""
    return _REASON_TO_HTTP.get(error.reason_name) or _STATUS_TO_HTTP.get(error.status, 500)


def error_body(error: MeshError, path: str = "") -> dict[str, JsonValue]:
    """The error in the form of the API that the path belongs to."""
    openai = _openai_body(error, path)
    return _in_form_of(path, openai, http_status(error))


def _openai_body(error: MeshError, path: str) -> JsonObject:
    """`{"error": {message, type, param, code, metadata}}`; param is the field that is wrong, as clients of this path
    name it, code the reason's name; but for a prompt that is too long, which all clients know by OpenAI's code and
    words."""
    error = as_sent(error, path)
    if error.reason_name == "PROMPT_TOO_LONG":
        error = _in_openais_words(error)
    elif error.reason_name in _CODES:
        error = MeshError(error.reason, error.message, {**error.metadata, "reason": error.reason_name})
    status = http_status(error)
    kind = _HTTP_TO_TYPE.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.metadata.get("field"),
            "code": _CODES.get(error.reason_name, error.reason_name),
            "metadata": dict(error.metadata),
        }
    }


def _in_form_of(path: str, body: JsonObject, status: int) -> JsonObject:
    """OpenAI's form as Anthropic's or Ollama's, with the same details beside what their clients read."""
    inner = body["error"]
    assert isinstance(inner, dict)
    if path.startswith(ANTHROPIC_PATHS):
        kind = _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {**inner, "type": kind}}
    if path.startswith(OLLAMA_PATHS):
        return {"error": inner["message"], **{name: inner[name] for name in ("code", "param", "metadata")}}
    return body


def plain_error(status: int, code: str, message: str, path: str = "") -> JSONResponse:
    """An error of HTTP's own (no such path, wrong method), in the same form."""
    body: dict[str, JsonValue] = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": code,
        "metadata": {},
    }
    return JSONResponse(_in_form_of(path, {"error": body}, status), status)


class Linger:
    """Throws away what a client still sends, for so many seconds and bytes at most."""

    def __init__(self, *, seconds: float, max_bytes: int) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes

    async def drain(self, receive: Receive) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(self._seconds):
                while num_bytes <= self._max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    num_bytes += len(message.get("body", b""))
        except TimeoutError:
            return


class ErrorResponse(JSONResponse):
    """An error before anything else was sent."""

    def __init__(self, error: MeshError, path: str = "") -> None:
        super().__init__(error_body(error, path), http_status(error), headers=_headers_of(error))


class RefusedBody(ErrorResponse):
    """The answer to a body that is not read to its end. The connection is closed, and not so early that the client,
    which is still sending, is reset before it reads this."""

    def __init__(self, error: MeshError, linger: Linger, path: str = "") -> None:
        super().__init__(error, path)
        self.headers["connection"] = "close"
        self._linger = linger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await self._linger.drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _in_openais_words(error: MeshError) -> MeshError:
    context, num = error.metadata.get("max_total_len"), error.metadata.get("prompt_tokens")
    if not context:
        return error
    asked = f"your input has {num} tokens" if num else "your input has more"
    message = (
        f"This model's maximum context length is {context} tokens. However, {asked}, and the answer takes at least 1: "
        "please reduce the length of the input."
    )
    return MeshError(error.reason, message, {**error.metadata, "reason": error.reason_name})


def _headers_of(error: MeshError) -> dict[str, str]:
    if http_status(error) == 401:
        return {"www-authenticate": "Bearer"}
    if http_status(error) not in (429, 503):
        return {}
    after_ms = error.metadata.get("retry_after_ms", "")
    seconds = math.ceil(int(after_ms) / 1000) if after_ms.isdecimal() else _RETRY_AFTER_S
    return {"retry-after": str(max(1, seconds))}
