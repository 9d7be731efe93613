"""The prefix cache changes no output: scheduler and CPU worker over gRPC, with and without it, both tiny models.

Many requests share long prefixes of different lengths, memory holds a few of them, so that cached pages are evicted and
running requests retracted all the time. Tokens and logprobs must be the same to the bit, greedy and sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.family_folders import FAMILIES, family_folder, family_model
from support.running_daemon import running
from support.serve_client import Seen, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.kv_store.backend import KvStoreError, StoreFailure
from radixmesh.daemons.worker.plans.tiers.store_tier import StoreTier
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

MODELS = Path(__file__).parents[2] / "compose" / "models"
NUM_TOKENS = 240
"""KV memory. Three requests that share nothing fill it."""
MAX_TOKENS = 32


class Run(NamedTuple):
    outputs: list[Seen]
    state: scheduler_pb2.GetStateResponse
    num_fetched: int


class Wish(NamedTuple):
    prompt: list[int]
    sampling: common_pb2.SamplingParams


def wishes_of(model: str, num: int) -> list[Wish]:
    """Prompts that begin with one of three texts and leave it at various places; every second one is sampled."""
    recitations = json.loads((MODELS / model / "recitations.json").read_text())[:3]
    texts = [recitation["prompt_ids"] + recitation["expected_ids"] for recitation in recitations]
    wishes = []
    for i in range(num):
        text, other = texts[i % 3], texts[(i + 1) % 3]
        # n = 2 of some prompts, continuations of others.
        shared = (8, 24, 40, 40, 56)[i // 3 % 5]
        prompt = text[:shared] + (other[: i % 4] if i % 5 else [])
        if i % 2:
            sampling = common_pb2.SamplingParams(temperature=0.9, top_p=0.95, seed=100 + i, num_top_logprobs=3)
        else:
            sampling = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=2)
        wishes.append(Wish(prompt, sampling))
    return wishes


async def run(
    model: str | Path,
    wishes: list[Wish],
    page_size: int,
    *,
    num_tokens: int = NUM_TOKENS,
    kv_dtype: str = "auto",
    tiers: Mapping[str, object] | None = None,
    num_rounds: int = 1,
    until: Callable[[StoreTier], bool] | None = None,
    **choices: object,
) -> Run:
    """All wishes at once, as many times as there are rounds; the outputs of the last one. Memory for so many tokens.
    tiers: settings of the worker. until: of its store; the run does not end before."""
    worker_settings = WorkerSettings(
        backend=Backend.CPU,
        model=MODELS / model,
        page_size=page_size,
        num_pages=num_tokens // page_size,
        num_slots=8,
        max_total_len=192,
        cpu_threads=1,
        kv_dtype=kv_dtype,
        **(tiers or {}),  # type: ignore[arg-type]
    )
    async with running(WorkerDaemon, worker_settings) as worker:
        settings = SchedulerSettings(
            workers=(worker.address,),
            check_invariants=True,
            **{"chunk_tokens": 24, "grant_ahead_tokens": 1, "decode_reserve_tokens": 1, **choices},  # type: ignore[arg-type]
        )
        async with running(SchedulerDaemon, settings) as scheduler, serve_client(scheduler.address) as client:
            for _ in range(num_rounds):
                handles = [
                    await client.submit(wish.prompt, max_tokens=MAX_TOKENS, sampling=wish.sampling) for wish in wishes
                ]
                outputs = await client.over(*handles, timeout_s=240.0)
            if tiers is not None:
                state = scheduler.daemon.loop.planner.state
                assert state is not None and state.hosts[0].counters.loaded > 0
                assert worker.daemon.core.executor is not None and worker.daemon.core.executor.host is not None
                if until is not None:
                    store = worker.daemon.core.executor.host.store
                    assert store is not None
                    async with asyncio.timeout(60):
                        while not until(store):
                            await asyncio.sleep(0.01)
            async with open_channel(scheduler.address) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                response = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=5)
                return Run(outputs, response, scheduler.daemon.loop.planner.fetches.num_fetched)


def compare(run: Run, plain: Run) -> None:
    for number, (output, expected) in enumerate(zip(run.outputs, plain.outputs, strict=True)):
        assert output.tokens == expected.tokens, number
        assert len(output.logprobs) == len(output.tokens), number
        assert output.logprobs == expected.logprobs, number
        assert output.finished is not None and expected.finished is not None
        assert output.finished.reason == expected.finished.reason, number


async def undisturbed(model: str | Path, wishes: list[Wish], **settings: str) -> Run:
    """No cache, and memory for all."""
    plain = await run(model, wishes, 1, num_tokens=4096, cache="none", **settings)
    assert not plain.state.num_retractions and not plain.state.prompt_cached_tokens
    assert all(seen.finished is not None and seen.finished.error.reason == 0 for seen in plain.outputs)
    assert sum(len(seen.tokens) for seen in plain.outputs) > 10 * len(wishes)
    return plain


def check_pressure(state: scheduler_pb2.GetStateResponse, *, is_cached: bool) -> None:
    """A run without pressure proves nothing."""
    assert state.num_retractions > 0
    assert not state.num_page_violations
    if is_cached:
        assert state.evicted_pages > 0 and state.prompt_cached_tokens > 0
    else:
        assert not state.prompt_cached_tokens


def tiers_of(policy: str, num_host_tokens: int = 4000, **worker: object) -> dict[str, Any]:
    """Settings of a run with memory of the host for so many tokens. worker: more of the worker's."""
    of_worker = {"host_kv_bytes": num_host_tokens * 4096, **worker}
    return {"tiers": of_worker, "kv_write_policy": policy, "kv_write_hits": 1, "kv_load_min_tokens": 1}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "policy"),
    [
        ("tiny-llama", "write_through"),
        ("tiny-llama", "selective"),
        ("tiny-llama", "write_back"),
        ("tiny-deepseek", "write_back"),
        ("gemma2", "selective"),
        ("phi3", "write_through"),
    ],
)
async def test_outputs_are_the_same_through_all_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, policy: str
) -> None:
    """A host with room for all; one for a third, with a disk below it; and a disk that is full every second time.

    gemma2 and phi3: random weights and sliding windows shorter than the prompts.
    """
    folder: str | Path = model
    if model in FAMILIES:
        folder = family_folder(family_model(model), tmp_path)
    is_random = isinstance(folder, Path)
    wishes = wishes_of("tiny-llama" if is_random else model, 12)
    if is_random:
        wishes = [Wish([id % 90 for id in wish.prompt], wish.sampling) for wish in wishes]
    plain = await undisturbed(folder, wishes)
    compare(await run(folder, wishes, 4, num_rounds=2, **tiers_of(policy)), plain)
    pytest.importorskip("xxhash")
    disk_backend = pytest.importorskip("radixmesh.daemons.worker.kv_store.disk_backend")
    below = {"num_rounds": 2, "kv_fetch_min_tokens": 1}
    tiers = tiers_of(policy, 160, kv_store=f"disk://{tmp_path}/kv?budget=64MiB")
    compare(await run(folder, wishes, 4, until=lambda store: store.num_stored >= 20, **tiers, **below), plain)
    again = await run(folder, wishes, 4, **tiers, **below)
    compare(again, plain)
    assert again.num_fetched > 0
    write, num_calls = disk_backend.DiskBackend.write, 0

    def full(self: object, pages: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            raise KvStoreError(StoreFailure.FULL, "no space is left on the device")
        return int(write(self, pages))

    monkeypatch.setattr(disk_backend.DiskBackend, "write", full)
    tiers = tiers_of(policy, 160, kv_store=f"disk://{tmp_path}/full?budget=64MiB")
    compare(await run(folder, wishes, 4, until=lambda _: num_calls > 0, **tiers, **below), plain)


async def test_outputs_over_pages_of_fp8_are_the_same_with_and_without_the_cache() -> None:
    """All who share a page read what was quantised once; without a cache each computes and quantises its own."""
    wishes = wishes_of("tiny-llama", 12)
    plain = await undisturbed("tiny-llama", wishes, kv_dtype="fp8")
    cached = await run("tiny-llama", wishes, 4, cache="radix", kv_dtype="fp8")
    compare(cached, plain)
    check_pressure(cached.state, is_cached=True)
    tiered = await run("tiny-llama", wishes, 4, kv_dtype="fp8", num_rounds=2, **tiers_of("write_back"))
    compare(tiered, plain)
    full = await undisturbed("tiny-llama", wishes)
    assert [seen.logprobs for seen in full.outputs] != [seen.logprobs for seen in plain.outputs], "KV was quantised"


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
async def test_outputs_are_the_same_with_and_without_the_cache(model: str) -> None:
    wishes = wishes_of(model, 18)
    plain = await undisturbed(model, wishes)
    cached = await run(model, wishes, 4, cache="radix")
    check_pressure(cached.state, is_cached=True)
    compare(cached, plain)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-deepseek"])
async def test_outputs_are_the_same_by_every_cache_page_size_depth_and_order(model: str) -> None:
    wishes = wishes_of(model, 45)
    plain = await undisturbed(model, wishes)
    for page_size in (1, 4, 16):
        for cache in ("none", "trie", "radix"):
            run_of = await run(model, wishes, page_size, cache=cache)
            check_pressure(run_of.state, is_cached=cache != "none")
            compare(run_of, plain)
    for depth in ("0", "2", "auto"):
        for queue_policy in ("lpm", "dfs-weight", "lcfs"):
            run_of = await run(model, wishes, 1, cache="radix", pipeline_depth=depth, queue_policy=queue_policy)
            check_pressure(run_of.state, is_cached=True)
            compare(run_of, plain)
    for eviction in ("lfu", "fifo", "priority"):
        run_of = await run(model, wishes, 4, cache="radix", eviction=eviction, chunk_tokens=7)
        check_pressure(run_of.state, is_cached=True)
        compare(run_of, plain)
