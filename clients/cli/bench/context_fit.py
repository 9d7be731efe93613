"""Workloads made shorter, so that the served model's context holds them; what they share stays shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.cli.bench.load_turn import LoadTurn
from radixmesh.cli.bench.workloads import IntArray, Turn

_MAX_TRIES = 64


def fitting_share(turns: Sequence[LoadTurn], context: int | None) -> float:
    """The share of all lengths with which every prompt and its output have `context` tokens at most: in (0, 1].

    1 where the context or the lengths (texts, chats) are not known. Raises ValueError for a context that holds no
    conversation of so many turns.
    """
    share = 1.0
    longest = longest_of(turns, share)
    for _ in range(_MAX_TRIES):
        if not context or longest <= context:
            return share
        # Below the ratio, for the lengths that are rounded up to 1.
        share *= min(0.99, context / longest)
        longest = longest_of(turns, share)
    raise ValueError(f"a context of {context} tokens is too short for this workload: name another --dataset")


def longest_of(turns: Sequence[LoadTurn], share: float = 1.0) -> int:
    """Tokens of the longest prompt and its output, with every length times share; 0 without turns of ids."""
    totals: list[int] = []
    for turn in turns:
        before = 0 if turn.parent is None else totals[turn.parent]
        num_ids = 0 if turn.added.ids is None else scaled_length(len(turn.added.ids), share)
        totals.append(before + num_ids + scaled_length(turn.out_len, share))
    return max((total for total, turn in zip(totals, turns, strict=True) if turn.added.ids is not None), default=0)


def scaled_turns(turns: Sequence[LoadTurn], share: float) -> list[LoadTurn]:
    """The same turns with every length times share; texts as they are."""
    return [
        turn
        if turn.added.ids is None
        else replace(
            turn,
            added=replace(turn.added, ids=scaled_ids(turn.added.ids, share)),
            out_len=scaled_length(turn.out_len, share),
        )
        for turn in turns
    ]


def scaled_plain(turns: Sequence[Turn], share: float) -> list[Turn]:
    """As scaled_turns, of turns that are not sent."""
    return [
        replace(turn, new_ids=scaled_ids(turn.new_ids, share), out_len=scaled_length(turn.out_len, share))
        for turn in turns
    ]


def scaled_ids(ids: IntArray, share: float) -> IntArray:
    """Ids at positions that are spread evenly and depend on nothing else: equal beginnings stay equal."""
    if share >= 1 or not len(ids):
        return ids
    steps = np.floor(np.arange(len(ids) + 1) * share)
    kept: IntArray = ids[np.diff(steps) > 0]
    return kept if len(kept) else ids[:1]


def scaled_length(num: int, share: float) -> int:
    """As many as scaled_ids keeps; at least one of some."""
    return num if share >= 1 or not num else max(1, int(np.floor(num * share)))
