"""Moves of experts that bring one placement of a layer to another. Pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# Ranks above which those of a new placement are taken in its own order: pairs of ranks are compared.
_MOST_RANKS_MATCHED = 64


class ExpertMove(NamedTuple):
    """Slot `target` gets the expert that is at slot `source` now."""

    source: int
    target: int


def fewest_moves(experts: Sequence[int], by_rank: Sequence[Sequence[int]]) -> list[ExpertMove]:
    """Moves after which each rank has the experts of one of `by_rank`, as many as it has slots.

    experts: at each slot now, -1: none; slots of a rank are neighbours, and each expert has one. Which rank gets
    which of `by_rank` is free: those that have most of it already. An expert that a rank keeps stays where it is.
    """
    num_ranks, size = len(by_rank), len(experts) // len(by_rank)
    held = [Counter(experts[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    sources: dict[int, list[int]] = defaultdict(list)
    for slot, expert in enumerate(experts):
        sources[expert].append(slot)
    num_sent = [0] * num_ranks
    moves: list[ExpertMove] = []
    for rank, new in enumerate(_matched(held, [Counter(of_rank) for of_rank in by_rank])):
        wanted, free = Counter(new), []
        for slot in range(rank * size, (rank + 1) * size):
            if wanted[experts[slot]] > 0:
                wanted[experts[slot]] -= 1
            else:
                free.append(slot)
        for expert, target in zip(sorted(wanted.elements()), free, strict=False):
            # From this rank itself, else from the one that has sent least.
            source = min(sources[expert], key=lambda slot: (slot // size != rank, num_sent[slot // size], slot))
            num_sent[source // size] += source // size != rank
            moves.append(ExpertMove(source, target))
    return moves


def _matched(held: Sequence[Counter[int]], new: Sequence[Counter[int]]) -> list[Counter[int]]:
    """The new experts of each rank, so that many of them are there already."""
    num_ranks = len(held)
    if num_ranks > _MOST_RANKS_MATCHED:
        return list(new)
    pairs = [
        (-(held[rank] & new[index]).total(), rank, index) for rank in range(num_ranks) for index in range(num_ranks)
    ]
    chosen: dict[int, int] = {}
    for _, rank, index in sorted(pairs):
        if rank not in chosen and index not in chosen.values():
            chosen[rank] = index
    return [new[chosen[rank]] for rank in range(num_ranks)]
