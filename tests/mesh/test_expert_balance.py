"""Experts of a skewed router move between ranks on CPUs while they serve: tokens and logprobs stay to the bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.cpu_ranks import NUM_TOKENS, TIMEOUT_S, Ranks, Text, ranks_of, scheduler_on, skewed_deepseek, texts
from support.serve_client import Seen, ServeClient, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.scheduler.planning.experts import expert_balancer
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.worker.experts.expert_moves import ExpertMoves

NUM_TEXTS = 6
NUM_OUTPUT = 60
_SAMPLING = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=2)


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_deepseek(tmp_path_factory.mktemp("skewed"))


def planner_of(daemon: object) -> Planner:
    planner = daemon.daemon.loop.planner  # type: ignore[attr-defined]
    assert isinstance(planner, Planner)
    return planner


def moves_of(ranks: Ranks) -> list[ExpertMoves]:
    found = []
    for running in ranks.workers.values():
        executor = running.daemon.core.executor
        assert executor is not None and executor.runner.expert_moves is not None
        found.append(executor.runner.expert_moves)
    return found


async def said(client: ServeClient, chosen: list[Text], max_tokens: int = NUM_OUTPUT) -> list[Seen]:
    handles = [await client.submit(text.prompt, max_tokens=max_tokens, sampling=_SAMPLING) for text in chosen]
    return await client.over(*handles, timeout_s=TIMEOUT_S)


async def of_one_worker(folder: Path, chosen: list[Text]) -> list[Seen]:
    async with (
        ranks_of(folder, 1, num_pages=2 * NUM_TOKENS) as one,
        scheduler_on(one) as daemon,
        serve_client(daemon.address) as client,
    ):
        return await said(client, chosen)


def check_same(got: list[Seen], expected: list[Seen]) -> None:
    assert [seen.tokens for seen in got] == [seen.tokens for seen in expected]
    assert [seen.logprobs for seen in got] == [seen.logprobs for seen in expected]


async def check_balancing(
    folder: Path, size: int, num_redundant: int, restarted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Balancedness before and after. restarted: ranks that die, each in the middle of a change."""
    # An expert comes in many slices, so that a rank can die between two of them.
    for name in ("_FIRST_SLICE", "_LEAST_SLICE", "_MOST_SLICE"):
        monkeypatch.setattr(expert_balancer, name, 16 * 1024)
    chosen = texts("tiny-deepseek", NUM_TEXTS)
    expected = await of_one_worker(folder, chosen)
    sizes = {"num_pages": NUM_TOKENS // 2, "page_size": 4, "ep_redundant_experts": num_redundant}
    async with (
        ranks_of(folder, 1, size, ep_size=size, **sizes) as ranks,
        scheduler_on(ranks, expert_balance_threshold=0.9, expert_balance_interval_s=0.2) as daemon,
        serve_client(daemon.address) as client,
    ):
        planner, waiting = planner_of(daemon), list(restarted)
        first = planner.counters.expert_load
        before, deadline = 1.0, asyncio.get_running_loop().time() + TIMEOUT_S
        while planner.experts.num_placed < 3 or waiting or planner.experts.change is not None:
            assert asyncio.get_running_loop().time() < deadline, planner.experts
            running = asyncio.ensure_future(said(client, chosen))
            while not running.done():
                if 0 < first.balancedness < before and not planner.experts.num_placed:
                    before = first.balancedness
                # One layer has been placed: that is not lost with a rank that has it in memory alone.
                is_placed = min(moves.version for moves in moves_of(ranks)) > 0
                if waiting and is_placed and planner.experts.change is not None and planner.state is not None:
                    await ranks.restart(waiting.pop(0))
                await asyncio.sleep(0.002)
            check_same(await running, expected)
        placements = [moves.placement.tolist() for moves in moves_of(ranks)]
        assert all(placement == placements[0] for placement in placements)
        versions = {moves.version for moves in moves_of(ranks)}
        assert len(versions) == 1 and versions.pop() >= 3
        assert planner.experts.longest_s < 1.0, "no step was given more than a second"
        # The weighted past fades: what the ranks do now.
        first.rows = []
        check_same(await said(client, chosen), expected)
        return before, first.balancedness


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_skewed_router_is_balanced_while_serving(skewed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = await check_balancing(skewed, 2, 0, (), monkeypatch)
    print({"ranks": 2, "before": round(before, 3), "after": round(after, 3)})
    assert before < 0.55 and after > 0.7


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rank_that_dies_amid_a_change_comes_back_to_the_last_placement(
    skewed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1, and then rank 0, which holds the group's store."""
    before, after = await check_balancing(skewed, 2, 2, (1, 0), monkeypatch)
    assert before < 0.55 and after > 0.7


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_redundant", [0, 4])
@pytest.mark.parametrize("restarted", [(), (3, 0)])
async def test_four_ranks(
    skewed: Path, num_redundant: int, restarted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = await check_balancing(skewed, 4, num_redundant, restarted, monkeypatch)
    print({"ranks": 4, "redundant": num_redundant, "before": round(before, 3), "after": round(after, 3)})
    assert before < 0.55 and after > 0.6


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_scheduler_that_follows_goes_on_from_the_placement_that_the_ranks_have(
    skewed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_balancer, "_LEAST_PICKS_AN_EXPERT", 4)
    chosen = texts("tiny-deepseek", NUM_TEXTS)
    expected = await of_one_worker(skewed, chosen)
    async with ranks_of(skewed, 1, 2, ep_size=2, num_pages=NUM_TOKENS // 2, page_size=4) as ranks:
        async with (
            scheduler_on(ranks, expert_balance_threshold=0.9, expert_balance_interval_s=0.1) as daemon,
            serve_client(daemon.address) as client,
        ):
            while planner_of(daemon).experts.num_placed < 3:
                check_same(await said(client, chosen), expected)
        placed = [moves.placement for moves in moves_of(ranks)]
        async with (
            scheduler_on(ranks, "t", expert_balance_threshold=0.0) as daemon,
            serve_client(daemon.address) as client,
        ):
            check_same(await said(client, chosen), expected)
            experts = planner_of(daemon).experts.experts
            assert experts is not None and experts.version == moves_of(ranks)[0].version >= 3
            assert (experts.experts_LS == placed[0]).all()
