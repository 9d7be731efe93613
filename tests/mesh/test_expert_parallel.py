"""Experts placed over the ranks of a model on CPUs, attention data-parallel: the tokens of a single worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cpu_ranks import NUM_TOKENS, TIMEOUT_S, Ranks, Text, ranks_of, recited, scheduler_on, texts
from support.model_folders import random_model, save_model
from support.serve_client import serve_client

from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cpu.two_batches import TwoBatches


def watch_modes(ranks: Ranks) -> list[set[tuple[DispatchMode, bool]]]:
    """Modes of the steps of each rank, and whether it had rows in them; grows as they run."""
    seen: list[set[tuple[DispatchMode, bool]]] = []
    for running in ranks.workers.values():
        executor = running.daemon.core.executor
        assert executor is not None and isinstance(executor.runner, CpuRunner)
        runner, modes = executor.runner, set[tuple[DispatchMode, bool]]()
        seen.append(modes)

        def forward(segments, runner=runner, modes=modes, compute=runner.forward):  # type: ignore[no-untyped-def]
            assert isinstance(runner.experts, AllToAllDispatch)
            modes.add((runner.experts.mode, bool(segments)))
            return compute(segments)

        runner.forward = forward  # type: ignore[method-assign]
    return seen


async def check_recitations(
    model: str | Path, chosen: list[Text], tp_size: int, dp_size: int, ep_size: int, **scheduling: object
) -> list[set[tuple[DispatchMode, bool]]]:
    """In chunks, with retraction, and again from the cache; then one at a time, while the other ranks have no rows."""
    page_size = 4
    # Every rank holds the longest text.
    sizes = {"num_pages": max(NUM_TOKENS // dp_size, NUM_TOKENS // 2) // page_size, "page_size": page_size}
    async with ranks_of(model, tp_size, dp_size, ep_size=ep_size, **sizes) as ranks:
        modes = watch_modes(ranks)
        async with scheduler_on(ranks, **scheduling) as daemon, serve_client(daemon.address) as client:
            cold = await recited(client, chosen)
            again = await recited(client, chosen)
            assert [seen.logprobs for seen in again] == [seen.logprobs for seen in cold]
            for _ in range(2):
                await recited(client, chosen[:1])
            counters = daemon.daemon.loop.planner.counters
            loads = counters.expert_load.rows
            assert len(loads) == tp_size * dp_size and min(loads) > 0 and 0.3 < counters.expert_load.balancedness <= 1
            assert counters.cached_tokens and (counters.num_retracted or dp_size > 2), repr(counters)
        cores = [running.daemon.core for running in ranks.workers.values()]
        assert {core.ledger.group_generation for core in cores} == {1}
        return modes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tp_size", "dp_size", "ep_size"),
    [
        (1, 2, 2),
        pytest.param(1, 4, 4, marks=pytest.mark.full),
        pytest.param(1, 4, 2, marks=pytest.mark.full),
        pytest.param(2, 1, 2, marks=pytest.mark.full),
        pytest.param(2, 2, 4, marks=pytest.mark.full),
        pytest.param(4, 1, 4, marks=pytest.mark.full),
    ],
)
async def test_tiny_deepseek_recites(tp_size: int, dp_size: int, ep_size: int) -> None:
    """Decodes go at low latency, prefills do not; ranks without rows take part in both."""
    modes = await check_recitations("tiny-deepseek", texts("tiny-deepseek", 6), tp_size, dp_size, ep_size)
    for of_rank in modes:
        assert {mode for mode, _ in of_rank} == {DispatchMode.NORMAL, DispatchMode.LOW_LATENCY}
    assert dp_size == 1 or any(not has_rows for of_rank in modes for _, has_rows in of_rank)


async def single_worker_texts(folder: Path) -> list[Text]:
    """Some prompts, with the tokens of one worker."""
    prompts = [list(range(3 + i, 20 + 2 * i)) for i in range(6)]
    async with (
        ranks_of(folder, 1, num_pages=NUM_TOKENS) as one,
        scheduler_on(one) as daemon,
        serve_client(daemon.address) as client,
    ):
        handles = [await client.submit(prompt, max_tokens=30) for prompt in prompts]
        seen = await client.over(*handles, timeout_s=TIMEOUT_S)
    return [Text(prompt, output.tokens) for prompt, output in zip(prompts, seen, strict=True)]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dispatch", ["normal", "low-latency"])
@pytest.mark.parametrize("size", [2, 4])
async def test_mixtral_says_what_one_worker_says(size: int, dispatch: str, tmp_path: Path) -> None:
    """In the mode that the operator chose, prefills too."""
    folder = save_model(random_model("mixtral"), tmp_path)
    chosen = await single_worker_texts(folder)
    modes = await check_recitations(folder, chosen, 1, size, size, expert_dispatch=dispatch)
    expected = DispatchMode.NORMAL if dispatch == "normal" else DispatchMode.LOW_LATENCY
    assert all({mode for mode, _ in of_rank} == {expected} for of_rank in modes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dp_size", [2, pytest.param(4, marks=pytest.mark.full)])
async def test_two_half_batches_give_the_tokens_of_one(dp_size: int) -> None:
    """Steps of two rows a rank and more are cut in two; those of fewer are not. All outputs are the expected ones."""
    cut: list[bool] = []
    run = TwoBatches.run

    def watched(self: TwoBatches, *works: Callable[[], object]) -> object:
        cut.append(True)
        return run(self, *works)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoBatches, "run", watched)
        chosen = texts("tiny-deepseek", 6)
        sizes = {"num_pages": NUM_TOKENS // 2, "page_size": 4, "two_batch_min_rows": 2}
        async with (
            ranks_of("tiny-deepseek", 1, dp_size, ep_size=dp_size, **sizes) as ranks,
            scheduler_on(ranks) as daemon,
            serve_client(daemon.address) as client,
        ):
            modes = watch_modes(ranks)
            cold = await recited(client, chosen)
            num_cut = len(cut)
            again = await recited(client, chosen)
            assert [seen.logprobs for seen in again] == [seen.logprobs for seen in cold]
            assert num_cut > 20 and num_cut % dp_size == 0, "all ranks cut the same steps"
            assert {mode for mode, _ in modes[0]} == {DispatchMode.NORMAL, DispatchMode.LOW_LATENCY}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rank_that_goes_ends_both_halves() -> None:
    """The one that stays leaves both, joins a new group, and all outputs are the expected ones."""
    chosen = texts("tiny-deepseek", 6)
    sizes = {"num_pages": NUM_TOKENS // 2, "page_size": 4, "two_batch_min_rows": 1}
    async with (
        ranks_of("tiny-deepseek", 1, 2, ep_size=2, **sizes) as ranks,
        scheduler_on(ranks) as daemon,
        serve_client(daemon.address) as client,
    ):
        reciting = asyncio.ensure_future(recited(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        await ranks.restart(1)
        await reciting
        assert ranks.workers[0].daemon.core.ledger.group_generation > 1
        await recited(client, chosen)
