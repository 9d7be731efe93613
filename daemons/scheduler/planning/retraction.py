"""When pages run out: of the lowest priority the youngest running request gives way, its output kept.

It leaves its slot in the plan being made, k. Results of plans before k still count, so it waits for that of k - 1
before it can be admitted again with all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.decode_reserve import GrowthEstimate
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.queue.validation import outgrown
from radixmesh.daemons.scheduler.results.stop_conditions import Ending, FinishReason
from radixmesh.daemons.scheduler.sequence import Lifecycle, Request


class Retraction:
    """finish: ends a live request with an error."""

    def __init__(
        self,
        queue: WaitingQueue,
        growth: GrowthEstimate,
        counters: PlannerCounters,
        finish: Callable[[Request, Ending, MeshError | None], None],
    ) -> None:
        self._queue = queue
        self._growth = growth
        self._counters = counters
        self._finish = finish

    def give_way(self, state: EpochState, request: Request) -> None:
        """Retracts a running request, or ends it where no other could make room for it."""
        if state.table.num_running == 1 and not state.pages.pool.num_leased:
            error = outgrown(state.group.num_pages - state.pages.pool.num_quarantined)
            self._finish(request, Ending(FinishReason.ERROR), error)
            return
        self._growth.retracted()
        self.leave(state, request)

    def leave(self, state: EpochState, request: Request) -> None:
        """Takes a running request out of its slot; it waits again once its outstanding results are in."""
        row_key = (request.slot, request.generation)
        state.leave(request)
        self._counters.num_retracted += 1
        if not state.in_flight:
            self._requeue(request)
            return
        request.lifecycle = Lifecycle.RETRACTING
        request.waits_for_step = state.last_step_id
        request.retracted_from = row_key
        state.retracting[row_key] = request

    def requeue_answered(self, state: EpochState) -> None:
        """Queues those whose last outstanding result was processed."""
        if not state.retracting:
            return
        done = state.in_flight.last_processed
        for row_key, request in [(k, r) for k, r in state.retracting.items() if r.waits_for_step <= done]:
            del state.retracting[row_key]
            self._requeue(request)

    def unblock(self, state: EpochState) -> None:
        """Nothing can be planned: if that is because prefills wait for each other's pages, the youngest gives way."""
        if state.prefilling and not state.in_flight and not state.releases:
            self.give_way(state, state.table.last_in_line())

    def _requeue(self, request: Request) -> None:
        request.lifecycle = Lifecycle.WAITING
        self._queue.push(request)
