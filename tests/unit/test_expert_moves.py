"""Experts that move between ranks, as threads of this process: the logits stay to the bit, wrong ops change nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deepseek_folders import random_deepseek, save_deepseek
from support.model_folders import random_model, save_model
from support.thread_group import ThreadGroup
from unit.test_expert_parallel import NUM_TOKENS, load, logits_of

from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode, StepPlan, StepResult
from radixmesh.daemons.scheduler.group.shared_experts import SharedExperts
from radixmesh.daemons.scheduler.planning.experts.expert_balancer import BalanceSettings, ExpertBalancer
from radixmesh.daemons.scheduler.planning.experts.expert_moves import ExpertMove, fewest_moves
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.experts.expert_moves import ExpertMoves
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.worker.v1 import worker_pb2

NUM_REDUNDANT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deepseek(random_deepseek("v3_groups"), tmp_path_factory.mktemp("deepseek"))


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """A layer's experts by slot, and by rank as they should be."""
    num_ranks, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, num_ranks * size))
    more = st.lists(st.integers(-1, num_experts - 1), min_size=num_ranks * size, max_size=num_ranks * size)
    now = draw(st.permutations(list(range(num_experts)) + draw(more)[num_experts:]))
    new = draw(st.permutations(list(range(num_experts)) + [max(0, e) for e in draw(more)[num_experts:]]))
    return now, [list(new[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]


@given(placements())
def test_moves_bring_every_rank_what_it_should_have(case: tuple[list[int], list[list[int]]]) -> None:
    now, by_rank = case
    moves = fewest_moves(now, by_rank)
    after = list(now)
    for move in moves:
        assert now[move.source] >= 0
        after[move.target] = now[move.source]
    assert len({move.target for move in moves}) == len(moves)
    size = len(now) // len(by_rank)
    got = [sorted(after[first : first + size]) for first in range(0, len(now), size)]
    assert sorted(got) == sorted(map(sorted, by_rank))
    assert fewest_moves(after, by_rank) == []


def move_op(moves: list[ExpertMove], layer: int, first: int, num: int, stage: str = "a") -> worker_pb2.BarrierOp:
    op = worker_pb2.MoveExperts(
        stage_id=stage,
        layer=layer,
        sources=pack_ints([move.source for move in moves]),
        targets=pack_ints([move.target for move in moves]),
        first_byte=first,
        num_bytes=num,
    )
    return worker_pb2.BarrierOp(move_experts=op)


def place_op(stage: str = "a") -> worker_pb2.BarrierOp:
    return worker_pb2.BarrierOp(place_experts=worker_pb2.CommitStaged(stage_id=stage))


def moves_of(runner: CpuRunner) -> ExpertMoves:
    assert runner.expert_moves is not None
    return runner.expert_moves


def run_ops(runner: CpuRunner, *ops: worker_pb2.BarrierOp) -> None:
    for op in ops:
        moves_of(runner).check(op)
        moves_of(runner).apply(op)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_logits_stay_to_the_bit_while_experts_move(size: int, folder: Path) -> None:
    """In slices, whole or not; copies come, experts change slots; nothing takes effect before it is placed."""
    alone = load(folder)
    expected = [logits_of(alone, seed) for seed in range(size)]

    def rank(number: int) -> None:
        runner = load(folder, experts=AllToAllDispatch(group.groups[number], NUM_REDUNDANT))
        runner.set_dispatch_mode(DispatchMode.LOW_LATENCY, NUM_TOKENS)
        moves, generator = moves_of(runner), np.random.default_rng(7)
        num_slots = moves.placement.shape[1]
        for change in range(6):
            assert np.array_equal(logits_of(runner, number), expected[number])
            runner.clear()
            before, layer = moves.placement, change % moves.num_layers
            new = np.concatenate(
                (np.arange(moves.num_experts), generator.integers(0, moves.num_experts, num_slots - moves.num_experts))
            )
            by_rank = generator.permutation(new).reshape(size, -1).tolist()
            chosen = fewest_moves(before[layer].tolist(), by_rank)
            first = 0
            while chosen and first < moves.expert_bytes:
                num = min(moves.expert_bytes - first, int(generator.integers(1, moves.expert_bytes + 1)))
                run_ops(runner, move_op(chosen, layer, first, num, str(change)))
                first += num
                assert np.array_equal(moves.placement, before)
                assert np.array_equal(logits_of(runner, number), expected[number])
                runner.clear()
            if chosen:
                run_ops(runner, place_op(str(change)))
                assert not np.array_equal(moves.placement[layer], before[layer])
        assert np.array_equal(logits_of(runner, number), expected[number])
        assert moves.version >= 4

    with closing(ThreadGroup(size)) as group:
        group.run(rank)


@pytest.mark.parametrize(
    ("model", "is_fused"), [("mixtral", False), ("mixtral", True), ("deepseek", False), ("deepseek", True)]
)
def test_a_rank_that_starts_again_reads_what_it_lacks(model: str, is_fused: bool, tmp_path: Path) -> None:
    """From the checkpoint, in each layout; and back to the experts that it loaded at first."""
    if model == "mixtral":
        folder = save_model(random_model("mixtral"), tmp_path, is_fused=is_fused)
    else:
        folder = save_deepseek(random_deepseek("v3_groups"), tmp_path, is_fused=is_fused)
    expected = logits_of(load(folder), 0)

    def rank(number: int) -> None:
        runner = load(folder, experts=AllToAllDispatch(group.groups[number], NUM_REDUNDANT))
        moves = moves_of(runner)
        num_layers, num_slots = moves.placement.shape
        generator = np.random.default_rng(1)
        wanted = np.stack([generator.permutation(np.arange(num_slots) % moves.num_experts) for _ in range(num_layers)])
        for placement, version in ((wanted, 9), (None, 0), (wanted, 12)):
            message = None
            if placement is not None:
                message = worker_pb2.ExpertPlacement(version=version, experts=pack_ints(placement.ravel()))
            moves.adopt(message)
            assert moves.version == version and (placement is None or np.array_equal(moves.placement, placement))
            assert np.array_equal(logits_of(runner, 0), expected)
            runner.clear()

    with closing(ThreadGroup(2)) as group:
        group.run(rank)


def test_ops_that_cannot_be_are_refused_and_leave_no_trace(folder: Path) -> None:
    def rank(number: int) -> None:
        runner = load(folder, experts=AllToAllDispatch(group.groups[number], NUM_REDUNDANT))
        moves = moves_of(runner)
        size = moves.expert_bytes
        executor = StepExecutor(runner, num_slots=2, max_tokens_per_step=64)
        executor.begin_epoch(1)
        before = moves.placement
        empty = int(np.argmax(before[0] < 0))
        good = [ExpertMove(0, empty)]
        run_ops(runner, move_op(good, 0, 0, 10))
        for op, what in (
            (move_op(good, 99, 0, 10), "layer 99"),
            (move_op(good, 1, 10, 10), "is of layer 0"),
            (move_op([], 0, 0, 10), "send pairs"),
            (move_op([ExpertMove(0, 3), ExpertMove(1, 3)], 0, 0, 10), "each target once"),
            (move_op([ExpertMove(0, 1000)], 0, 0, 10), "outside"),
            (move_op([ExpertMove(-1, 0)], 0, 0, 10), "outside"),
            (move_op([ExpertMove(empty, 0)], 0, 0, 10, "b"), "empty slot"),
            (move_op(good, 0, 10, size), "an expert has"),
            (move_op(good, 0, 10, 0), "an expert has"),
            (move_op(good, 0, 20, 10), "has 10 bytes"),
            (move_op(good, 0, 0, 10), "has 10 bytes"),
            (move_op([ExpertMove(1, empty)], 0, 10, 10), "has 10 bytes"),
            (move_op(good, 0, 10, 10, "x" * 300), "send 1 to"),
            (move_op(good, 0, 10, 10, ""), "send 1 to"),
            (place_op(), "has 10 of"),
            (place_op("b"), "nothing was moved"),
            (worker_pb2.BarrierOp(commit_weights=worker_pb2.CommitStaged(stage_id="a")), "not offered"),
        ):
            with pytest.raises(MeshError, match=what):
                executor.run(StepPlan(epoch=1, step_id=1, barrier_ops=(op,), has_forward=False))
        with pytest.raises(MeshError, match="several ops about experts"):
            ops = (move_op(good, 0, 10, 10), move_op(good, 0, 20, 10))
            executor.run(StepPlan(epoch=1, step_id=1, barrier_ops=ops, has_forward=False))
        # The change under way goes on: nothing of it was lost.
        rest = StepPlan(epoch=1, step_id=1, barrier_ops=(move_op(good, 0, 10, size - 10),), has_forward=False)
        result = executor.run(rest)
        assert result.device_end_ns >= result.device_start_ns
        executor.run(StepPlan(epoch=1, step_id=2, barrier_ops=(place_op(),), has_forward=False))
        assert moves.placement[0, empty] == before[0, 0] and moves.version == 1
        # The only slot of an expert may not go.
        lonely = next(p for p, e in enumerate(before[1]) if e >= 0)
        run_ops(runner, move_op([ExpertMove(lonely + 1, lonely)], 1, 0, size, "c"))
        with pytest.raises(MeshError, match="without a slot"):
            moves.check(place_op("c"))
        # A new epoch knows nothing of it.
        executor.begin_epoch(2)
        with pytest.raises(MeshError, match="nothing was moved"):
            moves.check(place_op("c"))
        for experts, error in (
            (pack_ints(before.ravel()[:-1]), "slots of experts"),
            (pack_ints(np.full(before.size, 999, np.int32)), "outside"),
            (pack_ints(np.zeros(before.size, np.int32)), "without a slot"),
        ):
            with pytest.raises(MeshError, match=error):
                moves.adopt(worker_pb2.ExpertPlacement(version=3, experts=experts))
        # The next placement's version is one more, and is told.
        with pytest.raises(MeshError, match="nothing counts so far"):
            moves.adopt(worker_pb2.ExpertPlacement(version=(1 << 64) - 1, experts=pack_ints(before.ravel())))

    with closing(ThreadGroup(2)) as group:
        group.run(rank)


def shared(num_ranks: int, num_layers: int, num_experts: int, slots: int, expert_bytes: int) -> SharedExperts:
    """As loaded: contiguous shares, empty slots behind them."""
    experts_LS = np.full((num_layers, num_ranks * slots), -1, np.int32)
    for rank in range(num_ranks):
        held = np.arange(num_experts * rank // num_ranks, num_experts * (rank + 1) // num_ranks)
        experts_LS[:, rank * slots : rank * slots + len(held)] = held
    return SharedExperts(
        num_ranks=num_ranks, num_experts=num_experts, expert_bytes=expert_bytes, version=0, experts_LS=experts_LS
    )


def answer(step_id: int, seconds: float = 0.0, loads: np.ndarray | None = None) -> StepResult:
    nothing = np.zeros(0, np.int32)
    return StepResult(
        epoch=1,
        step_id=step_id,
        counts=nothing,
        ids=nothing,
        device_end_ns=int(seconds * 1e9),
        expert_loads=nothing if loads is None else loads.astype(np.int32).ravel(),
    )


OPS = frozenset({"move_experts", "place_experts"})


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    num_ranks=st.sampled_from([2, 4, 8]),
    bytes_per_s=st.sampled_from([1e6, 3e8, 1e10]),
    expert_bytes=st.sampled_from([1000, 10_000_000, 100_000_000]),
)
def test_a_skewed_load_is_balanced_within_the_time_that_steps_may_take(
    seed: int, num_ranks: int, bytes_per_s: float, expert_bytes: int
) -> None:
    """The link carries so many bytes a second: no slice but the first takes much longer than it should."""
    generator = np.random.default_rng(seed)
    num_experts = 8 * num_ranks
    experts = shared(num_ranks, 3, num_experts, 10, expert_bytes)
    loads = np.sort(generator.zipf(1.6, (3, num_experts)).clip(0, 200) * 100, axis=1)
    balancer = ExpertBalancer(BalanceSettings(threshold=0.9, interval_s=5.0))
    balancer.begin_epoch(1, experts, OPS)
    balancer.processed(answer(1, loads=loads))
    before, now, longest, num_ops = balancer.balancedness(), 100.0, 0.0, 0
    assert balancer.next_op(now, 2) is None, "not before an interval is over"
    last_op_s = 0.0
    while now < 20_000.0 and num_ops < 3000:
        now += 0.5
        op = balancer.next_op(now, 2 + num_ops)
        if op is None:
            continue
        assert now >= last_op_s
        num_ops += 1
        assert balancer.next_op(now, 99_999) is None, "one at a time"
        seconds = 0.0
        if op.HasField("move_experts"):
            moved = op.move_experts.num_bytes * len(op.move_experts.targets) // 4
            assert moved <= 256 << 20
            seconds = moved / bytes_per_s
            longest = max(longest, seconds)
        balancer.processed(answer(1 + num_ops, seconds))
        last_op_s = now + 2 * seconds
        if balancer.num_placed == 3:
            break
    assert longest <= 1.1, "a link of a MB a second carries the first slice in a second"
    after = balancer.balancedness()
    assert after >= before - 1e-9
    if before < 0.7 and bytes_per_s > 1e6:
        assert balancer.num_placed and after > before, (before, after)


def test_what_there_is_no_need_to_move_stays() -> None:
    experts = shared(4, 2, 16, 5, 1000)
    balancer = ExpertBalancer(BalanceSettings(threshold=0.8, interval_s=1.0))
    balancer.begin_epoch(1, experts, OPS)
    assert balancer.balancedness() == 0.0
    balancer.processed(answer(1, loads=np.full((2, 16), 1000)))
    assert balancer.balancedness() == 1.0
    assert all(balancer.next_op(now, 2) is None for now in np.arange(0.0, 20.0, 0.5))
    with pytest.raises(MeshError, match="report loads of 3 experts"):
        balancer.processed(answer(2, loads=np.ones(3)))
    for threshold, ops in ((0.0, OPS), (0.8, frozenset({"flush_cache"}))):
        other = ExpertBalancer(BalanceSettings(threshold=threshold))
        other.begin_epoch(1, experts, ops)
        assert not other.is_on


def test_a_new_epoch_drops_the_change_under_way_and_keeps_the_loads() -> None:
    """The look at the loads waits as after any other, but for twice as long: the group may have died of the moves."""
    experts = shared(2, 1, 8, 4, 1000)
    balancer = ExpertBalancer(BalanceSettings(threshold=0.9, interval_s=1.0))
    balancer.begin_epoch(1, experts, OPS)
    loads = np.array([[800, 700, 600, 500, 4, 3, 2, 1]])
    balancer.processed(answer(1, loads=loads))
    balancer.next_op(0.0, 2)
    first = balancer.next_op(2.0, 2)
    assert first is not None and first.move_experts.stage_id == "1.1"
    balancer.begin_epoch(2, experts, OPS)
    assert balancer.next_op(4.0, 1) is None and balancer.next_op(5.9, 1) is None
    again = balancer.next_op(6.0, 1)
    assert again is not None and again.move_experts.stage_id == "2.2"
    assert torch.tensor(balancer.balancedness()) < 0.6


def test_a_group_that_dies_of_moves_is_soon_left_alone() -> None:
    balancer = ExpertBalancer(BalanceSettings(threshold=0.9, interval_s=60.0))
    deaths: list[float] = []
    for second in range(3 * 3600):
        if not deaths or deaths[-1] == second - 1:
            balancer.begin_epoch(2 + second, shared(2, 1, 8, 4, 1000), OPS)
            balancer.processed(answer(1, loads=np.array([[800, 700, 600, 500, 4, 3, 2, 1]])))
        if balancer.next_op(float(second), 2) is not None:
            deaths.append(second)
    assert 4 <= len(deaths) <= 10, deaths


def test_loads_that_no_placement_balances_are_not_moved_for_ever() -> None:
    """Few picks a report: by chance, each look finds a placement that would have been better."""
    generator, picks = np.random.default_rng(0), 1 / np.arange(1, 65)
    balancer = ExpertBalancer(BalanceSettings(threshold=0.8, interval_s=60.0))
    balancer.begin_epoch(1, shared(8, 2, 64, 8, 1000), OPS)
    placed_at: list[float] = []
    for step in range(1, 6 * 3600 // 2):
        now, loads = 2.0 * step, None
        if step % 4 == 0:
            loads = np.stack([generator.multinomial(256, picks / picks.sum()) for _ in range(2)])
        num_placed = balancer.num_placed
        balancer.next_op(now, step)
        balancer.processed(answer(step, 0.001, loads))
        if balancer.num_placed > num_placed:
            placed_at.append(now)
    assert placed_at and balancer.balancedness() < 0.8
    assert sum(now > 4 * 3600 for now in placed_at) <= 2 * 5, "both layers, every half an hour or so"


def test_loads_of_another_model_are_its_own() -> None:
    """As many slots as before, for fewer experts."""
    balancer = ExpertBalancer()
    for num_experts in (8, 6):
        balancer.begin_epoch(1, shared(2, 1, num_experts, 4, 1000), OPS)
        balancer.processed(answer(1, loads=np.arange(num_experts)))


def test_one_worker_alone_has_no_moves(folder: Path) -> None:
    runner = load_cpu_runner(folder, page_size=4, num_pages=8, threads=1)
    assert runner.expert_moves is None
