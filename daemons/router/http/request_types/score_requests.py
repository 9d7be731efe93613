"""The bodies of /v1/score and /rerank: texts in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import msgspec

from radixmesh.daemons.router.http.bodies.body import Body, Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import (
    MaybeRaw,
    decode,
    invalid,
    list_of,
    read_fields,
    text_of,
    too_large,
)
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.request_types.options import Int32, Name, RequestId, Uint32
from radixmesh.daemons.router.http.request_types.prompts import MAX_PROMPTS, MAX_SHARED_BYTES
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

# Each is a request of its own for every pair.
MAX_LABELS = 64
_TEXT = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest(Body):
    """The common part of bodies of pairs.

    firsts, seconds: the texts, of which a single one goes with all of the others. The ids of a pair are those of the
    first text, with special tokens, and those of the second without; `is_joined`: those of both written as one text.
    """

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"firsts", "seconds", "num_firsts", "is_joined"}
    BULK: ClassVar[frozenset[str]] = frozenset(("firsts", "seconds"))

    model: Name | None = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    tenant: Name | None = None
    request_id: RequestId | None = None
    firsts: Sequence[str] = ()
    seconds: Sequence[str] = ()
    num_firsts: int = 0
    is_joined: bool = False

    def with_pairs(self, firsts: Sequence[str], seconds: Sequence[str], *, is_joined: bool = False) -> Self:
        return replace(self, firsts=firsts, seconds=seconds, num_firsts=len(firsts), is_joined=is_joined)

    @classmethod
    def message_type(cls) -> type[router_pb2.TokenizeRequest]:
        return router_pb2.TokenizeRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.TokenizeRequest]:
        """One message for all texts. Raises TOO_LARGE where the joined texts are."""
        request = router_pb2.TokenizeRequest(model=self.model or "")
        if self.is_joined:
            size = sum(len(first) for first in self.firsts) * len(self.seconds) + sum(map(len, self.seconds))
            if size > MAX_SHARED_BYTES:
                raise too_large("items", "characters, with the query before each", size, MAX_SHARED_BYTES)
            for first, second in paired(self.firsts, self.seconds):
                request.items.append(tokenizer_pb2.EncodeItem(text=first + second))
        else:
            for text in self.firsts:
                request.items.append(tokenizer_pb2.EncodeItem(text=text))
            for text in self.seconds:
                request.items.append(tokenizer_pb2.EncodeItem(text=text, add_special_tokens=False))
        yield request


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(PairRequest):
    """Either text_1 and text_2, as vLLM has them, or query and items, as SGLang has them.

    label_token_ids: how likely each of these is as the next token, in place of a score head's score; apply_softmax:
    among themselves. activation: false for the score as the head gives it, else its sigmoid.
    """

    text_1: MaybeRaw = None
    text_2: MaybeRaw = None
    query: MaybeRaw = None
    items: MaybeRaw = None
    label_token_ids: Annotated[list[Int32], msgspec.Meta(max_length=MAX_LABELS)] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    activation: bool | None = None

    def settled(self) -> Self:
        if self.label_token_ids is not None and not self.label_token_ids:
            raise invalid("label_token_ids", "label_token_ids is empty: name ids, or leave it out")
        is_pairs = self.text_1 is not None
        other = (self.query, self.items, self.item_first or None) if is_pairs else (self.text_2,)
        if is_pairs == (self.query is not None) or any(field is not None for field in other):
            message = "set text_1 and text_2, or query and items: what to score"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "text_1"})
        if self.text_1 is not None:
            firsts, seconds = _texts(self.text_1, "text_1"), _texts(_required(self.text_2, "text_2"), "text_2")
            if len(firsts) not in (1, len(seconds)):
                message = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: send one, or as many"
                raise invalid("text_1", message)
            return self.with_pairs(firsts, seconds)
        query, items = _texts(_required(self.query, "query"), "query"), _texts(_required(self.items, "items"), "items")
        if len(query) != 1:
            raise invalid("query", f"query has {len(query)} texts: send one")
        return (
            self.with_pairs(items, query, is_joined=True)
            if self.item_first
            else self.with_pairs(query, items, is_joined=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(PairRequest):
    """Cohere's and Jina's form: documents are texts, or objects with a text."""

    query: MaybeRaw
    documents: MaybeRaw
    top_n: Uint32 | None = None
    return_documents: bool | None = None

    def settled(self) -> Self:
        assert self.query is not None and self.documents is not None
        documents = _texts(self.documents, "documents")
        return self.with_pairs([text_of(self.query, "query")], documents)


def paired(firsts: Sequence[str], seconds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs: a single text goes with each of the others."""
    if len(firsts) == 1:
        yield from ((firsts[0], second) for second in seconds)
    elif len(seconds) == 1:
        yield from ((first, seconds[0]) for first in firsts)
    else:
        yield from zip(firsts, seconds, strict=True)


def _texts(raw: Bytes, field: str) -> list[str]:
    """A text, or a list of texts or of {"text": ...}; not empty. Raises INVALID_ARGUMENT."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return [_text(raw, field)]
    entries = list_of(raw, field, MAX_PROMPTS, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
    if not entries:
        raise invalid(field, f"{field} is empty: send at least one text")
    return [_text(entry, field) for entry in entries]


def _text(raw: Bytes, field: str) -> str:
    if bytes(memoryview(raw)[:1]) != b"{":
        return text_of(raw, field)
    text = read_fields(raw, field).get("text")
    if text is None:
        raise invalid(field, f'{field} has an object without a text: send {{"text": ...}}')
    return decode(_TEXT, text, field)


def _required(raw: Bytes | None, field: str) -> Bytes:
    if raw is None:
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, f"{field} is missing: set it", {"field": field})
    return raw
