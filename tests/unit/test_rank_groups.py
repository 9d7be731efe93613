"""The parts of a group's stream: results compared, snapshots intersected, broadcasts completed, holders judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.planner_world import World

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints, pack_ints
from radixmesh.daemons.runtime.cache_namespace import cache_name, split_cache_name
from radixmesh.daemons.runtime.common_settings import PredecessorEnd
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import NoToken, PageRecords, SlotError, StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.group.broadcast import missing_plans
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group.rank_hellos import group_of, is_held
from radixmesh.daemons.scheduler.group.rank_results import merged
from radixmesh.daemons.scheduler.group.rank_snapshots import common_snapshot
from radixmesh.daemons.scheduler.group.shared_experts import latest_placement
from radixmesh.daemons.worker.ranks.build import build_of_worker
from radixmesh.worker.v1 import worker_pb2

ERROR = MeshError(common_pb2.ERROR_REASON_INTERNAL, "the adapter of this slot is broken")


def result(counts: list[int], ids: list[int], **fields: object) -> StepResult:
    return StepResult(epoch=1, step_id=4, counts=as_ints(counts), ids=as_ints(ids), **fields)  # type: ignore[arg-type]


def test_equal_results_are_one() -> None:
    results = [result([1, 0, 2], [7, 8, 9], device_end_ns=rank) for rank in range(4)]
    assert merged(results) is results[0] and merged(results[:1]) is results[0]


@pytest.mark.parametrize(
    "other", [result([1, 0, 2], [7, 8, 1]), result([0, 1, 2], [7, 8, 9]), result([1, 0], [7]), result([], [])]
)
def test_ranks_that_differ_have_diverged(other: StepResult) -> None:
    ours = result([1, 0, 2], [7, 8, 9])
    for results in ([ours, ours, other], [other, ours]):
        with pytest.raises(MeshError) as caught:
            merged(results)
        assert caught.value.reason_name == "RANKS_DIVERGED"


def test_results_of_two_steps_break_the_protocol() -> None:
    late = StepResult(epoch=1, step_id=3, counts=as_ints([1]), ids=as_ints([7]))
    with pytest.raises(MeshError) as caught:
        merged([result([1], [7]), late])
    assert caught.value.reason_name == "PROTOCOL_VIOLATION"


def test_a_row_that_fails_on_one_rank_is_left_out_and_its_error_is_told_once() -> None:
    error = SlotError(slot=3, generation=2, error=ERROR)
    reasons = as_ints([NoToken.HAS_TOKENS, NoToken.SLOT_ERROR, NoToken.HAS_TOKENS])
    failed = result([1, 0, 2], [7, 8, 9], no_token_reasons=reasons, slot_errors=(error,))
    for results in ([result([1, 1, 2], [7, 55, 8, 9]), failed], [failed, result([1, 1, 2], [7, 55, 8, 9]), failed]):
        one = merged(results)
        assert (one.counts.tolist(), one.ids.tolist()) == ([1, 0, 2], [7, 8, 9])
        assert one.no_token_reasons.tolist() == [0, NoToken.SLOT_ERROR, 0] and one.slot_errors == (error,)
    with pytest.raises(MeshError):
        merged([result([1, 1, 2], [6, 55, 8, 9]), failed])


def snapshot(ids: list[list[int]], generations: list[int], names: tuple[str, ...] = ("",), **fields: object):
    num = len(ids)
    records = PageRecords(
        first_page=0,
        generations=as_ints(generations),
        filled=as_ints([len(page) for page in ids]),
        previous_pages=np.full(num, -1, np.int32),
        previous_generations=np.zeros(num, np.int32),
        namespace_indexes=as_ints([len(names) - 1] * num),
        weights_versions=np.ones(num, np.int32),
        ids=as_ints([token for page in ids for token in page]),
    )
    return CacheSnapshot(records=records, names=names, **fields)  # type: ignore[arg-type]


def test_kv_counts_where_every_rank_has_it() -> None:
    ours = snapshot([[1, 2], [3], [4, 5], [6, 7]], [1, 1, 2, 3], ("", "salt"), pinned_pages=(1,))
    theirs = snapshot([[1, 2], [3, 9], [4, 8]], [1, 1, 2], ("other", "", "salt"), pinned_pages=(2, 3))
    both = common_snapshot([ours, theirs], 3)
    assert both.records.filled.tolist() == [2, 0, 0] and both.records.ids.tolist() == [1, 2]
    assert both.pinned_pages == (1, 2) and both.names == ("", "salt")
    # Another data-parallel rank has fewer pages.
    alone = common_snapshot([ours], 2)
    assert alone.records.generations.tolist() == [1, 1] and alone.records.filled.tolist() == [2, 1]
    assert alone.records.ids.tolist() == [1, 2, 3] and alone.pinned_pages == (1,)
    other_name = snapshot([[1, 2]], [1], ("", "pepper"))
    assert common_snapshot([ours, other_name], 1).records.filled.tolist() == [0]
    with pytest.raises(MeshError) as caught:
        common_snapshot([ours, snapshot([[1, 2]], [7])], 1)
    assert caught.value.reason_name == "RANKS_DIVERGED"


def hello(received: int, kept: range = range(0), epoch: int = 5, **fields: object) -> worker_pb2.WorkerHello:
    plans = [encode_plan(StepPlan(epoch=epoch, step_id=step)) for step in kept]
    return worker_pb2.WorkerHello(
        highest_epoch=epoch,
        last_received_step=received,
        retained_plans=plans,
        **fields,  # type: ignore[arg-type]
    )


def test_what_some_ranks_lack_comes_from_those_that_kept_it() -> None:
    plans = [encode_plan(StepPlan(epoch=5, step_id=step)) for step in range(10)]
    missing = missing_plans([hello(9, range(7, 10)), hello(6), hello(8, range(6, 9))])
    assert missing == ([[], plans[7:10], plans[9:10]], True)
    lost = missing_plans([hello(9, range(8, 10)), hello(6), hello(9)])
    assert lost == ([[], [], []], False), "step 7 is nowhere: nothing after it may run"
    assert missing_plans([hello(9, range(9, 10)), hello(0, epoch=0)]) == ([[], []], False), "one was restarted"
    assert missing_plans([hello(0), hello(3, epoch=4)]) == ([[], []], True), "no plan of epoch 5 was sent"
    assert missing_plans([hello(9, range(9, 10))]) == ([[]], True)
    with pytest.raises(MeshError):
        missing_plans([hello(2), worker_pb2.WorkerHello(highest_epoch=5, retained_plans=[b"\xff\xff"])])


def test_a_holder_lives_unless_a_rank_of_its_epoch_finds_it_gone() -> None:
    alive = {"holder_instance_id": "a", "is_holder_connected": True}
    silent = {**alive, "holder_silent_ms": 6_000}
    gone = {"holder_instance_id": "a"}
    assert is_held([hello(1, **alive), hello(1, **alive)], "b")
    assert not is_held([hello(1, **alive), hello(1, **alive)], "a"), "it is us"
    assert not is_held([hello(2, **alive), hello(1, **silent)], "b"), "rank 0 only waits for rank 1"
    assert not is_held([hello(2, **alive), hello(1, **gone)], "b")
    assert is_held([hello(0, epoch=6, **alive), hello(1, **gone)], "b"), "it fences the ranks one after the other"
    assert not is_held([hello(0, epoch=0)], "b")


def ready(rank: int, size: int = 2, **fields: object) -> worker_pb2.WorkerHello:
    capabilities = worker_pb2.Capabilities(
        state=worker_pb2.WORKER_STATE_READY,
        page_size=1,
        num_pages=100 - rank,
        num_slots=8 + rank,
        max_tokens_per_step=64,
        max_plans_in_flight=4,
        rank=rank,
        world_size=size,
        layout=RankLayout(tp_size=size, tp_rank=rank).to_proto(),
        **fields,  # type: ignore[arg-type]
    )
    identity = common_pb2.ModelIdentity(name="m", vocab_size=50, max_total_len=64)
    return worker_pb2.WorkerHello(
        hello=common_pb2.Hello(instance_id=f"w{rank}", model=identity), capabilities=capabilities
    )


def test_a_group_has_the_least_of_its_ranks() -> None:
    group = group_of([ready(0, group_generation=3), ready(1, group_generation=3)])
    assert (group.num_pages, group.num_slots, group.group_generation) == (99, 8, 3)
    assert group_of([ready(0, group_generation=3), ready(1)]).group_generation == 0
    assert group_of([ready(0, size=1)]).num_pages == 100


def test_workers_that_are_no_group_are_told_apart() -> None:
    other_model = ready(1)
    ours = ready(0)
    ours.hello.model.model_fingerprint, other_model.hello.model.model_fingerprint = "a", "b"
    loading, counting = ready(1), ready(1, group_generation=2**64 - 1)
    loading.capabilities.state = worker_pb2.WORKER_STATE_LOADING
    for hellos, reason in (
        ([ready(1), ready(0)], "INVALID_ARGUMENT"),
        ([ready(0)], "INVALID_ARGUMENT"),
        ([ready(0, size=1), ready(0, size=1)], "INVALID_ARGUMENT"),
        ([ours, other_model], "MODEL_MISMATCH"),
        ([ready(0), loading], "NOT_SERVING"),
        ([ready(0), counting], "INVALID_ARGUMENT"),
        # They would meet in collectives of other shapes.
        ([ready(0, backend="cpu"), ready(1, backend="cuda")], "INVALID_ARGUMENT"),
    ):
        with pytest.raises(MeshError) as caught:
            group_of(hellos)
        assert caught.value.reason_name == reason


def test_ranks_of_different_builds_are_no_group() -> None:
    """Whatever they share: experts alone, with a batch on each rank, meet in no collective that would tell."""

    def of(rank: int, build: str, contracts: tuple[int, int] = (1, 3)) -> worker_pb2.WorkerHello:
        said = ready(rank)
        layout = RankLayout(dp_size=2, dp_rank=rank, ep_size=2, ep_rank=rank)
        said.capabilities.layout.CopyFrom(layout.to_proto())
        said.hello.build = build
        said.hello.min_contract_version, said.hello.max_contract_version = contracts
        return said

    assert group_of([of(0, "1+a"), of(1, "1+a")]).ep_size == 2
    assert group_of([of(0, "1+a"), of(1, "")]).ep_size == 2, "an older worker does not say"
    for other in (of(1, "1+b"), of(1, "1+a", (1, 4)), of(1, "1+a", (2, 3))):
        with pytest.raises(MeshError, match="start one release") as caught:
            group_of([of(0, "1+a"), other])
        assert caught.value.reason_name == "VERSION_MISMATCH"
    assert build_of_worker() == build_of_worker() and len(build_of_worker()) < 100


def shared_experts(rank: int, num: int = 4, version: int = 0, **fields: object) -> worker_pb2.WorkerHello:
    """Of 2 ranks with 2 layers of `num` experts on 6 slots."""
    said = ready(rank)
    said.capabilities.layout.CopyFrom(RankLayout(dp_size=2, dp_rank=rank, ep_size=2, ep_rank=rank).to_proto())
    experts = [*range(num), *[-1] * (6 - num)] * 2
    sizes: dict[str, object] = {"num_layers": 2, "num_experts": num, "places_per_rank": 3, "expert_bytes": 10}
    said.capabilities.experts.CopyFrom(
        worker_pb2.SharedExperts(
            placement=worker_pb2.ExpertPlacement(version=version, experts=pack_ints(experts)),
            **{**sizes, **fields},  # type: ignore[arg-type]
        )
    )
    return said


def test_the_latest_placement_of_experts_is_that_of_the_group() -> None:
    latest = shared_experts(1, version=7)
    latest.capabilities.experts.placement.experts = pack_ints([0, 1, 2, 3, 3, 3] * 2)
    group = group_of([shared_experts(0), latest])
    assert group.experts is not None and group.experts.version == 7
    assert group.experts.experts_LS.tolist() == [[0, 1, 2, 3, 3, 3]] * 2
    assert latest_placement([shared_experts(0), latest]) == latest.capabilities.experts.placement
    assert latest_placement([shared_experts(0), shared_experts(1)]) is None
    old = shared_experts(1)
    old.capabilities.ClearField("experts")
    assert group_of([shared_experts(0), old]).experts is None


@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts": 5},
        {"num_experts": 7},
        {"num_experts": 0},
        {"num_layers": 3},
        {"num_layers": 1 << 31},
        {"places_per_rank": 1 << 31},
        {"expert_bytes": 0},
        {"version": 1 << 63},
    ],
)
def test_a_placement_that_cannot_be_is_refused_before_memory_is_taken_for_it(fields: dict[str, object]) -> None:
    with pytest.raises(MeshError) as caught:
        group_of([shared_experts(0, **fields), shared_experts(1, **fields)])  # type: ignore[arg-type]
    assert caught.value.reason_name == "INVALID_ARGUMENT"
    if "version" not in fields:
        with pytest.raises(MeshError, match="different slots"):
            group_of([shared_experts(0, **fields), shared_experts(1)])  # type: ignore[arg-type]


def test_data_parallel_ranks_have_slots_and_pages_each() -> None:
    hellos = [ready(0), ready(1)]
    for dp_rank, each in enumerate(hellos):
        each.capabilities.layout.CopyFrom(RankLayout(dp_size=2, dp_rank=dp_rank).to_proto())
    group = group_of(hellos)
    assert (group.dp_size, group.num_pages, group.num_slots) == (2, 99, 8)


def test_any_rank_that_was_killed_from_outside_explains_the_loss() -> None:
    def group(*ranks: tuple[str, PredecessorEnd]) -> GroupInfo:
        info = group_of([ready(0, size=1)])
        return replace(info, instance_id=ranks[0][0], predecessor_end=ranks[0][1], other_ranks=ranks[1:])

    outside, itself = PredecessorEnd.FROM_OUTSIDE, PredecessorEnd.BY_ITSELF
    before = group(("a", outside), ("b", itself))
    assert group(("a", outside), ("c", outside)).lost_from_outside(before)
    assert not group(("a", outside), ("c", itself)).lost_from_outside(before), "a was not restarted"
    assert not before.lost_from_outside(before)


def test_a_slot_error_ends_one_request_and_no_epoch() -> None:
    world = World(eos_rate=0.0)
    records = [world.submit([2, 3, 4 + i], stop=Stop(max_tokens=20)) for i in range(3)]
    world.plan()
    world.execute()
    first = world.results[0]
    (admit, *_) = world.planner.state.in_flight.oldest.plan.admits
    world.results[0] = replace(
        first, slot_errors=(SlotError(slot=admit.slot, generation=admit.generation, error=ERROR),)
    )
    world.run()
    failed = [record for record in records if record.finished.reason is FinishReason.ERROR]
    assert len(failed) == 1 and failed[0].finished.error.reason == ERROR.reason
    assert all(len(record.tokens) == 20 for record in records if record is not failed[0])
    assert world.epoch == 1


@pytest.mark.parametrize(("adapter", "salt"), [("", ""), ("a", ""), ("", "s"), ("a:1", "2:b"), ("", "9:x"), ("ä", "ö")])
def test_a_namespace_is_told_apart_again(adapter: str, salt: str) -> None:
    assert split_cache_name(cache_name(adapter, salt)) == (adapter, salt)


def test_a_worker_at_the_wrong_position_is_told_its_flags() -> None:
    other_experts = [ready(0), ready(1)]
    for dp_rank, each in enumerate(other_experts):
        layout = RankLayout.of_rank(dp_rank, tp_size=1, dp_size=2, ep_size=2 - dp_rank)
        each.capabilities.layout.CopyFrom(layout.to_proto())
    for hellos, told in (
        ([ready(1), ready(0)], "worker 0 of --workers was started with --tp-size 2 --tp-rank 1: .*start it with"),
        ([ready(0)], "2 ranks .* and --workers names 1: name all workers"),
        ([ready(0), ready(0, size=1)], "worker 1 .* no rank flags: .* start it with --tp-size 2 --tp-rank 1"),
        (other_experts, "worker 1 .* --dp-size 2 --dp-rank 1: .* start it with .* --ep-size 2 --ep-rank 1"),
    ):
        with pytest.raises(MeshError, match=told):
            group_of(hellos)
