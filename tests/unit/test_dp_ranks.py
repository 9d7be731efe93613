"""Several data-parallel ranks behind one queue: outputs, placement, pages of each rank's own, the wire's sections."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.fake_store import FakeStore
from support.planner_world import EOS_ID, VOCAB_SIZE, Record, submission
from support.planner_world import joined as joined_records

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.wire_bounds import parse_frame
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import SlotError, StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, plan_from_proto
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.planning.admission import prefill
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.daemons.worker.simulated.uneven_runner import UnevenRunner
from radixmesh.worker.v1 import worker_pb2


class DpWorld:
    """A planner and one simulated worker a rank; plans go over the wire's bytes."""

    def __init__(
        self,
        num_ranks: int,
        *,
        num_slots: int = 4,
        num_pages: int = 96,
        max_tokens_per_row: int = 1,
        num_host_pages: int = 0,
        num_stored: Callable[[int], int] | None = None,
        **choices: object,
    ) -> None:
        """num_stored: of pages that are asked of a store below the host, how many that has; None: there is no store."""
        self.alphabet = Alphabet.of(VOCAB_SIZE, eos_ids=[EOS_ID], eos_rate=0.0)
        common = {
            "page_size": 2,
            "num_pages": num_pages,
            "vocab_size": VOCAB_SIZE,
            "max_total_len": 96,
            "alphabet": self.alphabet,
            "latency": LatencyModel(),
        }
        runners = [
            SimulatedRunner(**common, clock=VirtualClock())
            if max_tokens_per_row == 1
            else UnevenRunner(**common, clock=VirtualClock(), max_tokens_per_row=max_tokens_per_row, row_seed=rank)
            for rank in range(num_ranks)
        ]
        if num_host_pages:
            for runner in runners:
                runner.add_host_pool(16 * num_host_pages)
        self.executors = [StepExecutor(r, num_slots=num_slots, max_tokens_per_step=32) for r in runners]
        self.group = GroupInfo(
            page_size=2,
            num_pages=num_pages,
            num_slots=num_slots,
            num_host_pages=num_host_pages,
            has_kv_store=num_stored is not None,
            dp_size=num_ranks,
            max_tokens_per_step=32,
            max_plans_in_flight=4,
            max_tokens_per_row=max_tokens_per_row,
            vocab_size=VOCAB_SIZE,
            max_total_len=96,
            eos_ids=(EOS_ID,),
            barrier_ops=frozenset({"flush_cache"}),
        )
        settings = PlannerSettings(chunk_tokens=16, check_invariants=True, decode_reserve_tokens=1)
        self.planner = Planner(replace(settings, **choices))  # type: ignore[arg-type]
        self.store = FakeStore(self.planner, lambda: self.executors, num_stored or (lambda num: num))
        self.records: list[Record] = []
        self.results: deque[list[StepResult]] = deque()
        self.shapes: list[worker_pb2.ForwardShape] = []
        self.sections: list[list[StepPlan]] = []
        self.epoch = 0
        self.begin_epoch()

    def begin_epoch(self) -> int:
        self.epoch += 1
        self.results.clear()
        snapshots = []
        for executor in self.executors:
            executor.begin_epoch(self.epoch)
            parts, names = executor.snapshot()
            host = executor.host_snapshot()
            of_host = None if host is None else CacheSnapshot(records=joined_records(host[0]), names=tuple(host[1]))
            snapshots.append(CacheSnapshot(records=joined_records(parts), names=tuple(names), host=of_host))
        return self.planner.begin_epoch(self.epoch, self.group, snapshots)

    def submit(self, prompt: list[int], max_tokens: int = 8) -> Record:
        wanted = submission(len(self.records), prompt, stop=Stop(max_tokens=max_tokens))
        record = Record(wanted)
        self.records.append(record)
        self.planner.submit(wanted)
        self.take(self.planner.take_outputs())
        return record

    def step(self) -> bool:
        """Plans once, and has every rank compute its section."""
        plan = self.planner.plan(0.0)
        self.take(self.planner.take_outputs())
        self.store.collect()
        if plan is None:
            return False
        data = encode_plan(plan, 0, self.group.dp_size, self.group.num_slots)
        message = parse_frame(data, worker_pb2.ExecuteRequest).plan
        self.shapes.append(message.header.shape)
        sections = [plan_from_proto(message, rank) for rank in range(self.group.dp_size)]
        self.sections.append(sections)
        self.results.append([e.run(section) for e, section in zip(self.executors, sections, strict=True)])
        return True

    def process(self) -> None:
        self.take(self.planner.process(self.planner.joined(self.results.popleft())))

    def run(self, depth: int = 1, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            while self.planner.num_in_flight <= depth and self.step():
                pass
            if self.results:
                self.process()
            elif not self.store.step():
                return
        raise AssertionError(f"not done: {self.planner.num_live} live")

    def take(self, outputs: Outputs) -> None:
        for rows in outputs.rows:
            start = 0
            for row, handle in enumerate(rows.handles.tolist()):
                record = self.records[handle]
                assert record.finished is None and int(rows.firsts[row]) == len(record.tokens)
                end = start + int(rows.counts[row])
                record.tokens += rows.ids[start:end].tolist()
                start = end
        for finished in outputs.finished:
            self.records[finished.handle].finished = finished

    def expected(self, record: Record) -> list[int]:
        wanted = record.submission
        return simulated_continuation(
            wanted.prompt_ids.tolist(), wanted.stop.max_tokens or 0, alphabet=self.alphabet, temperature=0.0
        )

    def check(self) -> None:
        for record in self.records:
            assert record.finished is not None and record.tokens == self.expected(record)

    def rank_of(self, record: Record) -> int:
        """Of the last admission."""
        for sections in reversed(self.sections):
            for rank, section in enumerate(sections):
                if any(admit.request_id == record.submission.key.request_id for admit in section.admits):
                    return rank
        raise AssertionError("never admitted")


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_each_rank_has_a_host_tier_of_its_own(policy: str) -> None:
    rng = np.random.default_rng(2)
    tiers = TierSettings(policy=WritePolicy(policy), load_min_tokens=1)
    world = DpWorld(3, num_pages=40, num_host_pages=200, tiers=tiers)
    prompts = [rng.integers(2, VOCAB_SIZE, 40).tolist() for _ in range(9)]
    for number in range(3):
        for prompt in prompts:
            world.submit(prompt, max_tokens=4)
        world.run()
        if number == 1:
            assert world.begin_epoch() > 0
    world.check()
    state = world.planner.state
    assert state is not None and len(state.hosts) == 3
    assert all(host.counters.loaded and not host.find_violation() for host in state.hosts)
    moves = [(rank, bool(s.saves), bool(s.loads)) for each in world.sections for rank, s in enumerate(each)]
    assert {rank for rank, has_saves, _ in moves if has_saves} == {0, 1, 2}
    assert {rank for rank, _, has_loads in moves if has_loads} == {0, 1, 2}


def test_each_rank_fetches_from_the_store() -> None:
    """Prompts that no rank has seen: what a store has of them comes to the host of the rank that runs them."""
    rng = np.random.default_rng(4)
    tiers = TierSettings(load_min_tokens=1, fetch_min_tokens=4)
    world = DpWorld(3, num_pages=40, num_host_pages=60, num_stored=lambda num: num - 1, tiers=tiers)
    for _ in range(3):
        prompts = [rng.integers(2, VOCAB_SIZE, 40).tolist() for _ in range(9)]
        records = [world.submit(prompt, max_tokens=4) for prompt in prompts]
        world.run()
        assert {world.rank_of(record) for record in records} == {0, 1, 2}
    world.check()
    state, planner = world.planner.state, world.planner
    assert state is not None
    assert all(host.counters.fetched for host in state.hosts)
    # But for the last pages, of 2 tokens, of each prompt of 20.
    assert planner.fetches.num_fetched == 27 * 18 and planner.counters.prefilled_tokens == 27 * 4


def test_a_prefix_that_one_ranks_disk_has_goes_to_that_rank() -> None:
    """Each rank's host memory holds two prompts of four; a store that all ranks share has one tree of them."""
    rng = np.random.default_rng(6)
    tiers = TierSettings(load_min_tokens=1, fetch_min_tokens=4)
    world = DpWorld(2, num_pages=60, num_host_pages=60, num_stored=lambda num: num, tiers=tiers)
    prompts = [rng.integers(2, VOCAB_SIZE, 40).tolist() for _ in range(8)]
    homes = []
    for pair in zip(prompts[::2], prompts[1::2], strict=True):
        records = [world.submit(prompt, max_tokens=4) for prompt in pair]
        world.run()
        homes += [(record, world.rank_of(record)) for record in records]
    state = world.planner.state
    assert state is not None and all(host.counters.evicted for host in state.hosts)
    gone = [
        (record, rank)
        for record, rank in homes
        for ids in [record.submission.prompt_ids]
        if [stored.num_known(Namespace("", 1), ids) > 0 for stored in state.stored] == [rank == 0, rank == 1]
    ]
    assert {rank for _, rank in gone} == {0, 1}
    for record, rank in gone:
        again = world.submit(record.submission.prompt_ids.tolist(), max_tokens=4)
        world.run()
        assert world.rank_of(again) == rank
    world.check()
    world.group = replace(world.group, kv_store_id="shared")
    world.begin_epoch()
    state = world.planner.state
    assert state is not None and len(state.stored) == 1
    assert {host.stored for host in state.hosts} == set(state.stored)


def test_prefixes_are_loaded_to_their_rank_while_slots_are_full() -> None:
    world = DpWorld(2, num_slots=1, num_pages=60, num_host_pages=200, tiers=TierSettings(load_min_tokens=1))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB_SIZE, 40).tolist() for _ in range(8)]
    for prompt in prompts:
        world.submit(prompt, max_tokens=2)
    world.run()
    for _ in range(2):
        world.submit(rng.integers(2, VOCAB_SIZE, 30).tolist(), max_tokens=30)
    for _ in range(6):
        world.step()
        world.process()
    state = world.planner.state
    assert state is not None and state.table.num_running == 2
    record = world.submit(prompts[0], max_tokens=2)
    before = world.planner.loads.num_loads
    while world.planner.loads.num_loads == before:
        assert world.step()
        world.process()
    assert state.table.num_running == 2 and not record.tokens, "it is loaded before there is a slot"
    world.run()
    world.check()


