"""A constraint as its author wrote it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

MAX_SOURCE_BYTES = 1 << 20


class GrammarForm(Enum):
    """The forms of common.v1.Grammar; the values are its field names."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    ANY_JSON = "any_json"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """text: the schema, expression or grammar; "" of ANY_JSON."""

    form: GrammarForm
    text: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of form and text: equal sources are compiled once."""
        return hashlib.sha256(f"{self.form.value}\n{self.text}".encode()).hexdigest()


def grammar_source(message: common_pb2.Grammar) -> GrammarSource:
    """Reads a message. Raises MISSING_FIELD without a source, INVALID_GRAMMAR beyond 1 MiB or where it is empty."""
    name = message.WhichOneof("source")
    if name is None or (name == "any_json" and not message.any_json):
        text = "grammar has no source: set json_schema, regex, ebnf, structural_tag or any_json = true"
        raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, text, {"field": "grammar"})
    form = GrammarForm(name)
    if form is GrammarForm.ANY_JSON:
        return GrammarSource(form)
    text = getattr(message, name)
    num_bytes = len(text.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise invalid_grammar(f"the {name} has {num_bytes} bytes: {MAX_SOURCE_BYTES} at most", "source_bytes")
    if not text:
        raise invalid_grammar(f"the {name} is empty: leave the constraint out, or write one", "")
    return GrammarSource(form, text)


def grammar_to_proto(source: GrammarSource) -> common_pb2.Grammar:
    value = True if source.form is GrammarForm.ANY_JSON else source.text
    return common_pb2.Grammar(**{source.form.value: value})  # type: ignore[arg-type]


def invalid_grammar(message: str, limit: str) -> MeshError:
    """limit: the name of the limit that was met; "" for a grammar that is wrong in itself."""
    return MeshError(ErrorReason.ERROR_REASON_INVALID_GRAMMAR, message, {"limit": limit})
