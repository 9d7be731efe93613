"""Emptying the prefix cache of scheduler and workers: a barrier op of a plan, once nothing runs."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.worker.v1 import worker_pb2

# Each waits in a call of its own.
_MAX_WISHES = 64


class FlushWish:
    """One caller's wish for an empty cache: wanted, planned, done.

    A flush that was planned before the wish does not fulfil it: what ran between the two may be cached again.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.flushed_pages = 0
        """Pages that the flush freed, once it is done."""


class CacheFlush:
    """The wishes of all who wait. While one is wanted nothing is admitted; the end of an epoch starts it over."""

    def __init__(self) -> None:
        self.num_done = 0
        """Flushes that took place."""
        self._wanted: set[FlushWish] = set()
        self.planned: set[FlushWish] = set()
        self._flushed_pages = 0
        self._step_id = 0

    @property
    def is_wanted(self) -> bool:
        return bool(self._wanted)

    def wish(self) -> FlushWish:
        """A new wish, which holds up admission until it is planned or withdrawn. Raises OVERLOADED at 64 of them."""
        if len(self._wanted) + len(self.planned) >= _MAX_WISHES:
            message = f"{_MAX_WISHES} callers wait for a flush of the cache: retry when those are done"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000"})
        wish = FlushWish()
        self._wanted.add(wish)
        return wish

    def withdraw(self, wish: FlushWish) -> None:
        """Its caller waits no more, done or not. The others' wishes stay; a flush that was sent takes place."""
        self._wanted.discard(wish)
        self.planned.discard(wish)

    def may_run(self, state: EpochState) -> bool:
        """True if no plan is in flight and no slot is held, nor by the worker: a barrier op runs before releases."""
        return not (state.table.num_running or state.retracting or state.in_flight or state.releases)

    def make_plan(self, state: EpochState) -> StepPlan:
        """The plan that flushes. The scheduler's side is empty from now on."""
        state.decode_set.update()
        state.is_decode_set_unsent = False
        self.planned |= self._wanted
        self._wanted.clear()
        self._step_id = state.next_step_id
        self._flushed_pages = sum(pages.flush() for pages in state.ranks)
        return StepPlan(
            epoch=state.epoch,
            step_id=state.next_step_id,
            group_generation=state.group.group_generation,
            barrier_ops=(worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache()),),
            decode_set=state.decode_set.slots,
            has_forward=False,
        )

    def processed(self, step_id: int) -> None:
        """A result came."""
        if self._step_id and step_id >= self._step_id:
            self._step_id = 0
            self.num_done += 1
            for wish in self.planned:
                wish.is_done, wish.flushed_pages = True, self._flushed_pages
            self.planned.clear()

    def interrupted(self) -> None:
        """The epoch ended: those who still wait for a flush that was sent wish again."""
        self._step_id = 0
        self._wanted |= self.planned
        self.planned.clear()
