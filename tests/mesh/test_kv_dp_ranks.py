"""KV between groups with data-parallel ranks, each of which has pages of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from mesh.test_dp_ranks import TIMEOUT_S, outputs, until, workers
from mesh.test_kv_ranks import Side, reserve
from support.runner_contract import MODEL
from support.running_daemon import running
from support.serve_client import serve_client

from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import Role, SchedulerSettings
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.worker.config import Backend

NUM = 8
PROMPT = list(range(3, 30))
NUM_OUT = 24
_LEFT = (PageState.FREE, PageState.CACHED)


@asynccontextmanager
async def sides(sizes: tuple[int, int], **fields: object) -> AsyncIterator[list[Side]]:
    """Data-parallel ranks of the prefill group, then of the decode group."""
    async with AsyncExitStack() as stack:
        found = []
        for role, size in zip((Role.PREFILL, Role.DECODE), sizes, strict=True):
            ranks = await stack.enter_async_context(workers(size, transfer_staging_bytes=1 << 20, **fields))
            settings = SchedulerSettings(
                workers=tuple(rank.address for rank in ranks),
                role=role,
                check_invariants=True,
                chunk_tokens=8,
                transfer_timeout_s=60.0,
            )
            scheduler = await stack.enter_async_context(running(SchedulerDaemon, settings, instance_id=f"s-{role}"))
            client = await stack.enter_async_context(serve_client(scheduler.address))
            found.append(Side(ranks, scheduler, client))  # type: ignore[arg-type]
        yield found


async def through_both(both: list[Side], number: int, writing: asyncio.Lock) -> list[int]:
    """writing: streams take one message at a time."""
    prompt, name = [*PROMPT[: 10 + number], 40 + number], f"t{number}"
    async with writing:
        result = await reserve(both, name, prompt)
    assert result.HasField("target"), result
    fields = {"max_tokens": NUM_OUT, "request_id": f"r{number}"}
    async with writing:
        handle = await both[0].client.submit(prompt, send_kv_to=result.target, **fields)
    (first,) = await both[0].client.over(handle, timeout_s=TIMEOUT_S)
    async with writing:
        handle = await both[1].client.submit(prompt, resumed=first.tokens, transfer_id=name, **fields)
    (rest,) = await both[1].client.over(handle, timeout_s=TIMEOUT_S)
    return first.tokens + rest.tokens


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("backend", ["simulated", pytest.param("cpu", marks=pytest.mark.full)])
async def test_outputs_are_those_of_one_group(backend: str, sizes: tuple[int, int]) -> None:
    fields: dict[str, object] = {}
    if backend == "cpu":
        fields = {"backend": Backend.CPU, "model": MODEL, "cpu_threads": 1, "max_total_len": 128}
    async with workers(1, **fields) as one:
        expected = await outputs(one, "one", NUM)
    async with sides(sizes, **fields) as both:
        writing = asyncio.Lock()
        assert await asyncio.gather(*(through_both(both, number, writing) for number in range(NUM))) == expected
        planners = [side.scheduler.daemon.loop.planner for side in both]
        assert planners[1].arrivals.num_arrived == planners[0].handovers.num_started == NUM
        counts = [[rank.daemon.core.transfers for rank in side.ranks] for side in both]  # type: ignore[attr-defined]
        assert all(of.num_sent for of in counts[0]), "each prefill rank has sent"
        assert all(of.num_received for of in counts[1]), "each decode rank has received"
        assert sum(of.num_received for of in counts[1]) == NUM
        await until(lambda: not len(planners[1].arrivals))
        for planner in planners:
            await until(lambda planner=planner: not any(
                num for state, num in planner.state.page_counts().items() if state not in _LEFT
            ))  # fmt: skip
        assert not any(of.staging.num_bytes for side in counts for of in side)


async def test_what_is_given_up_is_left_on_no_rank() -> None:
    async with sides((2, 2)) as both:
        planner = both[1].scheduler.daemon.loop.planner
        results = [await reserve(both, f"t{number}", [*PROMPT, 40 + number]) for number in range(4)]
        assert all(result.HasField("target") for result in results)
        arriving = [arrival.rank for arrival in planner.arrivals.live()]
        assert sorted(arriving) == [0, 0, 1, 1], "a burst is spread"
        for arrival in planner.arrivals.live():
            planner.arrivals.cancel(planner.state, arrival.transfer_id)
        both[1].scheduler.daemon.loop.notify()
        ranks = both[1].ranks
        await until(lambda: not any(rank.daemon.core.transfers.staging.num_bytes for rank in ranks))  # type: ignore[attr-defined]
