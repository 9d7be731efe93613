"""Emptying the prefix cache of scheduler and workers: a barrier op of a plan, once nothing runs."""

from __future__ import annotations

from radixmesh.daemons.runtime.step import StepPlan
from radixmesh.daemons.scheduler.epoch_state import EpochState
from radixmesh.worker.v1 import worker_pb2


class FlushWish:
    """Wished for, planned, done. While it is wanted nothing is admitted; the end of an epoch starts it over."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.num_done = 0
        self.flushed_pages = 0
        """Pages that the last flush freed."""
        self._step_id = 0

    def wish(self) -> None:
        self.is_wanted = True

    def cancel(self) -> None:
        """Nobody waits for it any more; one that was sent takes place all the same."""
        self.is_wanted = False

    def may_run(self, state: EpochState) -> bool:
        """Whether no slot is held, at the worker neither (a barrier op comes before its plan's releases), and no plan
        is in flight."""
        return not (state.table.num_running or state.retracting or state.in_flight or state.releases)

    def make_plan(self, state: EpochState) -> StepPlan:
        """The plan that flushes. The scheduler's side is empty from now on."""
        state.decode_set.update()
        state.is_decode_set_unsent = False
        self.is_wanted = False
        self._step_id = state.next_step_id
        self.flushed_pages = state.pages.flush()
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

    def interrupted(self) -> None:
        """The epoch ended."""
        if self._step_id:
            self._step_id = 0
            self.is_wanted = True
