"""Recitations with device memory for a tenth of the texts: KV goes to the host and comes back, and no token changes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from mesh.test_kills import FEW_STREAMS, kill_all
from support.cpu_ranks import NUM_TOKENS, ranks_of, recited, scheduler_on
from support.cpu_ranks import texts as ranks_texts
from support.running_daemon import Running, running
from support.serve_client import serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings

MODELS = Path(__file__).parents[2] / "compose" / "models"
GREEDY = common_pb2.SamplingParams(temperature=0.0)
TOKEN_BYTES = {"tiny-llama": 4096, "tiny-deepseek": 4096}
"""At least what the KV of a token takes."""


def texts(model: str, num: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and what follows them, cut to 160 tokens together; the prompts are long: they are what comes back."""
    entries = json.loads((MODELS / model / "recitations.json").read_text())
    chosen: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for entry in entries:
        ids = (entry["prompt_ids"] + entry["expected_ids"])[:160]
        if len(ids) > 100 and entry["expected_ids"]:
            # A text that two prompts lead to is told apart by its beginning.
            chosen.setdefault(tuple(ids[:40]), (ids[:-24], ids[-24:]))
    return list(chosen.values())[:num]


async def recite(model: str, policy: str, page_size: int, num_texts: int = 16) -> None:
    wanted = texts(model, num_texts)
    working_set = sum(len(prompt) + len(expected) for prompt, expected in wanted)
    num_pages = max(200, working_set // 10) // page_size
    worker_settings = WorkerSettings(
        backend=Backend.CPU,
        model=MODELS / model,
        page_size=page_size,
        num_pages=num_pages,
        num_slots=8,
        max_total_len=192,
        cpu_threads=1,
        host_kv_bytes=2 * working_set * TOKEN_BYTES[model],
    )
    async with running(WorkerDaemon, worker_settings) as worker:
        settings = SchedulerSettings(
            workers=(worker.address,),
            check_invariants=True,
            chunk_tokens=64,
            grant_ahead_tokens=page_size,
            decode_reserve_tokens=1,
            kv_write_policy=policy,
            kv_write_hits=1,
            kv_load_min_tokens=1,
        )
        async with running(SchedulerDaemon, settings) as scheduler, serve_client(scheduler.address) as client:
            planner = scheduler.daemon.loop.planner
            for round_number in range(3):
                before = planner.counters.prefilled_tokens
                # Each twice, one behind the other: the second finds the first on the device.
                for prompt, expected in [text for text in wanted for _ in range(2)][:: 1 if round_number == 0 else 2]:
                    handle = await client.submit(prompt, max_tokens=len(expected), sampling=GREEDY)
                    (output,) = await client.over(handle, timeout_s=60.0)
                    assert output.tokens == expected
                prefilled = planner.counters.prefilled_tokens - before
            state = planner.state
            assert state is not None and state.num_evicted > 0
            (host,) = state.hosts
            assert host.counters.loaded > 0 and host.counters.saved > 0
            # KV that comes from the host is not computed: little but the last page of each prompt is.
            assert prefilled <= len(wanted) * (page_size + 1), prefilled


@pytest.mark.parametrize(
    ("model", "policy", "page_size"),
    [("tiny-llama", "selective", 1), ("tiny-llama", "write_back", 16), ("tiny-deepseek", "write_through", 4)],
)
async def test_recitation_with_a_fraction_of_the_memory(model: str, policy: str, page_size: int) -> None:
    await recite(model, policy, page_size, num_texts=7)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
@pytest.mark.parametrize("policy", ["write_through", "selective", "write_back"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_recitation_by_every_policy_and_page_size(model: str, policy: str, page_size: int) -> None:
    await recite(model, policy, page_size)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp_size", "dp_size"), [("tiny-deepseek", 2, 1), pytest.param("tiny-llama", 2, 2, marks=pytest.mark.full)]
)
async def test_ranks_load_their_shares_together(model: str, tp_size: int, dp_size: int) -> None:
    """A rank that is lost takes its host memory along: the group is formed anew, without KV on any rank."""
    chosen = ranks_texts(model, 4)
    pages = NUM_TOKENS // 4 // dp_size
    async with (
        ranks_of(model, tp_size, dp_size, num_pages=pages, page_size=4, host_kv_bytes=8 << 20) as ranks,
        scheduler_on(ranks, decode_reserve_tokens=16, kv_load_min_tokens=1) as daemon,
        serve_client(daemon.address) as client,
    ):
        planner = daemon.daemon.loop.planner
        for number in range(4):
            if number == 2:
                await ranks.restart(tp_size * dp_size - 1)
            for text in chosen:
                await recited(client, [text])
            state = planner.state
            assert state is not None
            if number % 2:
                assert sum(host.counters.loaded for host in state.hosts) > 0, number


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp_size", "dp_size"),
    [("tiny-llama", 1, 1), pytest.param("tiny-deepseek", 2, 1, marks=pytest.mark.full)],
)
async def test_workers_that_start_again_find_their_host_memory(
    tmp_path: Path, model: str, tp_size: int, dp_size: int
) -> None:
    """One rank starts again, then all: the host has what was saved there, and little is computed."""
    chosen = ranks_texts(model, 6)
    segment = {"host_kv_bytes": 8 << 20, "host_kv_segment": tmp_path / "kv"}
    num_prompt = sum(len(text.prompt) for text in chosen)

    async def prefilled_once(scheduler: Running[SchedulerDaemon]) -> int:
        planner = scheduler.daemon.loop.planner
        before = planner.counters.prefilled_tokens
        async with serve_client(scheduler.address) as client:
            for text in chosen:
                await recited(client, [text])
        return planner.counters.prefilled_tokens - before

    # Nothing is computed because a busy machine takes long to load it.
    choices = {"decode_reserve_tokens": 16, "kv_load_min_tokens": 1, "kv_load_timeout_s": 100.0}
    settings = {"num_pages": NUM_TOKENS // 4, "page_size": 4, **segment}
    async with ranks_of(model, tp_size, dp_size, **settings) as ranks, scheduler_on(ranks, **choices) as scheduler:
        cold = await prefilled_once(scheduler)
        await ranks.restart(tp_size * dp_size - 1)
        warm = await prefilled_once(scheduler)
        state = scheduler.daemon.loop.planner.state
        assert state is not None and sum(host.counters.loaded for host in state.hosts) > 0
        assert warm < cold and warm < num_prompt // 2
    async with ranks_of(model, tp_size, dp_size, **settings) as ranks, scheduler_on(ranks, **choices) as scheduler:
        assert await prefilled_once(scheduler) < num_prompt // 2


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_no_stream_notices_kills_of_workers_whose_host_memory_stays(tmp_path: Path) -> None:
    """The next worker serves pages that the killed one has saved, amid saves and loads."""
    plan = [(service, signal.SIGKILL) for service in ("worker", "scheduler", "worker", "worker")]
    worker = {"num_pages": 2000, "host_kv_bytes": 64 << 20, "host_kv_segment": str(tmp_path / "kv")}
    kills = await kill_all("cpu", plan, worker=worker)
    assert len(kills) == len(plan)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("tiny-deepseek", marks=pytest.mark.full)])
async def test_no_stream_notices_kills_amid_saves_and_loads(model: str) -> None:
    """A new scheduler adopts what host memory holds; with a worker its host memory is gone."""
    plan = [(service, signal.SIGKILL) for service in ("scheduler", "worker")]
    worker = {"num_pages": 1300, "host_kv_bytes": 64 << 20}
    kills = await kill_all("cpu", plan, model=model, worker=worker, num_streams=FEW_STREAMS)
    assert len(kills) == len(plan)
