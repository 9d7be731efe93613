"""The data-parallel rank that a waiting sequence is admitted to, by the cost function that routers use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as PySequence
from typing import TYPE_CHECKING

import numpy as np

from radixmesh.daemons.runtime.placement_cost import FloatColumn, IntColumn, placement_costs
from radixmesh.daemons.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft

# Looking into a rank's cache takes some 10 us: into those of the few that may have the prefix, or are cheap without it.
_MOST_PROBED = 8
_NUM_CHEAP = 4
# Of a prefix, to find the ranks that computed others like it; and how many such prefixes are remembered.
_KEY_TOKENS = 32
_MOST_KEYS = 65_536
_RANKS_A_KEY = 4


class RecentPrefixes:
    """Ranks where sequences with the same first tokens were admitted lately, the last one first. Bounded."""

    def __init__(self, num_ranks: int) -> None:
        self._is_needed = num_ranks > _MOST_PROBED
        self._num_ranks = num_ranks
        self._ranks: OrderedDict[tuple[str, bytes], tuple[int, ...]] = OrderedDict()

    def ranks_of(self, sequence: Sequence) -> tuple[int, ...]:
        """Ranks that may have a prefix of it; all of them where they are few."""
        if not self._is_needed:
            return tuple(range(self._num_ranks))
        return self._ranks.get(_key(sequence), ())

    def admitted(self, sequence: Sequence, rank: int) -> None:
        """The sequence computes on that rank."""
        if not self._is_needed:
            return
        key = _key(sequence)
        before = self._ranks.pop(key, ())
        self._ranks[key] = (rank, *(other for other in before if other != rank))[:_RANKS_A_KEY]
        if len(self._ranks) > _MOST_KEYS:
            self._ranks.popitem(last=False)


class RankLoads:
    """Loads of all ranks at the beginning of a plan, columns int64 [ranks], brought up to date by its admissions.

    num_parked: sequences that wait for KV which comes to a rank's memory. They will run there, but have no slot yet.
    load_cost, store_cost: time of a token that is loaded from the host, or comes from the store, as a share of a
    computed one's.
    """

    def __init__(
        self, state: EpochState, num_parked: Mapping[int, int], load_cost: float = 0.0, store_cost: float = 0.0
    ) -> None:
        self.load_cost, self.store_cost = load_cost, store_cost
        table = state.table
        to_prefill = np.maximum(table.target_len - table.planned_len, 0) * (table.live > 0)
        self.queued_tokens = to_prefill.reshape(table.num_ranks, -1).sum(axis=1, dtype=np.int64)
        self.num_outputs = table.running_by_rank().astype(np.int64)
        self.num_parked = np.array([num_parked.get(rank, 0) for rank in range(table.num_ranks)], np.int64)
        free = [pages.pool.num_free for pages in state.ranks]
        self.free_tokens = np.array(free, np.int64) * state.group.page_size

    def admitted(self, state: EpochState, slot: int) -> None:
        """A slot was taken, with its first chunk planned."""
        table, rank = state.table, state.table.rank_of(slot)
        self.num_outputs[rank] += 1
        self.queued_tokens[rank] += max(0, table.target_len.item(slot) - table.planned_len.item(slot))
        self.free_tokens[rank] = state.ranks[rank].pool.num_free * state.group.page_size


def rank_order(
    state: EpochState, draft: PlanDraft, loads: RankLoads, sequence: Sequence, max_running: int
) -> PySequence[int]:
    """Ranks with a slot and tokens left in the plan, for a waiting sequence, the cheapest first; at most eight."""
    has_room = (loads.num_outputs < min(max_running, state.table.slots_per_rank)) & (np.array(draft.token_budgets) > 0)
    open_ranks = np.flatnonzero(has_room)
    if not len(open_ranks):
        return ()
    num_tokens = sequence.total_len
    matched, load_tokens = np.zeros(state.table.num_ranks, np.int64), np.zeros(state.table.num_ranks)
    chosen = open_ranks
    if len(open_ranks) > _MOST_PROBED:
        costs = _costs(num_tokens, loads, matched, load_tokens)[open_ranks]
        cheap = open_ranks[np.argpartition(costs, _NUM_CHEAP)[:_NUM_CHEAP]]
        likely = [rank for rank in state.recent.ranks_of(sequence) if has_room[rank]]
        chosen = np.unique(np.concatenate([cheap, np.array(likely, np.int64)]))
    for rank in chosen.tolist():
        on_device, nearer, found = state.ranks[rank].found(sequence)
        waits = loads.load_cost * (nearer - on_device) + loads.store_cost * (found - nearer)
        matched[rank], load_tokens[rank] = found * state.group.page_size, waits * state.group.page_size
    costs = _costs(num_tokens, loads, matched, load_tokens)[chosen]
    order: list[int] = chosen[np.argsort(costs, kind="stable")].tolist()
    return order


def likely_rank(state: EpochState, sequence: Sequence) -> int:
    """The rank that a sequence without a slot will probably get: the one that has most of its prefix in any tier, and
    of those the one with the fewest outputs. At most eight are looked at."""
    running = state.table.running_by_rank()
    ranks = state.recent.ranks_of(sequence) or (int(running.argmin()),)
    return max(ranks, key=lambda rank: (state.ranks[rank].found(sequence)[2], -int(running[rank])))


def arrival_ranks(
    state: EpochState, num_tokens: int, matched_tokens: PySequence[int], num_arriving: Mapping[int, int]
) -> list[int]:
    """Ranks for KV that comes from elsewhere, and for the request behind it, the cheapest first. matched_tokens: cached
    on each. num_arriving: transfers that have a place on a rank already."""
    loads = RankLoads(state, num_arriving)
    matched = np.array(matched_tokens, np.int64)
    costs = _costs(num_tokens, loads, matched, np.zeros(len(matched)))
    order: list[int] = np.argsort(costs, kind="stable").tolist()
    return order


def _costs(num_tokens: int, loads: RankLoads, matched: IntColumn, load_tokens: FloatColumn) -> FloatColumn:
    return placement_costs(
        num_tokens,
        matched_tokens=matched,
        queued_tokens=loads.queued_tokens,
        free_tokens=loads.free_tokens,
        num_outputs=loads.num_outputs + loads.num_parked,
        load_tokens=load_tokens,
    )


def _key(sequence: Sequence) -> tuple[str, bytes]:
    return sequence.cache_name, sequence.submission.prompt_ids[:_KEY_TOKENS].tobytes()
