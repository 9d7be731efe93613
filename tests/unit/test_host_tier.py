"""Saves and loads of KV pages: order and refusals of workers, copies on CPUs, the use that schedulers make of it."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.lagging import LaggingRunner
from support.planner_world import EOS_ID, VOCAB_SIZE, World, new_executor
from support.plans import Steps, admit, chunk, fingerprint, grant, simulated_executor

from radixmesh.daemons.runtime.arrays import as_ints, pack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.steps.sections import sections_of
from radixmesh.daemons.runtime.steps.step import PageCopy, PageMove, Release, StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import plan_from_proto, plan_to_proto
from radixmesh.daemons.scheduler.cache.feed import Inserted
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.watch import snapshot_messages
from radixmesh.daemons.scheduler.group.rank_results import CommonLoads
from radixmesh.daemons.scheduler.tiers.host_cache import HostCache, TierSettings, WritePolicy
from radixmesh.daemons.scheduler.tiers.kv_loads import LoadTurn
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.host_memory.host_pool import ArrayHostPool
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.kv_transfer.staging import RegionKey
from radixmesh.daemons.worker.kv_transfer.transfer_service import GrpcTransport
from radixmesh.daemons.worker.kv_transfer.transfers import KvTransfers
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.plans.tiers.host_tier import HostTier
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.daemons.worker.step_handle import DONE
from radixmesh.worker.v1 import worker_pb2

PROMPT = list(range(10, 22))


def move(device, host, previous=-1, op_id=0):
    return PageMove(device_pages=as_ints(device), host_pages=as_ints(host), previous_page=previous, op_id=op_id)


def saved_world(load_token_us=1000.0):
    """Three full pages (4 tokens each) of a prompt on device pages 0-2 and host pages 5-7; slot 0 is free again."""
    steps = Steps(
        simulated_executor(page_size=4, num_pages=32, num_slots=4, num_host_pages=8, load_token_us=load_token_us)
    )
    steps.run(admits=[admit(0, PROMPT)], grants=[grant(0, [0, 1, 2, 3])], chunks=[chunk(0, 12)])
    steps.run(has_forward=False, saves=[move([0, 1, 2], [5, 6, 7])], releases=[Release(slot=0, generation=1)])
    return steps


def test_a_save_reads_before_its_pages_are_granted_anew():
    steps = saved_world()
    # The pages are computed over in the plan behind the save, and what was saved comes back elsewhere.
    steps.run(admits=[admit(1, [50] * 12)], grants=[grant(1, [0, 1, 2, 3])], chunks=[chunk(1, 12)])
    result = steps.run(has_forward=False, loads=[move([20, 21, 22], [5, 6, 7], op_id=1)])
    assert result.loaded_ops == (1,)
    parts = {"cached_len": 12, "cached_pages": [20, 21, 22], "cached_page_generations": [1, 1, 1]}
    got = steps.run(
        admits=[admit(2, [*PROMPT, 40], **parts)], grants=[grant(2, [23])], chunks=[chunk(2, 1)], decodes=[]
    )
    assert got.ids.tolist() == simulated_continuation([*PROMPT, 40], 1, alphabet=steps.executor.runner.alphabet)


async def test_a_save_reads_before_a_transfer_writes_to_its_pages():
    steps = saved_world()
    executor, ids = steps.executor, as_ints([50] * 12)

    async def run(job):
        return job()

    transfers = KvTransfers(
        "w", staging_bytes=1 << 20, transport=GrpcTransport(), run=run, check_holder=lambda *of: None,
        received_step=lambda: 0,
    )  # fmt: skip
    transfers.attach(executor, "weights")
    prepared = transfers.prepare(
        worker_pb2.PrepareTransferRequest(transfer_id="t", num_tokens=12, lease_ms=60_000, kv=transfers.format)
    )
    saved = executor.runner.read_kv(np.arange(12, dtype=np.int32))
    region, sent = transfers.open(prepared, "writer"), saved + np.uint8(1)
    key = RegionKey(transfer_id="t", incarnation=prepared.incarnation, instance_id="w", epoch=0)
    transfers.receiver.write(region, "writer", 0, key.stamp() + sent.tobytes() + key.stamp())
    transfers.receiver.last_word(region, "writer", is_done=True)
    request = worker_pb2.CommitTransferRequest(
        transfer_id="t", pages=pack_ints([0, 1, 2]), generations=pack_ints([2, 2, 2]), previous_page=-1,
        ids=pack_ints(ids),
    )  # fmt: skip
    assert (await transfers.commit(request)).state == worker_pb2.TRANSFER_STATE_VALIDATED
    transfers.close()
    steps.run(has_forward=False, loads=[move([20, 21, 22], [5, 6, 7], op_id=1)])
    assert executor.runner.read_kv(np.arange(80, 92, dtype=np.int32)).tolist() == saved.tolist()
    assert executor.runner.read_kv(np.arange(12, dtype=np.int32)).tolist() == sent.tolist()


def test_a_load_is_told_once_and_only_when_it_has_completed():
    steps = saved_world(load_token_us=1000.0)  # 12 ms, four steps of 2 ms and more.
    steps.run(loads=[move([20, 21, 22], [5, 6, 7], op_id=3)], has_forward=True, decodes=[], admits=[admit(1, [50] * 9)],
              grants=[grant(1, [8, 9, 10, 11])], chunks=[chunk(1, 3)])  # fmt: skip
    cached = {"cached_len": 4, "cached_pages": [20], "cached_page_generations": [1]}
    early = steps.plan(admits=[admit(2, [*PROMPT[:4], 40], **cached)], grants=[grant(2, [24])], chunks=[chunk(2, 1)])
    with pytest.raises(MeshError) as caught:
        steps.executor.run(early)
    assert caught.value.reason_name == "PAGE_CONFLICT" and "holds 0 tokens" in str(caught.value)
    told = [list(steps.run(chunks=[chunk(1, 1)]).loaded_ops) for _ in range(5)]
    told.append(list(steps.run(has_forward=False).loaded_ops))
    assert [3] in told and told.count([3]) == 1 and told[0] == [] and told[-1] == []


def test_an_answer_without_a_forward_waits_for_loads_before_it():
    steps = saved_world(load_token_us=1e6)
    first = steps.run(has_forward=True, decodes=[], loads=[move([20], [5], op_id=1)], admits=[admit(1, [50] * 9)],
                      grants=[grant(1, [8, 9, 10])], chunks=[chunk(1, 1)])  # fmt: skip
    assert not len(first.loaded_ops)
    before = steps.executor.runner.now_ns()
    assert steps.run(has_forward=False).loaded_ops == (1,)
    assert steps.executor.runner.now_ns() - before > 3_000_000_000


def test_an_answer_without_a_forward_waits_for_the_first_load_alone():
    steps = saved_world(load_token_us=1e6)
    before = steps.executor.runner.now_ns()
    first = steps.run(has_forward=False, loads=[move([20], [5], op_id=1), move([21, 22], [6, 7], op_id=2)])
    assert first.loaded_ops == (1,) and steps.executor.runner.now_ns() - before == 4_000_000_000
    assert steps.run(has_forward=False).loaded_ops == (2,)
    assert steps.executor.runner.now_ns() - before == 12_000_000_000


def test_an_answer_that_waits_for_loads_holds_up_no_plan_behind_it():
    steps = saved_world(load_token_us=1e6)
    executor = steps.executor
    waiting = executor.launch(steps.plan(has_forward=False, loads=[move([20, 21, 22], [5, 6, 7], op_id=1)]))
    steps.next_step += 1
    assert not waiting.is_done
    before = executor.runner.now_ns()
    parts = {"admits": [admit(1, [50] * 9)], "grants": [grant(1, [8, 9, 10])], "chunks": [chunk(1, 9)]}
    behind = executor.launch(steps.plan(**parts))
    steps.next_step += 1
    waiting.wait()
    assert waiting.is_done and waiting.result().loaded_ops == ()
    assert behind.result().loaded_ops == () and executor.runner.now_ns() - before < 1_000_000_000
    assert steps.run(has_forward=False).loaded_ops == (1,)


REFUSED = {
    "a save of a page that is not full": ({"saves": (move([3], [0]),)}, "PAGE_CONFLICT"),
    "a save of no page": ({"saves": (move([32], [0]),)}, "PAGE_CONFLICT"),
    "a save to no host page": ({"saves": (move([0], [8]),)}, "PAGE_CONFLICT"),
    "two saves to a host page": ({"saves": (move([0], [1]), move([1], [1]))}, "PAGE_CONFLICT"),
    "a save behind no host page": ({"saves": (move([0], [0], previous=8),)}, "PAGE_CONFLICT"),
    "a save of two namespaces": ({"saves": (move([0, 12], [0, 1]),)}, "PAGE_CONFLICT"),
    "a load of an empty host page": ({"loads": (move([20], [0], op_id=1),)}, "PAGE_CONFLICT"),
    "a load of no host page": ({"loads": (move([20], [8], op_id=1),)}, "PAGE_CONFLICT"),
    "a load to no page": ({"loads": (move([32], [5], op_id=1),)}, "PAGE_CONFLICT"),
    "a load behind no page": ({"loads": (move([20], [5], previous=32, op_id=1),)}, "PAGE_CONFLICT"),
    "two loads to a page": ({"loads": (move([20], [5], op_id=1), move([20], [6], op_id=2))}, "PAGE_CONFLICT"),
    "a load to a page of a slot": ({"loads": (move([12], [5], op_id=1),)}, "PAGE_CONFLICT"),
    "a load to a granted page": ({"loads": (move([20], [5], op_id=1),), "grants": (grant(1, [20]),)}, "PAGE_CONFLICT"),
    "op ids that fall": ({"loads": (move([20], [5], op_id=2), move([21], [5], op_id=1))}, "INVALID_ARGUMENT"),
    "a flush beside a save": (
        {
            "barrier_ops": (worker_pb2.BarrierOp(flush_cache=worker_pb2.FlushCache()),),
            "saves": (move([0], [0]),),
            "releases": (Release(slot=1, generation=1),),
        },
        "SLOT_CONFLICT",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_move_leaves_no_trace(case):
    parts, reason = REFUSED[case]
    steps = saved_world()
    steps.run(admits=[admit(1, [60] * 5, cache_namespace="salt")], grants=[grant(1, [12, 13])], chunks=[chunk(1, 5)])
    before = fingerprint(steps.executor)
    with pytest.raises(MeshError) as caught:
        steps.executor.run(steps.plan(has_forward=False, **parts))
    assert caught.value.reason_name == reason, caught.value
    assert fingerprint(steps.executor) == before


def test_host_pages_under_a_load_are_not_saved_to_and_its_pages_not_loaded_to():
    steps = saved_world(load_token_us=1e6)
    steps.run(has_forward=True, decodes=[], loads=[move([20], [5], op_id=1)], admits=[admit(1, [50] * 9)],
              grants=[grant(1, [8, 9, 10])], chunks=[chunk(1, 5)])  # fmt: skip
    for parts in ({"saves": [move([8], [5])]}, {"loads": [move([20], [6], op_id=2)]}, {"loads": [move([21], [6])]}):
        with pytest.raises(MeshError):
            steps.executor.run(steps.plan(has_forward=False, **parts))


def test_a_worker_without_a_tier_takes_no_moves():
    steps = Steps(simulated_executor(page_size=4))
    with pytest.raises(MeshError) as caught:
        steps.run(has_forward=False, saves=[move([0], [0])])
    assert caught.value.reason_name == "UNSUPPORTED"


def test_moves_survive_the_wire_and_go_to_their_rank():
    saves = (dataclasses.replace(move([1, 2], [8, 9], previous=7)), move([3], [4]))
    loads = (move([5], [6], previous=2, op_id=9),)
    plan = StepPlan(epoch=1, step_id=2, saves=saves, loads=loads, has_forward=False)
    back = plan_from_proto(plan_to_proto(plan))
    assert repr(back.saves) == repr(saves) and repr(back.loads) == repr(loads)
    of_ranks = dataclasses.replace(plan, saves=tuple(dataclasses.replace(s, rank=i) for i, s in enumerate(saves)))
    first, second, third = sections_of(of_ranks, 3, 4)
    assert repr(first.saves) == repr(saves[:1]) and repr(second.saves) == repr(saves[1:])
    assert len(first.loads) == 1 and not second.loads and third is None
    message = plan_to_proto(plan)
    message.ranks[0].loads.op_ids = b""
    with pytest.raises(MeshError):
        plan_from_proto(message)


def test_a_load_is_complete_when_all_workers_of_a_rank_say_so():
    def result(*ops):
        return StepResult(epoch=1, step_id=1, counts=as_ints([]), ids=as_ints([]), loaded_ops=ops)

    loads, told = CommonLoads(), []
    for both in ([result(1), result()], [result(2), result(1, 2)], [result(), result()]):
        told.append(list(loads.take(both, both[0]).loaded_ops))
    assert told == [[], [1, 2], []]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_pages_come_back_as_they_were(page_size, dtype):
    layout = KvLayout(num_layers=3, planes=(KvPlane(name="k", row_shape=(2, 5)), KvPlane(name="v", row_shape=(7,))))
    pool = KvPool(layout, num_pages=6, page_size=page_size, dtype=dtype, device=torch.device("cpu"))
    for (_, layer), view in pool.token_views.items():
        view.copy_(torch.randn(view.shape) + layer)
    before = {key: view.clone() for key, view in pool.token_views.items()}
    loaded = []
    host = ArrayHostPool(
        4 * 3 * page_size * 17 * dtype.itemsize, pool.page_planes(), lambda pages: loaded.append(pages)
    )
    assert host.num_pages == 4
    host.save(as_ints([1, 4]), as_ints([3, 0]))
    pool.clear()
    host.load(as_ints([0, 3]), as_ints([2, 5])).wait()
    for key, view in pool.token_views.items():
        pages = view.unflatten(0, (-1, page_size))
        old = before[key].unflatten(0, (-1, page_size))
        assert torch.equal(pages[2], old[4]) and torch.equal(pages[5], old[1])
        assert pages[[0, 1, 3, 4]].isnan().all()
    assert loaded[0].tolist() == [2, 5]


def test_flags_that_cannot_be_are_refused():
    for wrong in ({"host_kv_bytes": -1}, {"host_kv_bytes": 1 << 20, "transfer_staging_bytes": 1 << 20}):
        with pytest.raises(ValueError, match="host-kv-bytes"):
            WorkerSettings(backend=Backend.SIMULATED, **wrong)


# The scheduler.


def tier(policy, **more):
    return TierSettings(policy=WritePolicy(policy), **more)


def small_world(policy="write_through", num_host_pages=1024, **more):
    return World(
        num_pages=128, num_slots=4, num_host_pages=num_host_pages, tiers=tier(policy, min_hits=1), eos_rate=0.0, **more
    )


def prompts(num, length=60):
    return [[2 + (7 * i + j * j) % 60 for j in range(length)] for i in range(num)]


def rounds(world, texts, times):
    for _ in range(times):
        records = [world.submit(text) for text in texts]
        world.run(2)
        for record in records:
            assert record.tokens == world.expected(record.submission)
    world.check_clean()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_the_device_evicts_comes_back(policy):
    """Ten prompts of 60 tokens in rounds, device pages for two: from the second round on nothing is computed twice."""
    world = small_world(policy)
    rounds(world, prompts(10), 1)
    before = world.planner.counters.prefilled_tokens
    rounds(world, prompts(10), 3)
    assert world.planner.counters.prefilled_tokens - before == 3 * 10, "the last token of each prompt is computed"
    assert world.planner.loads.num_loads >= 20


def test_pages_of_several_tokens_come_back_too():
    world = World(
        num_pages=32,
        page_size=4,
        num_slots=4,
        num_host_pages=256,
        tiers=tier("write_through", min_hits=1),
        eos_rate=0.0,
    )
    rounds(world, prompts(10), 2)
    before, loads = world.planner.counters.prefilled_tokens, world.planner.loads.num_loads
    rounds(world, prompts(10), 2)
    assert world.planner.counters.prefilled_tokens - before <= 2 * 10 * 4, "the last page of each prompt at most"
    assert world.planner.loads.num_loads - loads >= 10


class _BrokenEvent:
    is_done = True

    def wait(self):
        raise MeshError(ErrorReason.ERROR_REASON_STEP_FAILED, "the copy failed")


def test_a_copy_that_fails_is_told_and_fills_no_record(monkeypatch):
    steps = saved_world()
    tier_of_worker = steps.executor.host
    monkeypatch.setattr(tier_of_worker.pool, "load", lambda *args, **more: _BrokenEvent())
    with pytest.raises(MeshError, match="the copy failed"):
        steps.run(loads=[move([20, 21, 22], [5, 6, 7], op_id=1)], has_forward=True, decodes=[],
                  admits=[admit(1, [50] * 9)], grants=[grant(1, [8, 9, 10])], chunks=[chunk(1, 1)])  # fmt: skip
        steps.run(chunks=[chunk(1, 1)])
    assert not steps.executor.records.filled[[20, 21, 22]].any()


def test_selective_saves_what_was_used_again():
    world = small_world("selective")
    shared = prompts(1, 40)[0]
    for tail in range(3):
        rounds(world, [[*shared, 60, 2 + tail]], 1)
    host = world.planner.state.pages.host
    assert host.counters.saved == 41, "the shared part alone"


def test_a_full_host_forgets_what_was_used_longest_ago():
    world = small_world("write_through", num_host_pages=140)
    rounds(world, prompts(6), 2)
    host = world.planner.state.pages.host
    assert host.counters.evicted and host.pages.num_used <= 140


def test_a_request_that_waits_too_long_computes_instead():
    world = small_world(load_token_us=1e7)
    rounds(world, prompts(6), 1)
    record = world.submit(prompts(6)[0])
    world.plan()
    assert world.planner.loads.num_under_way == 1 and not record.tokens
    world.now += 100.0
    world.run(1)
    assert record.tokens == world.expected(record.submission)
    assert world.planner.loads.num_late == 1
    world.check_clean()


def test_requests_with_one_prefix_share_its_load():
    world = small_world(load_token_us=1000.0)
    rounds(world, prompts(6), 1)
    base = prompts(6)[0]
    before = world.planner.loads.num_loads
    records = [world.submit([*base, 2 + i]) for i in range(3)]
    world.run(1)
    assert all(record.tokens == world.expected(record.submission) for record in records)
    assert world.planner.loads.num_loads == before + 1


def queueing_world():
    """Workers are given two loads at a time. The host alone has the first texts: of 60, 60, 60, 20 and 30 tokens."""
    tiers = tier("write_through", min_hits=1, load_min_tokens=1, load_window_tokens=0)
    world = World(num_pages=420, num_slots=8, num_host_pages=2048, tiers=tiers, eos_rate=0.0, load_token_us=1000.0)
    texts = [text[:length] for text, length in zip(prompts(14), [60, 60, 60, 20, 30] + [60] * 9, strict=True)]
    rounds(world, texts, 1)
    return world, texts


def planned_loads(world):
    """Pages of each load of the next plan."""
    return [len(move.device_pages) for move in world.log[-1].loads] if world.plan() else []


def test_short_loads_go_first_and_long_ones_wait_no_longer_for_that_than_their_length():
    world, texts = queueing_world()
    records = [world.submit(text) for text in texts[:4]]
    assert planned_loads(world) == [19, 59], "the shortest, and one more for the bus"
    loads = world.planner.loads
    assert loads.num_under_way == 4 and world.planner.state.pages.pool.num_loading == 3 * 59 + 19
    world.now += 0.25
    records.append(world.submit(texts[4]))
    sent = []
    while world.planner.num_live:
        sent += planned_loads(world)
        assert world.execute()
        world.process()
    assert sent == [59, 59, 29], "it has come too late to go first"
    for record in records:
        assert record.tokens == world.expected(record.submission)
    ids = [move.op_id for plan in world.log for move in plan.loads]
    assert ids == sorted(set(ids)) and not loads.num_late
    world.run(1)
    world.check_clean()


@pytest.mark.parametrize("is_late", [True, False])
def test_a_queued_load_that_nobody_waits_for_gives_its_pages_back(is_late):
    world, texts = queueing_world()
    records = [world.submit(text) for text in texts[:4]]
    world.plan()
    pool = world.planner.state.pages.pool
    if is_late:
        world.now += 100.0
    else:
        for record in records[1:3]:
            world.planner.abort(record.submission.key.request_id)
    world.plan()
    assert world.planner.loads.num_under_way == 2 and pool.num_loading == 59 + 19
    world.run(1)
    assert world.planner.loads.num_late == (4 if is_late else 0)
    for record in records if is_late else (records[0], records[3]):
        assert record.tokens == world.expected(record.submission)
    world.check_clean()
    rounds(world, texts, 1)


def test_a_new_scheduler_finds_what_the_host_holds():
    world = small_world()
    rounds(world, prompts(8), 1)
    held = world.planner.state.pages.host.pages.num_used
    world.submit(prompts(8)[0])  # A load is under way when the epoch ends.
    world.plan()
    world.begin_epoch()
    host = world.planner.state.pages.host
    assert host.pages.num_used == held and host.cache.num_cached == held
    before = world.planner.counters.prefilled_tokens
    rounds(world, prompts(8), 1)
    assert world.planner.counters.prefilled_tokens - before == 8 + 1


def test_a_new_worker_has_nothing_on_its_host():
    world = small_world()
    rounds(world, prompts(4), 1)
    world.executor = new_executor(world, num_host_pages=1024)
    world.begin_epoch()
    assert world.planner.state.pages.host.pages.num_used == 0
    rounds(world, prompts(4), 2)


def test_a_flush_empties_the_host_too():
    world = small_world()
    rounds(world, prompts(4), 1)
    world.planner.flush.wish()
    world.run(1)
    assert world.planner.state.pages.host.pages.num_used == 0
    assert not world.executor.host.records.filled.any()
    rounds(world, prompts(4), 1)


def test_without_a_tier_plans_carry_no_moves():
    world = World(num_pages=128, num_slots=4)
    rounds(world, prompts(6), 2)
    assert not any(plan.saves or plan.loads for plan in world.log)


def test_a_prefix_is_saved_as_far_as_there_is_room():
    host = HostCache(4, 2, tier("write_through"), "lru")
    names = Namespace("", 1)
    host.keep(names, np.arange(12, dtype=np.int32), np.arange(6, dtype=np.int32))
    assert host.counters.saved == 4 and host.counters.skipped == 2
    host.take_saves()
    held = host.hold(names, np.arange(12, dtype=np.int32))
    host.keep(names, np.arange(50, 54, dtype=np.int32), np.arange(2, dtype=np.int32))
    assert not host.has_saves and host.counters.skipped == 4, "what a load reads is not evicted"
    host.release(held)
    host.keep(names, np.arange(50, 54, dtype=np.int32), np.arange(2, dtype=np.int32))
    assert host.counters.evicted == 2 and host.num_known(names, np.arange(12, dtype=np.int32)) == 2
    assert not host.find_violation()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_the_host_has_an_eviction_of_its_own(policy):
    """Room for four prompts: the first one stays, by its priority, though it was used longest ago."""
    tiers = tier(policy, min_hits=1, eviction="priority")
    world = World(num_pages=128, num_slots=4, num_host_pages=4 * 60, tiers=tiers, eos_rate=0.0)
    first, *others = prompts(9)
    world.submit(first, priority=3)
    world.run()
    rounds(world, others, 1)
    host = world.planner.state.pages.host
    assert host.counters.evicted > 0
    names = Namespace("", 1)
    assert host.num_known(names, as_ints(first)) >= 59 and host.num_known(names, as_ints(others[0])) < 60


def test_the_cost_of_a_load_is_what_was_measured():
    world = small_world(load_token_us=40.0)
    assert world.planner.loads.cost == 0.25, "nothing was measured"
    for _ in range(2):
        for text in prompts(6):
            world.submit(text)
            while world.planner.num_live:
                world.now = world.executor.runner.now_ns() * 1e-9
                world.plan()
                assert world.execute()
                world.process()
    compute_us = world.planner.estimate.expect_us(1024) / 1024
    assert world.planner.loads.num_loads >= 6
    assert world.planner.loads.cost == pytest.approx(40.0 / compute_us, rel=0.3) and compute_us > 40.0


def test_the_time_of_loads_is_counted():
    world = small_world(load_token_us=1000.0)
    rounds(world, prompts(6), 1)
    world.submit(prompts(6)[0])
    world.plan()
    world.now += 0.25
    world.run(1)
    assert world.planner.loads.wait_s == pytest.approx(0.25)
    assert world.planner.loads.num_tokens == 59


def test_one_plan_saves_to_a_host_page_once():
    """Host memory for less than what is saved before the next plan: what is evicted meanwhile is not saved."""
    host = HostCache(4, 2, tier("write_through"), "lru")
    names = Namespace("", 1)
    for start in (0, 10, 20):
        host.keep(names, np.arange(start, start + 6, dtype=np.int32), np.arange(start, start + 3, dtype=np.int32))
    saves = host.take_saves()
    targets = np.concatenate([save.host_pages for save in saves])
    assert len(np.unique(targets)) == len(targets) == host.counters.saved == host.pages.num_used == 4
    assert [save.device_pages.tolist() for save in saves] == [[10], [20, 21, 22]]


async def test_watchers_see_both_tiers():
    """A prefix that the device has evicted is still told, as one of host memory."""
    world = small_world()
    feed = world.planner.cache_feed
    feed.open()
    revision = feed.revision
    rounds(world, prompts(6), 1)
    events = feed.events_after(revision, 1000, 1 << 20)
    assert {event.tier for event in events if isinstance(event, Inserted)} == {0, 1}
    assert {event.rank for event in events if isinstance(event, Inserted)} == {0}
    messages = [message async for message in snapshot_messages(feed.open(), feed.revision, feed.num_ranks)]
    inserts = [insert for message in messages for insert in message.inserts]
    tokens = {tier: sum(len(i.ids) // 4 for i in inserts if i.tier == tier) for tier in (0, 1)}
    state = world.planner.state
    assert tokens == {0: state.pages.pool.num_cached, 1: state.hosts[0].pages.num_used}
    assert len({insert.node for insert in inserts}) == len(inserts)


@pytest.mark.parametrize(("load_min_tokens", "num_loads"), [(59, 1), (60, 0)])
def test_little_is_computed_and_not_waited_for(load_min_tokens, num_loads):
    tiers = tier("write_through", load_min_tokens=load_min_tokens)
    world = World(num_pages=128, num_slots=4, num_host_pages=1024, tiers=tiers, eos_rate=0.0)
    rounds(world, prompts(6), 1)
    rounds(world, prompts(1), 1)
    assert world.planner.loads.num_loads == num_loads


def test_a_parked_request_may_be_asked_for_again():
    """As poison isolation does with the one request that it probes."""
    world = small_world(load_token_us=1000.0)
    rounds(world, prompts(6), 1)
    record = world.submit(prompts(6)[0])
    world.plan()
    state, planner = world.planner.state, world.planner
    (sequence,) = planner.submissions.live()
    for _ in range(2):
        turn = planner.loads.turn(state, sequence, state.pages.probe(sequence), 0, has_pages=True)
        assert turn is LoadTurn.PARKED
    world.run(1)
    assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_a_load_waits_for_the_steps_that_used_its_pages_and_for_no_others(monkeypatch):
    runner = LaggingRunner(
        page_size=4, num_pages=32, vocab_size=VOCAB_SIZE, max_total_len=200, latency=LatencyModel(),
        alphabet=Alphabet.of(VOCAB_SIZE, eos_ids=[EOS_ID], eos_rate=0.0), clock=VirtualClock(),
    )  # fmt: skip
    runner.add_host_pool(8 * 4 * 8)
    executor, behind = StepExecutor(runner, num_slots=4, max_tokens_per_step=64), []
    executor.begin_epoch(1)
    load, save, saved_behind = runner.host_pool.load, runner.host_pool.save, []

    def told(host_pages, device_pages, event=None):
        behind.append(event)
        return load(host_pages, device_pages, event)

    def told_of_save(device_pages, host_pages, event=None):
        saved_behind.append(event)
        save(device_pages, host_pages, event)

    monkeypatch.setattr(runner.host_pool, "load", told)
    monkeypatch.setattr(runner.host_pool, "save", told_of_save)

    def launch(step_id, **parts):
        return executor.launch(StepPlan(epoch=1, step_id=step_id, **parts))

    launch(1, admits=(admit(0, PROMPT),), grants=(grant(0, [0, 1, 2, 3]),), chunks=(chunk(0, 12),)).result()
    launch(2, has_forward=False, saves=(move([0, 1, 2], [5, 6, 7]),), releases=(Release(slot=0, generation=1),))
    second = launch(3, admits=(admit(1, PROMPT),), grants=(grant(1, [8, 9, 10, 11]),), chunks=(chunk(1, 12),))
    third = launch(4, admits=(admit(2, PROMPT),), grants=(grant(2, [12, 13, 14, 15]),), chunks=(chunk(2, 12),))
    # Nobody uses page 20, slot 1 had page 8 up to the step before the one that was launched last.
    launch(5, releases=(Release(slot=1, generation=1),), has_forward=False,
           loads=(move([20], [5], op_id=1), move([8], [5], op_id=2)))  # fmt: skip
    assert behind == [DONE, second.event] and not second.event.is_done
    second.result(), third.result()
    launch(6, admits=(admit(3, PROMPT),), grants=(grant(3, [21, 22, 23, 24]),), has_forward=False,
           page_copies=(PageCopy(source_page=0, target_page=21, num_tokens=4),),
           loads=(move([9], [5], op_id=3),))  # fmt: skip
    launch(7, has_forward=False, loads=(move([25, 21], [5, 6], op_id=4),), releases=(Release(slot=3, generation=1),))
    assert behind[2:] == [DONE, None]
    # A step without a forward lies between the one that uses the pages and the release.
    running = launch(8, admits=(admit(0, PROMPT, generation=2),), grants=(grant(0, [26, 27, 28, 29]),),
                     chunks=(chunk(0, 12),))  # fmt: skip
    launch(9, has_forward=False)
    launch(10, has_forward=False, loads=(move([26], [5], op_id=5),), releases=(Release(slot=0, generation=2),))
    assert behind[4:] == [running.event] and not running.event.is_done
    running.result()
    # A decode of a row whose output has ended is a step that uses its pages.
    launch(11, admits=(admit(1, PROMPT, generation=2),), grants=(grant(1, [4, 5, 6, 7]),),
           chunks=(chunk(1, 12),)).result()  # fmt: skip
    decode = launch(12, decode_set=as_ints([1]))
    other = launch(13, decode_set=as_ints([]), admits=(admit(3, PROMPT, generation=2),),
                   grants=(grant(3, [16, 17, 18, 19]),), chunks=(chunk(3, 12),))  # fmt: skip
    # Full pages are saved at once, whatever runs; those that were copied to or from behind all that was launched.
    launch(14, has_forward=False, saves=(move([4, 5], [3, 4]),), loads=(move([7], [5], op_id=6),),
           releases=(Release(slot=1, generation=2),))  # fmt: skip
    launch(15, has_forward=False, saves=(move([0], [2]),))
    assert behind[5:] == [decode.event] and not decode.event.is_done
    assert saved_behind == [DONE, DONE, None]
    assert not other.event.is_done


def test_a_save_waits_for_all_steps_where_they_accept_drafts():
    """Such steps may move KV after it was counted."""
    told = []
    for most in (1, 2):
        pool = SimpleNamespace(num_pages=4, segment=None, page_bytes=1)
        pool.save = lambda device_pages, host_pages, behind: told.append(behind)
        limits = dataclasses.replace(simulated_executor(page_size=4, num_pages=8).limits, max_tokens_per_row=most)
        host, records = HostTier(pool, limits), PageRecordTable(limits)
        records.grant(as_ints([1]), np.array([1]), previous_pages=as_ints([-1]), namespaces=[""], weights_version=1)
        host.save([move([1], [0])], records, 1)
    assert told == [DONE, None]
