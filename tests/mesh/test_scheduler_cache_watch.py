"""WatchCache, loads and limits over real gRPC, on a simulated worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.cache_oracle import TreeMirror
from support.running_daemon import running
from support.serve_client import serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

PROMPT = list(range(3, 60))


@asynccontextmanager
async def mesh(
    num_pages: int = 2048, num_slots: int = 16, prefill_token_us: float = 9.0, **changes: object
) -> AsyncIterator[str]:
    worker = WorkerSettings(
        backend=Backend.SIMULATED,
        simulated_vocab_size=1000,
        num_pages=num_pages,
        num_slots=num_slots,
        max_total_len=1024,
        simulated_base_us=1000.0,
        simulated_prefill_token_us=prefill_token_us,
    )
    async with running(WorkerDaemon, worker) as at:
        settings = SchedulerSettings(workers=(at.address,), check_invariants=True, **changes)  # type: ignore[arg-type]
        async with running(SchedulerDaemon, settings) as daemon:
            yield daemon.address


class CacheWatcher:
    """Reads in the background and mirrors what it is told."""

    def __init__(self, stub: scheduler_pb2_grpc.SchedulerServiceStub, after_revision: int | None = None) -> None:
        self.mirror = TreeMirror(1)
        self.revision = 0
        self.is_complete = False
        self.error: common_pb2.ErrorReason | None = None
        request = scheduler_pb2.WatchCacheRequest(after_revision=after_revision)
        self._call = stub.WatchCache(request)
        self._task = asyncio.ensure_future(self._read())

    async def until_at(self, revision: int) -> None:
        async with asyncio.timeout(60):
            while self.revision < revision or not self.is_complete:
                assert not self._task.done(), self.error
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        mirror = self.mirror
        try:
            async for message in self._call:
                assert message.revision >= self.revision
                self.revision = message.revision
                self.is_complete = not message.is_snapshot
                if message.is_reset:
                    mirror.on_reset()
                for split in message.splits:
                    mirror.on_split(split.node, split.upper, split.num_upper)
                for insert in message.inserts:
                    name = Namespace(insert.cache_namespace, insert.weights_version)
                    ids = unpack_ints(insert.ids, "ids")
                    mirror.on_insert(insert.node, insert.parent or -1, ids, name)
                for trim in message.trims:
                    mirror.on_evict(trim.node, trim.num_left)
                for node in unpack_ints(message.evicted_nodes, "evicted_nodes").tolist():
                    mirror.on_evict(node, 0)
        except grpc.aio.AioRpcError as error:
            self.error = mesh_error_from_rpc(error).reason


async def idle(stub: scheduler_pb2_grpc.SchedulerServiceStub) -> scheduler_pb2.GetStateResponse:
    for _ in range(200):
        state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)
        if not state.load.num_running and not state.load.num_waiting:
            return state
        await asyncio.sleep(0.05)
    raise AssertionError(f"not idle: {state}")


async def test_watchers_see_what_is_cached_and_resume_where_they_were() -> None:
    async with mesh(num_pages=600) as address, serve_client(address) as client, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await client.over(await client.submit(PROMPT, max_tokens=20))
        early = CacheWatcher(stub)
        for i in range(20):
            await client.over(await client.submit([*PROMPT[: 20 + i], 900 + i], max_tokens=30))
        state = await idle(stub)
        late = CacheWatcher(stub)
        for watcher in (early, late):
            await watcher.until_at(state.cache_revision)
            assert len(watcher.mirror.prefixes()) == state.load.cached_pages > 300
        assert state.evicted_pages > 0 and early.mirror.prefixes() == late.mirror.prefixes()
        await late.stop()
        resumed = CacheWatcher(stub, after_revision=late.revision)
        resumed.mirror = late.mirror
        await stub.FlushCache(scheduler_pb2.FlushCacheRequest())
        await client.over(await client.submit(PROMPT, max_tokens=5))
        state = await idle(stub)
        for watcher in (early, resumed):
            await watcher.until_at(state.cache_revision)
            assert len(watcher.mirror.prefixes()) == state.load.cached_pages < 100
        lost = CacheWatcher(stub, after_revision=1)
        await asyncio.sleep(0.3)
        assert lost.error == common_pb2.ERROR_REASON_RESNAPSHOT
        for watcher in (early, resumed):
            await watcher.stop()


async def test_a_watcher_that_never_reads_costs_nobody_anything() -> None:
    async with mesh() as address, serve_client(address) as client, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        silent = [stub.WatchCache(scheduler_pb2.WatchCacheRequest()) for _ in range(5)]
        handles = [await client.submit([3 + i, *PROMPT], max_tokens=40) for i in range(100)]
        async with asyncio.timeout(30):
            await client.over(*handles)
        watcher = CacheWatcher(stub)
        state = await idle(stub)
        await watcher.until_at(state.cache_revision)
        assert len(watcher.mirror.prefixes()) == state.load.cached_pages
        assert state.num_page_violations == 0
        for call in silent:
            call.cancel()
        await watcher.stop()


async def test_the_trie_cannot_be_watched() -> None:
    async with mesh(cache="trie") as address, open_channel(address) as channel:
        watcher = CacheWatcher(scheduler_pb2_grpc.SchedulerServiceStub(channel))
        await asyncio.sleep(0.3)
        assert watcher.error == common_pb2.ERROR_REASON_UNSUPPORTED


async def test_loads_come_when_something_changes_but_not_too_often() -> None:
    async with mesh() as address, serve_client(address) as client:
        clock = asyncio.get_running_loop().time
        delays = []
        for _ in range(8):
            # Straight after a load of an idle scheduler: without news the next one is half a second away.
            num_loads = len(client.loads)
            await client.until(lambda n=num_loads: len(client.loads) > n)  # type: ignore[misc]
            asked, num_loads = clock(), len(client.loads)
            handle = await client.submit(PROMPT, max_tokens=100)
            await client.until(lambda n=num_loads: any(load.num_running for load in client.loads[n:]))  # type: ignore[misc]
            delays.append(clock() - asked)
            await client.over(handle)
        assert min(delays) < 0.25, "long before the half second is over, unless the machine was busy every time"
        before, started = len(client.loads), clock()
        handles = [await client.submit([*PROMPT, 3 + i], max_tokens=5) for i in range(60)]
        await client.over(*handles)
        await client.until(lambda: not client.loads[-1].num_running and client.loads[-1].submit_sequence == 68)
        seconds = clock() - started
        assert len(client.loads) - before <= 4 + seconds / 0.045
        assert client.loads[-1].hit_rate > 0


async def test_a_load_tells_how_long_a_token_takes_once_steps_of_several_sizes_have_run() -> None:
    async with mesh(prefill_token_us=500.0) as address, serve_client(address) as client:
        assert client.loads[-1].token_us == 0
        handles = [await client.submit([3 + i] * (200 + 20 * i), max_tokens=4) for i in range(8)]
        await client.over(*handles)
        await client.until(lambda: client.loads[-1].token_us > 100)
        assert client.loads[-1].token_us < 5000


async def test_overload_is_refused_with_a_time_to_retry() -> None:
    async with mesh(num_slots=1, max_queue=4) as address, serve_client(address) as client:
        handles = [await client.submit([3 + i, 4], max_tokens=200) for i in range(12)]
        await client.until(lambda: sum(client.seen[h].rejected is not None for h in handles) >= 6)
        for handle in handles:
            rejected = client.seen[handle].rejected
            if rejected is not None:
                assert rejected.error.reason == common_pb2.ERROR_REASON_OVERLOADED
                assert 100 <= int(rejected.error.metadata["retry_after_ms"]) <= 60_000
        await client.over(*handles)


@pytest.mark.parametrize("policy", ["lpm", "priority"])
async def test_priorities_and_n_outputs_over_the_wire(policy: str) -> None:
    async with mesh(queue_policy=policy, chunk_tokens=16) as address, serve_client(address) as client:
        handles = [await client.submit(PROMPT, request_id="n", index=i, max_tokens=10) for i in range(6)]
        seen = await client.over(*handles)
        assert len({tuple(s.tokens) for s in seen}) == 1
        cached = sorted(s.finished.usage.cached_tokens for s in seen if s.finished is not None)
        assert cached == [0] + [len(PROMPT) - 1] * 5
