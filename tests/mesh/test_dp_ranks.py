"""Two data-parallel ranks as workers of their own behind one scheduler, over the wire: simulated ones, and on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from support.runner_contract import MODEL
from support.running_daemon import Running, running
from support.serve_client import serve_client

from radixmesh.daemons.runtime.arrays import as_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

TIMEOUT_S = 60.0
PROMPT = list(range(3, 30))


@asynccontextmanager
async def workers(size: int, **fields: object) -> AsyncIterator[list[Running[WorkerDaemon]]]:
    values: dict[str, object] = {"backend": Backend.SIMULATED, "num_pages": 512, "num_slots": 4, **fields}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running(WorkerDaemon, WorkerSettings(dp_size=size, dp_rank=rank, **values))  # type: ignore[arg-type]
            )
            for rank in range(size)
        ]


@asynccontextmanager
async def scheduler(ranks: list[Running[WorkerDaemon]], name: str) -> AsyncIterator[Running[SchedulerDaemon]]:
    settings = SchedulerSettings(workers=tuple(rank.address for rank in ranks), check_invariants=True, chunk_tokens=8)
    async with running(SchedulerDaemon, settings, instance_id=name) as daemon:
        yield daemon


async def outputs(ranks: list[Running[WorkerDaemon]], name: str, num: int = 8) -> list[list[int]]:
    async with scheduler(ranks, name) as daemon, serve_client(daemon.address) as client:
        handles = [await client.submit([*PROMPT[: 10 + i], 40 + i], max_tokens=24) for i in range(num)]
        return [seen.tokens for seen in await client.over(*handles, timeout_s=TIMEOUT_S)]


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("backend", ["simulated", "cpu"])
async def test_two_ranks_say_what_one_says(backend: str) -> None:
    fields: dict[str, object] = {}
    if backend == "cpu":
        fields = {"backend": Backend.CPU, "model": MODEL, "cpu_threads": 1, "max_total_len": 128}
    async with workers(1, **fields) as one:
        expected = await outputs(one, "one")
    async with workers(2, **fields) as two:
        assert await outputs(two, "two") == expected
        assert all(rank.daemon.core.ledger.last_completed_step > 20 for rank in two)
        executors = [rank.daemon.core.executor for rank in two]
        assert all(executor is not None and executor.records.filled.any() for executor in executors), "both computed"
        # The KV that each rank has is adopted, and used.
        async with scheduler(two, "three") as daemon:
            state = daemon.daemon.loop.planner.state
            assert state is not None and all(pages.pool.num_cached for pages in state.ranks)
        assert await outputs(two, "four") == expected


async def test_load_and_cache_events_name_the_rank() -> None:
    async with workers(2) as two, scheduler(two, "s") as daemon, serve_client(daemon.address) as client:
        handles = [await client.submit([50 + i, *PROMPT], max_tokens=4) for i in range(4)]
        await client.over(*handles, timeout_s=TIMEOUT_S)
        async with open_channel(daemon.address) as channel, asyncio.timeout(TIMEOUT_S):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            load = (await stub.GetState(scheduler_pb2.GetStateRequest())).load
            assert [rank.dp_rank for rank in load.ranks] == [0, 1] and load.total_pages == 1024 and load.num_slots == 8
            assert sum(rank.cached_pages for rank in load.ranks) == load.cached_pages
            assert all(rank.cached_pages for rank in load.ranks)
            nodes: dict[int, scheduler_pb2.CacheInsert] = {}
            async for message in stub.WatchCache(scheduler_pb2.WatchCacheRequest()):
                nodes.update({insert.node: insert for insert in message.inserts})
                if not message.is_snapshot:
                    break
            assert {node.dp_rank for node in nodes.values()} == {0, 1}
            assert all(not node.parent or nodes[node.parent].dp_rank == node.dp_rank for node in nodes.values())
            num_tokens = sum(len(unpack_ints(node.ids, "ids")) for node in nodes.values())
            assert num_tokens == load.cached_pages, "a token a page"


async def test_a_transfers_pages_are_those_of_its_rank() -> None:
    async with workers(2) as two:
        async with scheduler(two, "a"):
            pass
        pins = two[1].daemon.core.pins
        pins.pin("t", as_ints([3, 4]))
        async with scheduler(two, "b") as daemon:
            state = daemon.daemon.loop.planner.state
            assert state is not None and [pages.pool.num_leased for pages in state.ranks] == [0, 2]
            pins.release("t")
            await until(lambda: [pages.pool.num_leased for pages in state.ranks] == [0, 0])
