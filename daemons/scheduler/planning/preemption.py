"""Preemption: a sequence of higher priority takes the slot and pages of running ones of lower priority.

Bounded: a few victims per plan, each of strictly lower priority, and none is preempted more than max_times; after that
it runs to its end.
"""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.scheduler.planning.admission.prefill import Prefill
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.planning.retraction import Retraction
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue, sub_queue_key
from radixmesh.daemons.scheduler.sequence import Sequence

_MOST_A_PLAN = 8


class Preemption:
    """max_times: how often one request gives way. across_tenants: to those of other routers and tenants, too."""

    def __init__(
        self,
        queue: WaitingQueue,
        retraction: Retraction,
        counters: PlannerCounters,
        *,
        max_times: int,
        across_tenants: bool = False,
    ) -> None:
        self._queue = queue
        self._retraction = retraction
        self._counters = counters
        self._max_times = max_times
        self._across_tenants = across_tenants

    @classmethod
    def of(
        cls, settings: PlannerSettings, queue: WaitingQueue, retraction: Retraction, counters: PlannerCounters
    ) -> Preemption | None:
        """None where the settings' policy preempts nobody."""
        if not settings.queue_settings().may_preempt:
            return None
        across = settings.priority_across_tenants
        return cls(queue, retraction, counters, max_times=settings.max_preemptions, across_tenants=across)

    def make_room(self, state: EpochState, draft: PlanDraft, prefill: Prefill) -> None:
        """Before chunks are added: retracts lower ones, lowest and youngest first, until the next request has room.

        Those retracted go where any retracted request goes: their output is kept. Nobody goes unless all that go make
        room enough.
        """
        sequence = self._queue.head()
        if sequence is None or draft.has_retracted:
            return
        ranks = range(state.table.num_ranks)
        if any(prefill.has_room(state, sequence, rank) for rank in ranks):
            return
        # Pages granted in this very plan would go to whoever gets the slot next: their owners stay for now.
        granted = draft.granted_slots()
        victims = [victim for victim in self._victims(state, sequence) if victim.slot not in granted]
        for rank in sorted({state.table.rank_of(victim.slot) for victim in victims}):
            if self._make_room_on(state, prefill, sequence, victims, rank):
                return

    def _make_room_on(
        self, state: EpochState, prefill: Prefill, sequence: Sequence, victims: list[Sequence], rank: int
    ) -> bool:
        page_size = state.group.page_size
        missing_pages = prefill.missing_pages(state, sequence, rank)
        chosen: list[Sequence] = []
        for victim in [victim for victim in victims if state.table.rank_of(victim.slot) == rank][:_MOST_A_PLAN]:
            chosen.append(victim)
            slot = victim.slot
            missing_pages -= int(state.table.num_owned[slot]) + prefill.reserved_pages(state, slot, page_size)
            if missing_pages <= 0:
                break
        if not chosen or missing_pages > 0:
            return False
        for victim in chosen:
            victim.num_preempted += 1
            self._counters.num_preempted += 1
            self._retraction.leave(state, victim)
        prefill.begin_plan(state)
        state.is_decode_set_unsent |= state.decode_set.update()
        return True

    def _victims(self, state: EpochState, sequence: Sequence) -> list[Sequence]:
        """Running requests that may give way to this one, the first to go first."""
        table = state.table
        slots = np.flatnonzero((table.live > 0) & (table.priority < sequence.submission.priority))
        order = np.lexsort((-table.arrival[slots], table.priority[slots]))
        running = (table.sequences[slot] for slot in slots[order].tolist())
        victims = [r for r in running if r is not None and r.num_preempted < self._max_times]
        if self._across_tenants:
            return victims
        return [victim for victim in victims if sub_queue_key(victim) == sub_queue_key(sequence)]
