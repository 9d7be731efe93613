"""A plan of all data-parallel ranks as one plan a rank, with each rank's own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grants, PageCopy, PageMove, Release, StepPlan

_Item = TypeVar("_Item", Admit, Chunk, Release)


def sections_of(plan: StepPlan, num_ranks: int, slots_per_rank: int) -> list[StepPlan | None]:
    """The part of each rank, slots counted from 0 in each; None: it has nothing but what the header says.

    Slots of the plan are rank x slots_per_rank + the rank's own. Without page copies and drafts: nobody plans them.
    """
    assert not plan.page_copies and not plan.drafts, "neither has a rank yet"
    is_plain = not (plan.releases or plan.admits or plan.chunks or len(plan.grants) or plan.saves or plan.loads)
    is_plain = is_plain and plan.decode_set is None
    if is_plain:
        return [None] * num_ranks
    releases = _by_rank(plan.releases, num_ranks, slots_per_rank)
    admits = _by_rank(plan.admits, num_ranks, slots_per_rank)
    chunks = _by_rank(plan.chunks, num_ranks, slots_per_rank)
    grants = _grants_by_rank(Grants.of(plan.grants), num_ranks, slots_per_rank)
    copies: tuple[PageCopy, ...] = ()
    decode_sets: Sequence[IntArray | None] = [None] * num_ranks
    if plan.decode_set is not None:
        ranks = plan.decode_set // slots_per_rank
        order = np.argsort(ranks, kind="stable")
        ends = np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1]
        decode_sets = np.split((plan.decode_set % slots_per_rank)[order], ends)
    sections: list[StepPlan | None] = []
    for rank in range(num_ranks):
        decode_set = decode_sets[rank]
        saves, loads = _moves_of(plan.saves, rank), _moves_of(plan.loads, rank)
        has_items = bool(releases[rank] or admits[rank] or chunks[rank] or len(grants[rank]) or saves or loads)
        if not has_items and decode_set is None:
            sections.append(None)
            continue
        sections.append(
            StepPlan(
                epoch=plan.epoch,
                step_id=plan.step_id,
                releases=tuple(releases[rank]),
                admits=tuple(admits[rank]),
                grants=grants[rank],
                page_copies=copies,
                saves=saves,
                loads=loads,
                chunks=tuple(chunks[rank]),
                decode_set=decode_set,
                has_forward=plan.has_forward,
            )
        )
    return sections


def _moves_of(moves: Sequence[PageMove], rank: int) -> tuple[PageMove, ...]:
    return tuple(replace(move, rank=0) for move in moves if move.rank == rank)


def _by_rank(items: Sequence[_Item], num_ranks: int, slots_per_rank: int) -> list[list[_Item]]:
    parts: list[list[_Item]] = [[] for _ in range(num_ranks)]
    for item in items:
        rank, slot = divmod(item.slot, slots_per_rank)
        parts[rank].append(replace(item, slot=slot))
    return parts


def _grants_by_rank(grants: Grants, num_ranks: int, slots_per_rank: int) -> list[Grants | tuple[()]]:
    parts: list[Grants | tuple[()]] = [()] * num_ranks
    if not len(grants):
        return parts
    ranks = grants.slots // slots_per_rank
    page_ranks = np.repeat(ranks, grants.counts)
    for rank in np.unique(ranks).tolist():
        is_mine = ranks == rank
        slots = grants.slots[is_mine] - np.int32(rank * slots_per_rank)
        parts[rank] = Grants(slots, grants.counts[is_mine], grants.pages[page_ranks == rank])
    return parts
