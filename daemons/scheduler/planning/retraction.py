"""Retraction, when pages run out: a running request gives way, its output kept. `last_in_line` says which one.

It leaves its slot in the plan being made, k. Results of plans before k still count, so it waits for that of k - 1
before it can be admitted again with all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.scheduler.planning.admission.decode_reserve import DecodeReserve
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.queue.validation import outgrown
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence


class Retraction:
    """finish: ends a live request with an error."""

    def __init__(
        self,
        queue: WaitingQueue,
        decode_reserve: DecodeReserve,
        counters: PlannerCounters,
        finish: Callable[[Sequence, SequenceEnd, MeshError | None], None],
        let_go: Callable[[EpochState], bool] = lambda state: False,
    ) -> None:
        """let_go: unlocks cached pages that nobody runs on, True if there were any: then nobody else gives way."""
        self._let_go = let_go
        self._queue = queue
        self._decode_reserve = decode_reserve
        self._counters = counters
        self._finish = finish

    def give_way(self, state: EpochState, sequence: Sequence) -> None:
        """Makes room: unlocks cached pages that nobody runs on; where there are none retracts the request, or ends it
        if it runs alone and all pages that there will be are its own. The caller asks again until there is room."""
        if self._let_go(state):
            return
        rank = state.table.rank_of(sequence.slot)
        pool = state.ranks[rank].pool
        num_usable = pool.num_pages - pool.num_quarantined
        # Pages that are leased, or loaded to, come back: it waits for them, unless it has all that there will be.
        is_whole = not (pool.num_leased or pool.num_loading) or state.table.num_pages[sequence.slot] >= num_usable
        if state.table.running_on(rank) == 1 and is_whole:
            error = outgrown(num_usable)
            self._finish(sequence, SequenceEnd(FinishReason.ERROR), error)
            return
        self._decode_reserve.retracted()
        self.leave(state, sequence)

    def leave(self, state: EpochState, sequence: Sequence) -> None:
        """Takes a running request out of its slot; it waits again once its outstanding results are in."""
        row_key = (sequence.slot, sequence.generation)
        state.leave(sequence)
        self._counters.num_retracted += 1
        if not state.in_flight:
            self._requeue(sequence)
            return
        sequence.lifecycle = Lifecycle.RETRACTING
        sequence.waits_for_step = state.last_step_id
        sequence.retracted_from = row_key
        state.retracting[row_key] = sequence

    def requeue_answered(self, state: EpochState) -> None:
        """Queues those whose last outstanding result was processed."""
        if not state.retracting:
            return
        done = state.in_flight.last_processed
        for row_key, sequence in [(k, r) for k, r in state.retracting.items() if r.waits_for_step <= done]:
            del state.retracting[row_key]
            self._requeue(sequence)

    def unblock(self, state: EpochState) -> None:
        """Nothing can be planned: if that is because prefills wait for each other's pages, the last in line gives
        way."""
        if state.prefilling and not state.in_flight and not state.releases:
            self.give_way(state, state.table.last_in_line(state.table.rank_of(state.prefilling[-1].slot)))

    def unblock_ranks(self, state: EpochState, draft: PlanDraft) -> None:
        """The same on single data-parallel ranks, while others go on: for those where nothing runs, nor is planned."""
        table = state.table
        waiting = {table.rank_of(sequence.slot) for sequence in state.prefilling}
        for rank in waiting:
            if draft.rank_tokens[rank] or state.decode_set.num_by_rank[rank]:
                continue
            busy = (
                slot for step in state.in_flight.steps() for slot in (*step.rows.slots, *(c.slot for c in step.chunks))
            )
            if not any(table.rank_of(int(slot)) == rank for slot in busy):
                self.give_way(state, table.last_in_line(rank))

    def _requeue(self, sequence: Sequence) -> None:
        sequence.lifecycle = Lifecycle.WAITING
        self._queue.push(sequence)
