"""A constraint as its author wrote it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

MAX_SOURCE_BYTES = 1 << 20
# Of what begins or ends a thought.
MAX_TAG_BYTES = 64


class GrammarForm(Enum):
    """The forms of common.v1.Grammar; the values are its field names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    ANY_JSON = "any_json"


class Thought(NamedTuple):
    """Free text up to `end`: at once if is_open, else where the output begins with `begin`."""

    begin: str
    end: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """text: the schema, expression or grammar; "" of ANY_JSON. thought: what may come before; None = nothing."""

    form: GrammarForm
    text: str = ""
    thought: Thought | None = None

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all of it: equal sources are compiled once."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The form and the thought on a line, then the text: for of_bytes() in another process."""
        thought = f" {json.dumps(self.thought)}" if self.thought is not None else ""
        return f"{self.form.value}{thought}\n{self.text}".encode()

    @classmethod
    def of_bytes(cls, data: bytes | bytearray) -> GrammarSource:
        head, _, text = data.decode().partition("\n")
        form, _, thought = head.partition(" ")
        return cls(GrammarForm(form), text, Thought(*json.loads(thought)) if thought else None)


def grammar_source(message: common_pb2.Grammar) -> GrammarSource:
    """Reads a message. Raises MISSING_FIELD without a source, INVALID_GRAMMAR beyond 1 MiB or where it is empty."""
    name = message.WhichOneof("source")
    if name is None or (name == "any_json" and not message.any_json):
        text = "grammar has no source: set json_schema, regex, ebnf, structural_tag or any_json = true"
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, text, {"field": "grammar"})
    form = GrammarForm(name)
    thought = _thought(message.thought) if message.HasField("thought") else None
    if form is GrammarForm.ANY_JSON:
        return GrammarSource(form, thought=thought)
    text = getattr(message, name)
    num_bytes = len(text.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise invalid_grammar(f"the {name} has {num_bytes} bytes: {MAX_SOURCE_BYTES} at most", "source_bytes")
    if not text:
        raise invalid_grammar(f"the {name} is empty: leave the constraint out, or write one", "")
    return GrammarSource(form, text, thought)


def _thought(message: common_pb2.Thought) -> Thought:
    if not message.end or max(len(message.begin.encode()), len(message.end.encode())) > MAX_TAG_BYTES:
        text = f"grammar.thought needs an end, and tags of at most {MAX_TAG_BYTES} bytes: set them"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, text, {"field": "grammar.thought"})
    return Thought(message.begin, message.end, message.is_open)


def grammar_to_proto(source: GrammarSource) -> common_pb2.Grammar:
    value = True if source.form is GrammarForm.ANY_JSON else source.text
    message = common_pb2.Grammar(**{source.form.value: value})  # type: ignore[arg-type]
    if source.thought is not None:
        begin, end, is_open = source.thought
        message.thought.CopyFrom(common_pb2.Thought(begin=begin, end=end, is_open=is_open))
    return message


def invalid_grammar(message: str, limit: str) -> MeshError:
    """limit: the name of the limit that was met; "" for a grammar that is wrong in itself."""
    return MeshError(ErrorReason.ERROR_REASON_INVALID_GRAMMAR, message, {"limit": limit})
