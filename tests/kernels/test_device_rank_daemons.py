"""Ranks of the cuda backend behind one scheduler over gRPC, on CPUs: its runner on the host's device, sums by gloo.

Logprobs are told in the first tests alone: Triton's interpreter takes half of a step for their kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from mesh.test_tensor_parallel import go, lose_a_write, seem_lost
from support.cpu_ranks import (
    NUM_TOKENS,
    TIMEOUT_S,
    Ranks,
    Text,
    ranks_of,
    recited,
    scheduler_on,
    skewed_deepseek,
    texts,
)
from support.replaying_device import ReplayingDevice
from support.serve_client import ServeClient, serve_client
from support.triton_interpreter import launch_in_turns

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.scheduler.group.group_client import GroupState
from radixmesh.daemons.scheduler.planning.experts import expert_balancer
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.config import Backend
from radixmesh.daemons.worker.cuda import load
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel.expert_moves import DeviceExpertMoves
from radixmesh.daemons.worker.cuda.expert_parallel.wire import HostWire
from radixmesh.daemons.worker.cuda.model.half_batches import Stages, take_turns
from radixmesh.daemons.worker.cuda.ranks.choice import create_device_group
from radixmesh.daemons.worker.cuda.ranks.device_group import HostGroup
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step import decode_steps, late_captures
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter"),
]
WORKER = {
    "backend": Backend.CUDA,
    "dtype": "float32",
    "attention_backend": "torch",
    "page_size": 1,
    "num_pages": NUM_TOKENS,
    "max_total_len": 512,
    "max_tokens_per_step": 64,
    "cuda_graphs": False,
}
recited_without_logprobs = partial(recited, num_logprobs=None)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_runner(
        folder: Path, settings: load.DeviceSettings, *rest: object, ranks: RankGroup | None, **others: object
    ) -> DeviceRunner:
        device, experts = ReplayingDevice() if settings.cuda_graphs else HostDevice(), others.get("experts")
        assert experts is None or isinstance(experts, ExpertDispatch)
        group = (
            create_device_group(settings.tp_collectives, ranks, device)
            if ranks is not None and ranks.size > 1
            else None
        )
        shared = load.create_shared_out(settings, experts, device, ranks)
        runner = load.load_device_runner(folder, replace(settings, use_pdl=False), device, group, shared)
        runner.warm_up()
        return runner

    monkeypatch.setattr(load, "load_cuda_runner", load_runner)
    launch_in_turns(monkeypatch)


@pytest.mark.parametrize(
    ("model", "tp_size"),
    [
        ("tiny-llama", 2),
        pytest.param("tiny-deepseek", 2, marks=pytest.mark.slow),
        pytest.param("tiny-llama", 4, marks=pytest.mark.full),
        pytest.param("tiny-deepseek", 4, marks=pytest.mark.full),
    ],
)
async def test_the_tiny_models_recite(model: str, tp_size: int) -> None:
    """In chunks, with retraction, and again from the cache."""
    chosen = texts(model, 6)
    async with (
        ranks_of(model, tp_size, **WORKER) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        await recited(client, chosen[:2])
        await recited_without_logprobs(client, chosen)
        counters = daemon.daemon.loop.planner.counters
        assert counters.num_retracted and counters.cached_tokens, repr(counters)


def rooms_of(ranks: Ranks) -> list[set[tuple[bool, bool]]]:
    """Of the steps of each rank: whether they are at low latency, and have rows; grows as they run."""
    seen: list[set[tuple[bool, bool]]] = []
    for running in ranks.workers.values():
        executor = running.daemon.core.executor
        assert executor is not None and isinstance(executor.runner, DeviceRunner)
        runner, rooms = executor.runner, set[tuple[bool, bool]]()
        seen.append(rooms)

        def launch(rows, segments, ready_ns, runner=runner, rooms=rooms, inner=runner.launch):  # type: ignore[no-untyped-def]
            assert runner.links.experts is not None
            rooms.add((runner.links.experts.room > 0, len(rows.slots) + len(segments) > 0))
            return inner(rows, segments, ready_ns)

        runner.launch = launch  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.full)])
async def test_tiny_deepseek_recites_with_its_experts_on_several_ranks(size: int) -> None:
    """Attention data-parallel: decodes at low latency, prompts in normal forwards; ranks without rows take part."""
    chosen = texts("tiny-deepseek", 6)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2}
    async with (
        ranks_of("tiny-deepseek", 1, size, ep_size=size, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        rooms = rooms_of(ranks)
        await recited_without_logprobs(client, chosen)
        await recited_without_logprobs(client, chosen[:1])
        assert daemon.daemon.loop.planner.counters.cached_tokens
    for of_rank in rooms:
        assert {is_low_latency for is_low_latency, _ in of_rank} == {True, False}
    assert any(not has_rows for of_rank in rooms for _, has_rows in of_rank)


@pytest.mark.parametrize(
    ("dp_size", "ep_size", "graphs"),
    [
        (1, 2, True),
        pytest.param(2, 4, True, marks=pytest.mark.full),
        pytest.param(2, 4, False, marks=pytest.mark.full),
        pytest.param(2, 2, True, marks=pytest.mark.full),
    ],
)
async def test_tiny_deepseek_recites_with_attention_by_heads_beside_shared_experts(
    dp_size: int, ep_size: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP 2: in captured steps too; a rank goes and comes back. Where rows travel, ranks without rows take part."""
    monkeypatch.setattr(HostWire, "can_capture", True)
    monkeypatch.setattr(HostWire, "is_captured_anew", True)
    monkeypatch.setattr(HostGroup, "can_capture", True)
    monkeypatch.setattr(HostGroup, "is_captured_anew", True)
    chosen = texts("tiny-deepseek", 6)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // dp_size, "cuda_graphs": graphs, "num_slots": 4}
    async with (
        ranks_of("tiny-deepseek", 2, dp_size, ep_size=ep_size, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        while daemon.daemon.loop.group_state is not GroupState.SERVING:
            await asyncio.sleep(0.01)
        rooms = rooms_of(ranks)
        await recited_without_logprobs(client, chosen)
        await recited_without_logprobs(client, chosen[:1])
        assert daemon.daemon.loop.planner.counters.cached_tokens
        if ep_size > 2:
            for of_rank in rooms:
                assert {is_low_latency for is_low_latency, _ in of_rank} == {True, False}
            assert any(not has_rows for of_rank in rooms for _, has_rows in of_rank)
        else:
            assert {is_low_latency for of_rank in rooms for is_low_latency, _ in of_rank} == {False}
        reciting = asyncio.ensure_future(recited_without_logprobs(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await go(ranks, 1)
        await reciting
        assert ranks.workers[0].daemon.core.ledger.group_generation > 1, "the survivors have joined again"
        if graphs:
            for rank in range(2 * dp_size):
                assert {rows for rows, *_ in _device_of(ranks, rank).replayed} >= {1, 4}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its experts biased it recites nothing: what it says is compared with what one worker says."""
    return skewed_deepseek(tmp_path_factory.mktemp("skewed"))


async def _said_by_one(folder: Path, chosen: list[Text]) -> list[list[int]]:
    async with (
        ranks_of(folder, 1, **{**WORKER, "num_pages": 2 * NUM_TOKENS}) as one,
        scheduler_on(one) as daemon,
        serve_client(daemon.address) as client,
    ):
        return await _said(client, chosen)


async def _said(client: ServeClient, chosen: list[Text]) -> list[list[int]]:
    sampling = common_pb2.SamplingParams(temperature=0.0)
    handles = [await client.submit(text.prompt, max_tokens=40, sampling=sampling) for text in chosen]
    return [seen.tokens for seen in await client.over(*handles, timeout_s=TIMEOUT_S)]


@pytest.mark.parametrize(
    ("size", "num_redundant", "is_restarted"),
    [
        pytest.param(2, 2, False, marks=pytest.mark.full),
        pytest.param(2, 2, True, marks=pytest.mark.full),
        pytest.param(4, 4, False, marks=pytest.mark.full),
    ],
)
async def test_a_skewed_router_is_balanced_while_ranks_of_the_cuda_backend_serve(
    skewed: Path, size: int, num_redundant: int, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens stay those of one worker, whichever experts are where. is_restarted: a rank goes when a layer was placed,
    and comes back to that placement."""
    for name in ("_FIRST_SLICE", "_LEAST_SLICE", "_MOST_SLICE"):
        monkeypatch.setattr(expert_balancer, name, 64 * 1024)
    monkeypatch.setattr(expert_balancer, "_LEAST_PICKS_AN_EXPERT", 4)
    chosen = texts("tiny-deepseek", 6)
    expected = await _said_by_one(skewed, chosen)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2, "ep_redundant_experts": num_redundant}
    async with (
        ranks_of(skewed, 1, size, ep_size=size, **sizes) as ranks,
        scheduler_on(ranks, expert_balance_threshold=0.9, expert_balance_interval_s=0.2) as daemon,
        serve_client(daemon.address) as client,
    ):
        planner, before, is_waiting = daemon.daemon.loop.planner, 1.0, is_restarted
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while planner.experts.num_placed < 3 or is_waiting:
            assert asyncio.get_running_loop().time() < deadline, planner.experts
            running = asyncio.ensure_future(_said(client, chosen))
            while not running.done():
                known = planner.counters.expert_load.balancedness
                if known and not planner.experts.num_placed:
                    before = min(before, known)
                if is_waiting and planner.experts.num_placed:
                    await ranks.restart(1)
                    is_waiting = False
                await asyncio.sleep(0.002)
            assert await running == expected
        placements = [_moves_of(ranks, rank).placement.tolist() for rank in range(size)]
        assert all(placement == placements[0] for placement in placements)
        assert planner.experts.longest_s < 1.0, "no step was given more than a second"
        planner.counters.expert_load.rows = []
        assert await _said(client, chosen) == expected
        after = planner.counters.expert_load.balancedness
        assert before < 0.6 and after > before + 0.1, (before, after)


def _moves_of(ranks: Ranks, rank: int) -> DeviceExpertMoves:
    executor = ranks.workers[rank].daemon.core.executor
    assert executor is not None and isinstance(executor.runner.expert_moves, DeviceExpertMoves)
    return executor.runner.expert_moves


@pytest.mark.parametrize(
    ("tp_size", "size"), [(2, 2), *(pytest.param(1, size, marks=pytest.mark.full) for size in (2, 4))]
)
async def test_steps_that_run_as_two_halves_recite(tp_size: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes with room for two rows and more; those with room for one, and all with chunks, run whole."""
    cut: list[int] = []

    def noted(forwards: Sequence[Stages], begin_turn: Callable[[int], None]) -> list[torch.Tensor]:
        halves = take_turns(forwards, begin_turn)
        cut.append(sum(len(half) for half in halves))
        return halves

    monkeypatch.setattr(decode_steps, "take_turns", noted)
    chosen = texts("tiny-deepseek", 6)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2, "two_batch_min_rows": 2}
    num_ranks = tp_size * size
    async with (
        ranks_of("tiny-deepseek", tp_size, size, ep_size=num_ranks, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        rooms = rooms_of(ranks)
        cut.clear()
        await recited_without_logprobs(client, chosen)
        assert cut and min(cut) >= 2 and len(cut) % num_ranks == 0, "all ranks cut the same steps"
        whole = len(cut)
        await recited_without_logprobs(client, chosen[:1])
        assert len(cut) == whole, "one row is not cut"
    assert any(not has_rows for of_rank in rooms for _, has_rows in of_rank)


@pytest.mark.parametrize("attention", ["torch", pytest.param("triton", marks=pytest.mark.full)])
async def test_halves_and_moving_experts_in_captured_steps(
    skewed: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with transports that graphs record, which are captured anew for each generation: all decodes are replayed."""
    monkeypatch.setattr(HostWire, "can_capture", True)
    monkeypatch.setattr(HostWire, "is_captured_anew", True)
    for name in ("_FIRST_SLICE", "_LEAST_SLICE", "_MOST_SLICE"):
        monkeypatch.setattr(expert_balancer, name, 1 << 20)
    monkeypatch.setattr(expert_balancer, "_LEAST_PICKS_AN_EXPERT", 4)
    chosen = texts("tiny-deepseek", 6)
    expected = await _said_by_one(skewed, chosen)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2, "ep_redundant_experts": 2, "two_batch_min_rows": 2}
    sizes |= {"cuda_graphs": True, "attention_backend": attention, "num_slots": 4}
    async with (
        ranks_of(skewed, 1, 2, ep_size=2, **sizes) as ranks,
        scheduler_on(ranks, expert_balance_threshold=0.9, expert_balance_interval_s=0.2) as daemon,
        serve_client(daemon.address) as client,
    ):
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while daemon.daemon.loop.planner.experts.num_placed < 2:
            assert asyncio.get_running_loop().time() < deadline
            assert await _said(client, chosen) == expected
        assert await _said(client, chosen) == expected
        for running in ranks.workers.values():
            executor = running.daemon.core.executor
            assert executor is not None and isinstance(executor.runner, DeviceRunner)
            assert isinstance(executor.runner.device, ReplayingDevice)
            assert {rows for rows, *_ in executor.runner.device.replayed} >= {1, 2, 4}


async def test_ranks_that_meet_again_serve_first_and_capture_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs when they meet for the first time; one at a time, between the same steps, when one has come back."""
    monkeypatch.setattr(HostWire, "can_capture", True)
    monkeypatch.setattr(HostWire, "is_captured_anew", True)
    monkeypatch.setattr(late_captures, "PADDED_STEPS", 3)
    chosen = texts("tiny-deepseek", 6)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2, "cuda_graphs": True, "num_slots": 4}
    async with (
        ranks_of("tiny-deepseek", 1, 2, ep_size=2, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        while daemon.daemon.loop.group_state is not GroupState.SERVING:
            await asyncio.sleep(0.01)
        assert [_graphs_of(ranks, rank) for rank in range(2)] == [[4, 2, 1]] * 2
        reciting = asyncio.ensure_future(recited_without_logprobs(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await go(ranks, 1)
        await reciting
        assert ranks.workers[0].daemon.core.ledger.group_generation > 1, "the survivor has joined again"
        await recited_without_logprobs(client, chosen[:1])
        one, other = (_graphs_of(ranks, rank) for rank in range(2))
        assert one == other and one[0] == 4 and 1 in one, (one, other)
        for rank in range(2):
            assert _runner_of(ranks, rank).forwards.late is not None
            assert {rows for rows, *_ in _device_of(ranks, rank).replayed} >= set(one)


def _graphs_of(ranks: Ranks, rank: int) -> list[int]:
    """Rows of the graphs that a rank has, in the order of their captures."""
    return list(_runner_of(ranks, rank).forwards.decodes.graphs.captured_sizes)


def _device_of(ranks: Ranks, rank: int) -> ReplayingDevice:
    device = _runner_of(ranks, rank).device
    assert isinstance(device, ReplayingDevice)
    return device


def _runner_of(ranks: Ranks, rank: int) -> DeviceRunner:
    executor = ranks.workers[rank].daemon.core.executor
    assert executor is not None and isinstance(executor.runner, DeviceRunner)
    return executor.runner


@pytest.mark.full
async def test_a_rank_that_goes_comes_back_to_its_experts() -> None:
    chosen = texts("tiny-deepseek", 6)
    sizes = {**WORKER, "num_pages": NUM_TOKENS // 2}
    async with (
        ranks_of("tiny-deepseek", 1, 2, ep_size=2, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        reciting = asyncio.ensure_future(recited_without_logprobs(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await go(ranks, 1)
        await reciting
        assert ranks.workers[0].daemon.core.ledger.group_generation > 1, "the survivor has joined again"


@pytest.mark.parametrize(
    ("mishap", "rank"),
    [
        (go, 1),
        pytest.param(go, 0, marks=pytest.mark.full),
        pytest.param(lose_a_write, 1, marks=pytest.mark.slow),
        pytest.param(seem_lost, 0, marks=pytest.mark.slow),
    ],
)
async def test_a_mishap_while_texts_are_recited(mishap: Callable[[Ranks, int], Awaitable[None]], rank: int) -> None:
    chosen = texts("tiny-llama", 6)
    async with (
        ranks_of("tiny-llama", 2, **WORKER) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        reciting = asyncio.ensure_future(recited_without_logprobs(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await mishap(ranks, rank)
        await reciting
        core = ranks.workers[1 - rank].daemon.core
        assert mishap is lose_a_write or core.ledger.group_generation > 1, "the survivor has joined again"
        await recited_without_logprobs(client, chosen[:2])