@pytest.mark.parametrize(
    ("num_ranks", "max_tokens_per_row", "seed"), [(2, 1, 0), (2, 3, 0), (3, 1, 1), (3, 3, 1), (12, 1, 0), (12, 3, 1)]
)
def test_outputs_are_those_of_one_rank(num_ranks: int, max_tokens_per_row: int, seed: int) -> None:
    """Little memory: retractions, evictions and chunks on every rank, a new epoch in the middle."""
    rng = np.random.default_rng(seed)
    world = DpWorld(num_ranks, num_pages=40, max_tokens_per_row=max_tokens_per_row)
    stems = [rng.integers(2, VOCAB_SIZE, 12).tolist() for _ in range(3)]
    for _ in range(8 * num_ranks):
        prompt = stems[rng.integers(3)][: rng.integers(1, 13)] + rng.integers(2, VOCAB_SIZE, 4).tolist()
        world.submit(prompt, max_tokens=int(rng.integers(1, 40)))
        if rng.random() < 0.5 and world.step() and rng.random() < 0.7:
            world.process()
    assert world.begin_epoch() > 0 or seed, "some KV of the ranks is adopted"
    world.run()
    world.check()
    state = world.planner.state
    assert state is not None and state.table.num_running == 0
    for pages, executor in zip(state.ranks, world.executors, strict=True):
        assert pages.pool.num_free + pages.pool.num_cached == pages.pool.num_pages
        assert pages.cache.num_evictable == pages.pool.num_cached and not executor.table.is_occupied.any()
    assert len({world.rank_of(record) for record in world.records}) == num_ranks, "all ranks had work"


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 6))])
def test_bursts_behind_one_prefix_keep_to_the_bounds_of_each_rank(seed: int) -> None:
    """Leaders get what their followers leave of their own rank, with KV that is loaded or fetched meanwhile."""
    rng = np.random.default_rng(seed)
    world = DpWorld(
        int(rng.choice([2, 3])),
        num_pages=int(rng.choice([48, 200])),
        max_tokens_per_row=int(rng.choice([1, 3])),
        num_host_pages=int(rng.choice([0, 100])),
        num_stored=(lambda num: num // 2) if rng.random() < 0.5 else None,
        tiers=TierSettings(load_min_tokens=1, fetch_min_tokens=4),
        chunk_tokens=int(rng.choice([3, 8])),
        inflight_prefix_min_tokens=4,
    )
    stems = [rng.integers(2, VOCAB_SIZE, 36).tolist() for _ in range(2)]
    for _ in range(60):
        if rng.random() < 0.3:
            stem = stems[rng.integers(2)][: rng.integers(8, 37)]
            for _ in range(4):
                own = rng.integers(2, VOCAB_SIZE, int(rng.integers(1, 20))).tolist()
                world.submit([*stem, *own], max_tokens=int(rng.integers(1, 20)))
        if world.planner.num_in_flight < 3:
            world.step()
        if world.results and rng.random() < 0.6:
            world.process()
    world.run()
    world.check()
    assert world.planner.counters.num_prefix_deduplications and not world.planner.queue.num_waiting_for_prefix
    for section in (section for sections in world.sections for section in sections):
        slots = [chunk.slot for chunk in section.chunks]
        assert len(slots) == len(set(slots)) and sum(chunk.length for chunk in section.chunks) <= 32


def test_a_prefix_goes_where_it_is_cached_until_that_rank_is_busy() -> None:
    world = DpWorld(2, num_slots=8, num_pages=800, inflight_prefix_min_tokens=1000)
    stem = list(range(2, 42))
    first = world.submit(stem, max_tokens=2)
    world.run()
    home = world.rank_of(first)
    second = world.submit([*stem, 50], max_tokens=2)
    world.run()
    assert world.rank_of(second) == home and second.finished is not None
    herd = [world.submit([*stem, 44 + i], max_tokens=30) for i in range(8)]
    world.run()
    ranks = [world.rank_of(record) for record in herd]
    assert ranks[0] == home and 0 < ranks.count(1 - home) < 8, "the longest prefix alone would herd them onto one rank"
    world.check()


def test_among_many_ranks_the_one_that_had_the_prefix_is_found() -> None:
    world = DpWorld(32, num_slots=2)
    first = world.submit(list(range(2, 50)), max_tokens=2)
    for i in range(31):
        world.submit([60, 2 + i, 3, 4], max_tokens=2)
    world.run()
    again = world.submit([*range(2, 50), 7], max_tokens=2)
    world.run()
    assert world.rank_of(again) == world.rank_of(first)
    world.check()


def test_a_rank_whose_prefills_wait_for_each_other_is_freed_while_another_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts with an odd first token go to rank 1, whose free pages are a transfer's all of a sudden."""
    monkeypatch.setattr(
        prefill, "rank_order", lambda state, draft, loads, sequence, most: (int(sequence.token_ids()[0]) % 2,)
    )
    world = DpWorld(2, num_pages=40, inflight_prefix_min_tokens=1000)
    busy = world.submit([2, 3], max_tokens=40)
    older = world.submit([3, *range(20, 43)], max_tokens=2)
    younger = world.submit([5, *range(20, 39)], max_tokens=2)
    world.step()
    world.process()
    state = world.planner.state
    assert state is not None and state.table.running_on(1) == 2
    pool = state.ranks[1].pool
    pages = pool.take(pool.num_free)
    pool.lease(pages)
    while not older.finished:
        assert world.step() or world.results, "nobody gives way"
        while world.results:
            world.process()
        assert not busy.finished, "the older one waited until the other rank was idle"
    assert older.tokens == world.expected(older)
    state.ranks[1].end_lease(pages)
    world.run()
    assert younger.finished
    world.check()


def test_the_shape_of_a_step_says_which_ranks_idle() -> None:
    world = DpWorld(3, num_slots=1)
    world.submit([2, 3, 4, 5], max_tokens=2)
    world.submit([6, 7], max_tokens=2)
    world.step()
    (shape,) = world.shapes
    idle = {0, 1, 2} - {world.rank_of(record) for record in world.records}
    assert shape.max_tokens_per_rank == 4 and unpack_ints(shape.idle_ranks, "idle_ranks").tolist() == sorted(idle)


def test_a_flush_empties_the_caches_of_all_ranks() -> None:
    world = DpWorld(3)
    for i in range(9):
        world.submit([2 + i, 3, 4, 5, 6], max_tokens=2)
    world.run()
    wish = world.planner.flush.wish()
    world.run()
    state = world.planner.state
    assert state is not None and wish.is_done and wish.flushed_pages > 3
    assert all(pages.pool.num_free == pages.pool.num_pages for pages in state.ranks)
    world.submit([2, 3, 4, 5, 6])
    world.run()
    world.check()


def test_a_rank_with_rows_that_the_plan_did_not_give_it_breaks_the_protocol() -> None:
    world = DpWorld(2)
    for i in range(4):
        world.submit([2 + i, 3, 4])
    world.step()
    (results,) = world.results
    with pytest.raises(MeshError) as caught:
        world.planner.joined(
            results[::-1]
            if len(results[0].counts) != len(results[1].counts)
            else [results[0], replace(results[1], counts=results[1].counts[:-1])]
        )
    assert caught.value.reason_name == "PROTOCOL_VIOLATION"
    with pytest.raises(MeshError):
        world.planner.joined([results[0], replace(results[1], step_id=7)])


def test_an_error_of_a_slot_is_that_of_its_rank() -> None:
    world = DpWorld(2, num_slots=1)
    records = [world.submit([2 + i, 3, 4]) for i in range(2)]
    world.step()
    (results,) = world.results
    error = MeshError(common_pb2.ERROR_REASON_INTERNAL, "broken")
    failing = world.rank_of(records[1])
    results[failing] = replace(results[failing], slot_errors=(SlotError(slot=0, generation=1, error=error),))
    # A slot that the rank does not have is not that of the next one.
    results[1 - failing] = replace(results[1 - failing], slot_errors=(SlotError(slot=1, generation=1, error=error),))
    world.run()
    assert records[1].finished is not None and records[1].finished.error is error
    assert records[0].tokens == world.expected(records[0])
