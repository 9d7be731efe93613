"""Messages in which a worker describes itself before it is claimed: its hello, position in a group, model's sizes."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.steps.step_codec import TASK_TO_PROTO
from radixmesh.daemons.worker.plans.barrier_ops import offered_ops
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.retained_plans import RetainedPlans
from radixmesh.daemons.worker.ranks.group_member import GroupMember
from radixmesh.daemons.worker.stream.epochs import EpochLedger
from radixmesh.worker.v1 import worker_pb2

_PREDECESSOR_ENDS = {
    PredecessorEnd.UNKNOWN: worker_pb2.PREDECESSOR_END_UNSPECIFIED,
    PredecessorEnd.BY_ITSELF: worker_pb2.PREDECESSOR_END_BY_ITSELF,
    PredecessorEnd.FROM_OUTSIDE: worker_pb2.PREDECESSOR_END_FROM_OUTSIDE,
}


def worker_hello(
    hello: common_pb2.Hello,
    ledger: EpochLedger,
    retained: RetainedPlans,
    capabilities: worker_pb2.Capabilities,
    predecessor_end: PredecessorEnd,
) -> worker_pb2.WorkerHello:
    """Hello that a scheduler reads before it claims."""
    return worker_pb2.WorkerHello(
        hello=hello,
        highest_epoch=ledger.highest_epoch,
        holder_instance_id=ledger.holder_instance_id,
        is_holder_connected=ledger.is_holder_connected,
        # With unfinished plans it is the holder who waits for us, however long a step takes.
        holder_silent_ms=0 if retained.has_unfinished else ledger.holder_silent_ms,
        last_received_step=ledger.last_received_step,
        last_completed_step=ledger.last_completed_step,
        retained_plans=retained.encoded(),
        capabilities=capabilities,
        predecessor_end=_PREDECESSOR_ENDS[predecessor_end],
    )


def claimed(epoch: int, executor: StepExecutor | None) -> worker_pb2.Claimed:
    """The answer to a claim that won, once no step runs any more."""
    moves = executor.runner.expert_moves if executor is not None else None
    return worker_pb2.Claimed(epoch=epoch, experts=moves.to_proto() if moves is not None else None)


def add_layout(capabilities: worker_pb2.Capabilities, member: GroupMember) -> None:
    """Rank, layout and rendezvous of the group that this worker belongs to."""
    capabilities.rank = member.layout.rank
    capabilities.world_size = member.layout.world_size
    capabilities.layout.CopyFrom(member.layout.to_proto())
    capabilities.rendezvous = member.rendezvous


def add_model(capabilities: worker_pb2.Capabilities, executor: StepExecutor, weights_digest: str) -> None:
    """Sizes of a loaded worker, the form of its KV, and the tasks that it takes."""
    limits, runner = executor.limits, executor.runner
    capabilities.page_size = limits.page_size
    capabilities.num_pages = limits.num_pages
    capabilities.num_slots = limits.num_slots
    if executor.host is not None and executor.host.store is not None:
        capabilities.has_kv_store = True
        capabilities.kv_store_id = executor.host.store.store_id
    capabilities.num_host_pages = 0 if executor.host is None else executor.host.pool.num_pages
    capabilities.max_tokens_per_step = limits.max_tokens_per_step
    capabilities.max_tokens_per_row = limits.max_tokens_per_row
    capabilities.is_deterministic = runner.is_deterministic
    capabilities.weights_version = executor.weights_version
    capabilities.weights_digest = weights_digest
    capabilities.kv_dtype = runner.kv_dtype
    capabilities.kv_layout = runner.kv_layout
    capabilities.tasks.extend(TASK_TO_PROTO[task] for task in sorted(limits.tasks))
    capabilities.barrier_ops.extend(offered_ops(runner))
    if (moves := runner.expert_moves) is not None:
        capabilities.experts.CopyFrom(
            worker_pb2.SharedExperts(
                num_layers=moves.num_layers,
                num_experts=moves.num_experts,
                places_per_rank=moves.per_rank,
                expert_bytes=moves.expert_bytes,
                placement=moves.to_proto(),
            )
        )
