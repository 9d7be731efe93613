"""Bodies of every route at the edge of what is legal, one per field that is repeated or has a size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from radixmesh.daemons.router.http.bodies.body import Body
from radixmesh.daemons.router.http.bodies.field_decoders import decoders_of
from radixmesh.daemons.router.http.request_types.chat_request import ChatRequest
from radixmesh.daemons.router.http.request_types.completion_request import CompletionRequest
from radixmesh.daemons.router.http.request_types.embedding_request import ClassifyRequest, EmbeddingRequest
from radixmesh.daemons.router.http.request_types.native_request import NativeRequest, NativeSampling
from radixmesh.daemons.router.http.request_types.score_requests import RerankRequest, ScoreRequest
from radixmesh.daemons.router.http.request_types.text_requests import DetokenizeRequest, TokenizeRequest
from radixmesh.daemons.router.http.translated.anthropic_request import CountTokensRequest, MessagesRequest
from radixmesh.daemons.router.http.translated.ollama_request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from radixmesh.daemons.router.http.translated.responses_request import ResponsesRequest

ROUTES: Mapping[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/responses": ResponsesRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/classify": ClassifyRequest,
    "/generate": NativeRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_USER = {"role": "user", "content": "x"}
BASES: Mapping[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 1},
    "/v1/messages": {"messages": [_USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [_USER]},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/api/chat": {"model": "tiny-llama", "messages": [_USER], "options": {"num_predict": 1}},
    "/api/generate": {"model": "tiny-llama", "prompt": "x", "options": {"num_predict": 1}},
    "/api/show": {"model": "tiny-llama"},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"query": "x", "items": ["x"]},
    "/rerank": {"query": "x", "documents": ["x"]},
    "/classify": {"input": "x"},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [7]},
}
_MIB = 1 << 20


class Edge(NamedTuple):
    """legal: the largest value that is served; illegal: the smallest that is not, with its code; wrong: what is of the
    wrong kind, repeated until the body is as large as one may be."""

    legal: object
    illegal: object
    code: str
    wrong: object = {}


def _functions(schemas: list[dict[str, object]], name: str = "f") -> list[dict[str, object]]:
    return [
        {"type": "function", "function": {"name": f"{name}{index or ''}", "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]


def _nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth - 1):
        value = {"x": value}
    return value


_STOP_IDS = Edge([7] * 256, [7] * 257, "TOO_MANY_STOPS", "a")
_STOPS = Edge(["s" * 1000] * 64, ["s"] * 65, "TOO_MANY_STOPS", 1)
_NAME = Edge("n" * 256, "n" * 257, "INVALID_ARGUMENT")
_IDS = Edge([7] * 1000, [7] * 200_000, "context_length_exceeded")
# 65,536 values: one comma or bracket each.
_TOOLS = Edge(_functions([{"x": [1] * 60_000}]), _functions([{"x": [1] * 65_536}]), "TOO_LARGE", 1)
_ARGS = Edge({"x": [1] * 60_000}, {"x": [1] * 65_536}, "TOO_LARGE")
_TEXTS = Edge(["a"] * 1024, ["a"] * 1025, "INVALID_ARGUMENT")
# Legal is what asks for nothing: the mesh of these tests follows no grammar.
_GRAMMAR = Edge("", "a" * (_MIB + 1), "INVALID_GRAMMAR")
# By field, the same on every route that has it, but for those of _OF_ROUTE.
EDGES: Mapping[str, Edge] = {
    **dict.fromkeys(("cache_salt", "prompt_cache_key", "tenant"), _NAME),
    "model": Edge("tiny-llama", "n" * 257, "INVALID_ARGUMENT"),
    **dict.fromkeys(("request_id", "rid"), Edge(None, "r" * 300, "INVALID_ARGUMENT")),
    "prompt": _TEXTS,
    "text": _TEXTS,
    "input": Edge(["a"] * 2048, ["a"] * 2049, "INVALID_ARGUMENT"),
    "input_ids": _IDS,
    "stop": _STOPS,
    "stop_token_ids": _STOP_IDS,
    "logit_bias": Edge({str(i): 1 for i in range(700)}, {str(i): 1 for i in range(1025)}, "INVALID_ARGUMENT"),
    "stream_options": Edge({"include_usage": True}, {f"o{i}": 1 for i in range(257)}, "TOO_LARGE"),
    "seed": Edge(2**64 - 1, 2**64, "INVALID_ARGUMENT"),
    "messages": Edge([_USER] * 4, [_USER] * 4097, "TOO_LARGE"),
    "tools": _TOOLS,
    "tool_choice": Edge("none", "sometimes", "INVALID_ARGUMENT"),
    "reasoning_effort": Edge("e" * 256, "e" * 257, "INVALID_ARGUMENT"),
    "chat_template_kwargs": _ARGS,
    **dict.fromkeys(("regex", "guided_regex", "ebnf", "guided_grammar", "structural_tag"), _GRAMMAR),
    **dict.fromkeys(("json_schema", "guided_json"), Edge({}, "a" * (_MIB + 1), "INVALID_GRAMMAR")),
    "guided_choice": Edge([], ["a"] * 1025, "TOO_LARGE"),
    "guided_json_object": Edge(False, 1, "INVALID_ARGUMENT"),
    "response_format": Edge({"type": "text"}, {"type": "t" * 1000}, "UNSUPPORTED"),
    "structured_outputs": Edge({}, {f"o{i}": 1 for i in range(257)}, "TOO_LARGE"),
    "sampling_params": Edge([{}], [{}] * 1025, "INVALID_ARGUMENT"),
    "sampling_seed": Edge(2**64 - 1, 2**64, "INVALID_ARGUMENT"),
    "tokens": Edge([7] * 1000, [[7] * 1024] * 1025, "INVALID_ARGUMENT"),
}
_TYPED = {"type": "t" * 1000}
_ITEM = {"role": "user", "content": "x"}
_OWN_TOOL = {"name": "f", "input_schema": {"x": [1] * 60_000}}
_FUNCTION = {"type": "function", "name": "f", "parameters": {"x": [1] * 60_000}}
_TEXT = Edge("s" * 1000, "s" * (5 * _MIB), "TOO_LARGE", 1)
_ANTHROPIC: Mapping[str, Edge] = {
    "system": _TEXT,
    "tools": Edge([_OWN_TOOL], [{**_OWN_TOOL, "input_schema": {"x": [1] * 65_536}}], "TOO_LARGE", 1),
    "tool_choice": Edge({"type": "auto"}, _TYPED, "INVALID_ARGUMENT"),
    "thinking": Edge({"type": "disabled"}, _TYPED, "INVALID_ARGUMENT"),
    "output_config": Edge({}, {"format": _TYPED}, "UNSUPPORTED"),
    "stop_sequences": _STOPS,
}
_OLLAMA: Mapping[str, Edge] = {
    "format": Edge("", "f" * 1000, "INVALID_ARGUMENT"),
    "options": Edge({"num_predict": 1, "num_ctx": 8}, {f"o{i}": 1 for i in range(257)}, "TOO_LARGE"),
    "think": Edge("e" * 256, "e" * 257, "INVALID_ARGUMENT"),
}
_OF_ROUTE: Mapping[tuple[str, str], Edge] = {
    **{
        (path, field): edge
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for field, edge in _ANTHROPIC.items()
    },
    **{(path, field): edge for path in ("/api/chat", "/api/generate") for field, edge in _OLLAMA.items()},
    ("/api/generate", "prompt"): _TEXT,
    ("/api/generate", "system"): _TEXT,
    ("/api/show", "name"): Edge("tiny-llama", "n" * 257, "INVALID_ARGUMENT"),
    ("/v1/responses", "input"): Edge([_ITEM] * 4, [_ITEM] * 4097, "TOO_LARGE"),
    ("/v1/responses", "instructions"): _TEXT,
    ("/v1/responses", "previous_response_id"): Edge(None, "r" * 257, "INVALID_ARGUMENT"),
    ("/v1/responses", "text"): Edge({"format": {"type": "text"}}, {"format": _TYPED}, "UNSUPPORTED"),
    ("/v1/responses", "tools"): Edge([_FUNCTION], [{**_FUNCTION, "parameters": {"x": [1] * 65_536}}], "TOO_LARGE", 1),
    ("/v1/responses", "reasoning"): Edge({"effort": "e" * 256}, {"effort": "e" * 257}, "INVALID_ARGUMENT"),
    ("/v1/responses", "metadata"): _ARGS,
    ("/v1/responses", "include"): Edge([], ["i" * 1000], "UNSUPPORTED"),
    ("/v1/chat/completions", "tools"): Edge(
        _functions([{"x": [1] * 60_000}]), _functions([{"x": [1] * 65_536}]), "TOO_LARGE", 1
    ),
    ("/v1/score", "query"): Edge("s" * 1000, ["s"] * 2, "INVALID_ARGUMENT", 1),
    ("/rerank", "query"): Edge("s" * 1000, ["s"], "INVALID_ARGUMENT", 1),
    **{("/v1/score", name): _TEXTS._replace(wrong=1) for name in ("items", "text_1", "text_2")},
    ("/rerank", "documents"): _TEXTS._replace(wrong=1),
    ("/tokenize", "prompt"): Edge(["a"] * 4096, ["a"] * 4097, "TOO_LARGE"),
}


# Further bounds of a field that has several: number, bytes, depth and names of tools.
_MORE: tuple[tuple[str, str, Edge], ...] = tuple(
    ("/v1/chat/completions", "tools", edge)
    for edge in (
        Edge(_functions([{}] * 1024), _functions([{}] * 1025), "TOO_LARGE"),
        Edge(_functions([{"x": "a" * 262_100}]), _functions([{"x": "a" * 262_144}]), "TOO_LARGE"),
        Edge(_functions([_nested(56)]), _functions([_nested(65)]), "MALFORMED_MESSAGE"),
        Edge(_functions([{}], "n" * 128), _functions([{}], "n" * 129), "INVALID_ARGUMENT"),
        Edge([], [{"type": "function", "function": {"name": "a b"}}], "INVALID_ARGUMENT"),
    )
)


class HostileBody(NamedTuple):
    """code: of the error that answers it; "" where it is to be served, or to fail for want of room alone."""

    name: str
    path: str
    data: bytes
    code: str


def sized_fields(kind: type[Body]) -> list[str]:
    """Fields that a client can make as large as it likes: all but numbers, flags and enumerations."""
    names = []
    for name, decoder in decoders_of(kind).items():
        kinds = msgspec.inspect.type_info(decoder.type) if decoder is not None else None
        members = kinds.types if isinstance(kinds, msgspec.inspect.UnionType) else (kinds,)
        if decoder is None or any(isinstance(member, msgspec.inspect.StrType) for member in members):
            names.append(name)
    return names


def fields_of(path: str) -> list[str]:
    return [*sized_fields(ROUTES[path]), *(sized_fields(NativeSampling) if path == "/generate" else ())]


def has_edge(path: str, field: str) -> bool:
    return (path, field) in _OF_ROUTE or field in EDGES


def bodies(size: int) -> Iterator[HostileBody]:
    """Per route and field the largest legal, the smallest illegal, and `size` bytes of what is wrong in kind."""
    for path in ROUTES:
        for field in fields_of(path):
            edge = _OF_ROUTE[path, field] if (path, field) in _OF_ROUTE else EDGES[field]
            yield HostileBody(f"{path} {field} legal", path, _body(path, field, edge.legal), "")
            yield HostileBody(f"{path} {field} illegal", path, _body(path, field, edge.illegal), edge.code)
            part = json.dumps(edge.wrong).encode()
            many = b"[" + (part + b",") * (size // (len(part) + 1)) + part + b"]"
            mark = json.dumps("wrong").encode()
            yield HostileBody(f"{path} {field} wrong", path, _body(path, field, "wrong").replace(mark, many), "any")
    for number, (path, field, edge) in enumerate(_MORE):
        yield HostileBody(f"{path} {field} legal {number}", path, _body(path, field, edge.legal), "")
        yield HostileBody(f"{path} {field} illegal {number}", path, _body(path, field, edge.illegal), edge.code)


def _body(path: str, field: str, value: object) -> bytes:
    base = dict(BASES[path])
    if path == "/generate" and field in sized_fields(NativeSampling):
        return json.dumps({**base, "sampling_params": {"max_new_tokens": 1, field: value}}).encode()
    if path == "/v1/score" and field in ("text_1", "text_2"):
        base = {"text_1": ["x"] * 1024 if field == "text_2" else "x", "text_2": ["x"] * 1024}
    if field in ("messages", "input_ids"):
        base = {name: kept for name, kept in base.items() if name not in ("prompt", "text")}
    if path == "/tokenize" and field in ("tools", "chat_template_kwargs"):
        base = {"messages": [_USER]}
    return json.dumps({**base, field: value}).encode()
