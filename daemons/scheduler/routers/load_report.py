"""Load and state of the scheduler as messages."""

from __future__ import annotations

from collections.abc import Iterator

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.kv_share import pack_shares
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.scheduler.config import Role
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop
from radixmesh.scheduler.v1 import scheduler_pb2

ROLES = {
    Role.BOTH: scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED,
    Role.PREFILL: scheduler_pb2.SCHEDULER_ROLE_PREFILL,
    Role.DECODE: scheduler_pb2.SCHEDULER_ROLE_DECODE,
}


def load_of(loop: SchedulerLoop, submit_sequence: int = 0) -> scheduler_pb2.Load:
    """The load at this moment; the sequence is of the router that it goes to."""
    planner = loop.planner
    load = scheduler_pb2.Load(
        submit_sequence=submit_sequence,
        num_running=planner.num_running,
        num_waiting=planner.num_waiting,
        waiting_tokens=planner.waiting_tokens,
        hit_rate=planner.counters.hit_rate,
        group=int(loop.group_state),  # type: ignore[arg-type]
        is_draining=loop.is_draining,
        is_leaving=loop.is_leaving,
        epoch=loop.epoch,
        role=ROLES[loop.role],
        num_slots=planner.group.num_slots * planner.group.dp_size if planner.group is not None else 0,
        token_us=planner.token_time.us,
    )
    if planner.state is not None:
        state = planner.state
        counts = state.page_counts()
        load.total_pages, load.free_pages = state.num_pages, counts[PageState.FREE]
        load.cached_pages = counts[PageState.CACHED]
        if state.hosts:
            load.host_load_cost = planner.loads.cost
        if state.stored:
            load.store_load_cost = planner.fetches.store_cost(planner.loads.cost)
        if len(state.ranks) > 1:
            load.ranks.extend(_rank_loads(state))
    return load


def _rank_loads(state: EpochState) -> Iterator[scheduler_pb2.RankLoad]:
    for rank, pages in enumerate(state.ranks):
        yield scheduler_pb2.RankLoad(
            dp_rank=rank,
            num_running=state.table.running_on(rank),
            free_pages=pages.pool.num_free,
            cached_pages=pages.pool.num_cached,
        )


def hello_of(loop: SchedulerLoop, instance_id: str) -> scheduler_pb2.SchedulerHello:
    """The hello of the scheduler: it serves the model of its group."""
    identity = loop.group.identity
    model = common_pb2.ModelIdentity()
    model.CopyFrom(identity)
    group = loop.planner.group
    return scheduler_pb2.SchedulerHello(
        hello=make_hello(daemon="scheduler", instance_id=instance_id, model=model),
        page_size=group.page_size if group is not None else 0,
        num_pages=group.num_pages if group is not None else 0,
        role=ROLES[loop.role],
        kv_heads=pack_shares(group.kv_shares) if group is not None else b"",
        takes_kv_targets=True,
    )


def state_of(loop: SchedulerLoop, instance_id: str) -> scheduler_pb2.GetStateResponse:
    """The scheduler at this moment."""
    planner, counters = loop.planner, loop.planner.counters
    response = scheduler_pb2.GetStateResponse(
        hello=hello_of(loop, instance_id),
        load=load_of(loop),
        num_steps=counters.num_steps,
        num_page_violations=counters.num_page_violations,
        num_retractions=counters.num_retracted,
        prefilled_tokens=counters.prefilled_tokens,
        prompt_cached_tokens=planner.counters.cached_tokens,
        num_routers=len(loop.streams),
        num_preemptions=counters.num_preempted,
        num_prefix_deduplications=counters.num_prefix_deduplications,
        decode_reserve_tokens=planner.decode_reserve_tokens,
        cache_revision=planner.cache_feed.revision,
        expert_balancedness=counters.expert_load.balancedness,
        num_expert_placements=planner.experts.num_placed,
        num_kv_arrived=planner.arrivals.num_arrived,
        num_kv_failed=planner.arrivals.num_failed,
        num_kv_handed_over=planner.handovers.num_started,
        num_kv_arriving=len(planner.arrivals),
    )
    if planner.state is not None:
        counts = planner.state.page_counts()
        response.depth = loop.sender.lookahead.depth_for(planner.estimate.expect_us(max(1, planner.num_running)))
        response.owned_pages, response.leased_pages = counts[PageState.OWNED], counts[PageState.LEASED]
        response.adopted_tokens = planner.state.num_adopted_tokens
        response.evicted_pages = planner.state.num_evicted
        response.quarantined_pages = counts[PageState.QUARANTINED]
    return response
