"""Inputs and outputs of a DecoderTable: the frames of detokenizer.proto without their packing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.daemons.runtime.detokenize.output_decoder import StopHit
from radixmesh.daemons.runtime.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEntry:
    """One output to decode; fields as in detokenizer.proto's Open."""

    handle: int
    request_id: str = ""
    prompt_tail_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    emitted_text_bytes: int = 0
    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    eos_ids: Collection[int] = ()
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """New tokens of many entries; the first four have one value per row, ids holds the rows one after the other."""

    handles: Sequence[int]
    first_indexes: Sequence[int]
    counts: Sequence[int]
    finals: Sequence[int]
    ids: Sequence[int]
    # Lowest and highest of ids, known from an array scan: rows are looked at one by one only where they are outside.
    min_id: int
    max_id: int


class TextDelta(NamedTuple):
    """New text of one entry; fields as in detokenizer.proto's TextRow."""

    handle: int
    text_offset: int
    text: str
    num_tokens: int
    stop: StopHit | None
    is_final: bool


class EntryFailure(NamedTuple):
    """An entry that is gone. is_lost: opening it again continues it, else error is final."""

    handle: int
    is_lost: bool
    error: MeshError


class Pending(NamedTuple):
    """One response, with one delta and one failure an entry; a long text goes on in the next response."""

    deltas: list[TextDelta]
    failures: list[EntryFailure]
