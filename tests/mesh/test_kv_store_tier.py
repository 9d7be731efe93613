"""Recitations over a store below host memory: restarts and replicas go on with what was computed before, to the bit."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("xxhash")
from mesh.test_kills import kill_all
from mesh.test_kv_tiers import GREEDY, MODELS, TOKEN_BYTES, texts
from support.cpu_ranks import ranks_of, recited, scheduler_on
from support.cpu_ranks import texts as ranks_texts
from support.kv_stores import SHARED, redis_server, shared_store
from support.running_daemon import Running, running
from support.serve_client import ServeClient, serve_client

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.plans.tiers.store_tier import StoreTier


class Replica:
    """A worker and its scheduler."""

    def __init__(
        self,
        worker: Running[WorkerDaemon],
        worker_settings: WorkerSettings,
        workers: AsyncExitStack,
        scheduler: Running[SchedulerDaemon],
        client: ServeClient,
    ) -> None:
        self.worker, self.scheduler, self.client = worker, scheduler, client
        self._worker_settings, self._workers = worker_settings, workers

    @property
    def planner(self) -> Planner:
        return self.scheduler.daemon.loop.planner

    @property
    def tier(self) -> StoreTier:
        executor = self.worker.daemon.core.executor
        assert executor is not None and executor.host is not None and executor.host.store is not None
        return executor.host.store

    async def recite(self, wanted: list[tuple[list[int], list[int]]]) -> int:
        """Tokens of prompts that were computed, not found."""
        before = self.planner.counters.prefilled_tokens
        for prompt, expected in wanted:
            handle = await self.client.submit(prompt, max_tokens=len(expected), sampling=GREEDY)
            (output,) = await self.client.over(handle, timeout_s=60.0)
            assert output.tokens == expected
        return self.planner.counters.prefilled_tokens - before

    async def restart_worker(self) -> None:
        """Another worker at the same address, with the same store and nothing in memory."""
        former = self.planner.state
        await self._workers.aclose()
        again = running(WorkerDaemon, self._worker_settings, address=self.worker.address)
        self.worker = await self._workers.enter_async_context(again)
        async with asyncio.timeout(60):
            while self.planner.state is None or self.planner.state is former:
                await asyncio.sleep(0.01)

    async def stored(self, texts: list[tuple[list[int], list[int]]]) -> None:
        """Waits until the store has all whole pages of the prompts that a later request may find."""
        keys = [key for prompt, _ in texts for key in self.tier.keys_of("", as_ints(prompt[:-1]))]
        async with asyncio.timeout(60):
            while not all(await asyncio.wrap_future(self.tier.store.contains(keys))):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def replica(model: str, page_size: int, store: str, *, host_tokens: int = 4000) -> AsyncIterator[Replica]:
    worker_settings = WorkerSettings(
        backend=Backend.CPU,
        model=MODELS / model,
        page_size=page_size,
        num_pages=400 // page_size,
        num_slots=8,
        max_total_len=192,
        cpu_threads=1,
        host_kv_bytes=host_tokens * TOKEN_BYTES[model],
        kv_store=store,
    )
    async with AsyncExitStack() as workers:
        worker = await workers.enter_async_context(running(WorkerDaemon, worker_settings))
        settings = SchedulerSettings(
            workers=(worker.address,), check_invariants=True, chunk_tokens=64, grant_ahead_tokens=page_size,
            decode_reserve_tokens=1, kv_fetch_min_tokens=16, kv_load_timeout_s=60.0,
        )  # fmt: skip
        async with running(SchedulerDaemon, settings) as scheduler, serve_client(scheduler.address) as client:
            yield Replica(worker, worker_settings, workers, scheduler, client)


@pytest.mark.parametrize(
    ("model", "page_size"),
    [pytest.param("tiny-llama", 1, marks=pytest.mark.full), ("tiny-llama", 16), ("tiny-deepseek", 4)],
)
async def test_a_worker_finds_its_disk_after_a_restart(tmp_path: Path, model: str, page_size: int) -> None:
    await _finds_after_a_restart(f"disk://{tmp_path}?budget=256MiB", model, page_size)


# Found as a disk is, and as by a second replica.
@pytest.mark.full
@pytest.mark.parametrize("medium", ["nixl-file", "mooncake"])
async def test_a_worker_finds_a_shared_store_after_a_restart(tmp_path: Path, medium: str) -> None:
    with shared_store(medium, tmp_path) as url:
        await _finds_after_a_restart(url, "tiny-llama", 4)


async def _finds_after_a_restart(store: str, model: str, page_size: int) -> None:
    wanted = texts(model, 5)
    num_pages = sum((len(prompt) - 1) // page_size for prompt, _ in wanted)
    async with replica(model, page_size, store) as first:
        cold = await first.recite(wanted)
        await first.stored(wanted)
    async with replica(model, page_size, store) as second:
        warm = await second.recite(wanted)
        assert second.planner.fetches.num_fetched >= num_pages * 2 // 3
        assert warm <= len(wanted) * (page_size + 1) < cold
        assert second.tier.store.counters().corrupt == 0
        value = second.worker.runtime.metrics.registry.get_sample_value
        assert value("radixmesh_kv_store_pages_total", {"outcome": "hit"}) == second.planner.fetches.num_fetched
        assert value("radixmesh_kv_store_bytes_total", {"kind": "read"}) > 0


@pytest.mark.parametrize(
    "medium",
    # Of objects the stand-in of their server is what takes its time; files are kept as a disk keeps them.
    [pytest.param(name, marks=[pytest.mark.full] if name.startswith("nixl") else []) for name in SHARED],
)
async def test_a_second_replica_finds_what_the_first_computed(tmp_path: Path, medium: str) -> None:
    """Both at once over one store."""
    wanted = texts("tiny-llama", 5)
    num_pages = sum((len(prompt) - 1) // 4 for prompt, _ in wanted)
    with shared_store(medium, tmp_path) as url:
        async with replica("tiny-llama", 4, url) as first, replica("tiny-llama", 4, url) as second:
            cold = await first.recite(wanted)
            await first.stored(wanted)
            warm = await second.recite(wanted)
            assert warm <= len(wanted) * 5 < cold
            hits = second.planner.fetches.num_fetched / num_pages
            assert hits > 0.9
            # Both find pages of each other's later texts.
            more = texts("tiny-llama", 8)[5:]
            await second.recite(more)
            await second.stored(more)
            assert await first.recite(more) <= len(more) * 5


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp_size", "dp_size"),
    [("tiny-llama", 1, 2), pytest.param("tiny-deepseek", 2, 2, marks=pytest.mark.full)],
)
async def test_ranks_find_what_other_ranks_have_computed(
    tmp_path: Path, model: str, tp_size: int, dp_size: int
) -> None:
    """Data-parallel ranks over one Redis server, then another group of them: what any has computed all find."""
    chosen = ranks_texts(model, 6)
    num_pages = sum((len(text.prompt) - 1) // 4 for text in chosen)
    num_prompt = sum(len(text.prompt) for text in chosen)
    with redis_server(tmp_path) as url:
        settings = {"num_pages": 200, "page_size": 4, "host_kv_bytes": 8 << 20, "kv_store": url}
        async with (
            ranks_of(model, tp_size, dp_size, **settings) as ranks,
            scheduler_on(ranks, kv_fetch_min_tokens=4, kv_load_min_tokens=1, kv_load_timeout_s=100.0) as daemon,
            serve_client(daemon.address) as client,
        ):
            await recited(client, chosen)
            tiers = [worker.daemon.core.executor.host.store for _, worker in sorted(ranks.workers.items())]  # type: ignore[union-attr]
            async with asyncio.timeout(60):
                # Texts may begin alike. Latents are the same on all ranks of a group: one of them stores.
                is_mla = model == "tiny-deepseek"
                while sum(tier.num_stored for tier in tiers) < num_pages * 2 // 3 * (1 if is_mla else tp_size):  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
            if is_mla:
                assert [tier.num_stored > 0 for tier in tiers] == [True, False] * dp_size  # type: ignore[union-attr]
        async with (
            ranks_of(model, tp_size, dp_size, **settings) as ranks,
            scheduler_on(ranks, kv_fetch_min_tokens=4, kv_load_min_tokens=1, kv_load_timeout_s=100.0) as daemon,
            serve_client(daemon.address) as client,
        ):
            planner = daemon.daemon.loop.planner
            # Chunks of 7 tokens: what is computed twice at once counts here too.
            await recited(client, chosen)
            assert planner.fetches.num_fetched >= num_pages // 2
            assert planner.counters.prefilled_tokens < num_prompt
            state = planner.state
            assert state is not None and all(host.counters.fetched for host in state.hosts)
            value = daemon.runtime.metrics.registry.get_sample_value
            async with asyncio.timeout(20):
                while value("radixmesh_kv_fetch_tokens_total") != planner.fetches.num_tokens:
                    await asyncio.sleep(0.05)
            assert value("radixmesh_kv_fetches_total", {"outcome": "fetched"}) >= 2
            moved = ranks.workers[0].runtime.metrics.registry.get_sample_value
            assert moved("radixmesh_host_kv_bytes_total", {"move": "loaded"}) > 0


async def test_a_host_pool_that_is_too_small_is_served_from_the_store(tmp_path: Path) -> None:
    """Host memory for two texts: the others are evicted there as well, and come from the disk."""
    wanted = texts("tiny-llama", 6)
    async with replica("tiny-llama", 4, f"disk://{tmp_path}?budget=256MiB", host_tokens=400) as one:
        await one.recite(wanted)
        for _ in range(2):
            prefilled = await one.recite(wanted)
        state = one.planner.state
        assert state is not None and state.hosts[0].counters.evicted > 0
        assert one.planner.fetches.num_fetched > 50 and prefilled <= len(wanted) * 40


async def test_damage_and_loss_of_the_store_cost_no_answer(tmp_path: Path) -> None:
    wanted = texts("tiny-llama", 4)
    store = f"disk://{tmp_path}?budget=256MiB"
    async with replica("tiny-llama", 4, store) as first:
        await first.recite(wanted)
        await first.stored(wanted)
    (segment,) = (tmp_path / "rank-0").glob("*.seg")
    data = bytearray(segment.read_bytes())
    # Payloads of every page, but no head.
    for at in range(2000, len(data) - 12_000, 9_001):
        data[at] ^= 0xFF
    segment.write_bytes(data)
    async with replica("tiny-llama", 4, store) as second:
        await second.recite(wanted)
        assert second.tier.store.counters().corrupt > 0
    with redis_server(tmp_path) as url:
        async with replica("tiny-llama", 4, url) as third:
            await third.recite(wanted[:2])
            await third.stored(wanted[:2])
            third.tier.store.backend._client.shutdown(nosave=True)  # type: ignore[attr-defined]
            await third.recite(wanted)
            await third.recite(wanted)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["disk", "nixl-file"])
async def test_no_stream_notices_kills_amid_saves_to_the_disk(tmp_path: Path, scheme: str) -> None:
    if scheme == "nixl-file":
        pytest.importorskip("nixl_cu13", reason="nixl-cu13 is not installed: radixmesh[kv-nixl]")
    plan = [(service, signal.SIGKILL) for service in ("worker", "scheduler", "worker", "worker")]
    worker = {"num_pages": 2000, "host_kv_bytes": 64 << 20, "kv_store": f"{scheme}://{tmp_path}?budget=64MiB"}
    kills = await kill_all("cpu", plan, model="tiny-llama", worker=worker)
    assert len(kills) == len(plan)
