"""Turns of a load: their prompts grow out of the answers before them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.cli.bench.workloads import IntArray, Turn
from radixmesh.client.options import Message

_FIRST_ID = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One form is set. ids int32; text; messages of a chat."""

    ids: IntArray | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTurn:
    """parent: index in the list, or None. added: what this turn adds to its parent's prompt and answer (ids), or to its
    chat (messages). out_len: output tokens asked for. delay_s: after its parent's end, or after the start."""

    parent: int | None
    added: Prompt
    out_len: int
    delay_s: float


def load_turns(turns: Sequence[Turn], vocab_size: int | None) -> list[LoadTurn]:
    """Turns of ids. Ids beyond a smaller vocabulary are folded into it: what is shared stays shared."""
    return [
        LoadTurn(
            parent=turn.parent,
            added=Prompt(ids=fold_ids(turn.new_ids, vocab_size)),
            out_len=turn.out_len,
            delay_s=turn.delay_s,
        )
        for turn in turns
    ]


def fold_ids(ids: IntArray, vocab_size: int | None) -> IntArray:
    """ids below vocab_size, equal where they were equal; those below 10 are left to special tokens.

    Raises ValueError for a vocabulary that has nothing else.
    """
    if vocab_size is None or (len(ids) > 0 and int(ids.max()) < vocab_size):
        return ids
    if vocab_size <= _FIRST_ID:
        raise ValueError(f"a vocabulary of {vocab_size} ids is too small for a load: at least {_FIRST_ID + 1}")
    return ((ids - _FIRST_ID) % (vocab_size - _FIRST_ID) + _FIRST_ID).astype(np.int32)


def next_prompt(turn: LoadTurn, before: Prompt | None, answer_ids: IntArray, answer_text: str) -> Prompt:
    """The whole prompt of a turn; before: its parent's whole prompt, None for a first turn."""
    if before is None:
        return turn.added
    if turn.added.messages is not None:
        assert before.messages is not None, "a chat goes on as a chat"
        answer: Message = {"role": "assistant", "content": answer_text}
        return Prompt(messages=(*before.messages, answer, *turn.added.messages))
    assert before.ids is not None and turn.added.ids is not None, "only ids and chats have several turns"
    return Prompt(ids=np.concatenate([before.ids, answer_ids, turn.added.ids]))


def paced(turns: Sequence[LoadTurn], rate: float, seed: int) -> list[LoadTurn]:
    """The same turns, those without a parent arriving as a Poisson process of `rate` a second (inf: all at once)."""
    num_first = sum(turn.parent is None for turn in turns)
    gaps = np.zeros(num_first) if math.isinf(rate) else np.random.default_rng(seed).exponential(1 / rate, num_first)
    arrivals = iter(np.cumsum(gaps).tolist())
    return [turn if turn.parent is not None else replace(turn, delay_s=next(arrivals)) for turn in turns]


def time_scaled(turns: Sequence[LoadTurn], scale: float) -> list[LoadTurn]:
    """The same turns with every delay times `scale`."""
    return [replace(turn, delay_s=turn.delay_s * scale) for turn in turns]


def first_of(turns: Sequence[LoadTurn], num: int) -> list[LoadTurn]:
    """At most `num` turns, whole beginnings of conversations only: a parent comes before its children in every list."""
    return list(turns[:num])
