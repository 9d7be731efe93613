"""Barrier ops of plans: what this worker takes, and what each does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.slots.slot_table import SlotTable
from radixmesh.daemons.worker.plans.tiers.host_tier import HostTier
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.worker.v1 import worker_pb2

_EXPERT_OPS = ("move_experts", "place_experts")


def offered_ops(runner: ModelRunner) -> tuple[str, ...]:
    """Names of the ops that a worker with this runner commits."""
    return ("flush_cache", *_EXPERT_OPS) if runner.expert_moves is not None else ("flush_cache",)


def flushes(ops: Sequence[worker_pb2.BarrierOp]) -> bool:
    """True if the cache is empty behind them."""
    return any(op.HasField("flush_cache") for op in ops)


def check_barrier_ops(ops: Sequence[worker_pb2.BarrierOp], table: SlotTable, runner: ModelRunner) -> None:
    """Raises UNSUPPORTED, SLOT_CONFLICT for a slot that is held, or INVALID_ARGUMENT."""
    num_about_experts = 0
    for op in ops:
        name = str(op.WhichOneof("op"))
        if name not in offered_ops(runner):
            message = f"the barrier op {name} is not offered by this worker"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": name})
        if name == "flush_cache":
            if table.num_occupied:
                slot = int(np.argmax(table.is_occupied))
                message = f"slot {slot} is held: release every slot in a plan before the one that flushes the cache"
                raise MeshError(ErrorReason.ERROR_REASON_SLOT_CONFLICT, message, {"slot": str(slot)})
            continue
        num_about_experts += 1
        if num_about_experts > 1:
            # Each is checked by what is there before the plan.
            message = "the plan has several ops about experts: send each in a plan of its own"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "header.barrier_ops"})
        assert runner.expert_moves is not None
        runner.expert_moves.check(op)


def commit(
    op: worker_pb2.BarrierOp, runner: ModelRunner, records: PageRecordTable, host: HostTier | None = None
) -> None:
    """Does what the check has let pass, once all earlier steps have completed. Raises CollectiveAborted."""
    if op.HasField("flush_cache"):
        records.flush()
        if host is not None:
            host.flush()
        runner.clear()
        return
    assert runner.expert_moves is not None
    runner.expert_moves.apply(op)
