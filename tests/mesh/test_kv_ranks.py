"""KV from a group to one of another number of ranks: heads are split, joined or picked, and the texts go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest
from support.cpu_ranks import TIMEOUT_S, Ranks, Text, ranks_of, scheduler_on, texts
from support.running_daemon import Running
from support.serve_client import Seen, ServeClient, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import as_ints, pack_ints
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import Role
from radixmesh.daemons.worker.kv_pool import kv_slots
from radixmesh.scheduler.v1 import scheduler_pb2


class Side(NamedTuple):
    ranks: Ranks
    scheduler: Running[SchedulerDaemon]
    client: ServeClient


@asynccontextmanager
async def sides(
    model: str, sizes: tuple[int, int], page_sizes: tuple[int, int], **fields: object
) -> AsyncIterator[list[Side]]:
    """The prefill group, then the decode group."""
    async with AsyncExitStack() as stack:
        found = []
        for role, size, page_size in zip((Role.PREFILL, Role.DECODE), sizes, page_sizes, strict=True):
            values: dict[str, object] = {"num_pages": 640 // page_size, "page_size": page_size, **fields}
            ranks = await stack.enter_async_context(ranks_of(model, size, transfer_staging_bytes=4 << 20, **values))
            # A loaded machine may take its time: where KV is to come, it is waited for.
            values = {"role": role, "transfer_timeout_s": 60.0, "chunk_tokens": 16}
            scheduler = await stack.enter_async_context(scheduler_on(ranks, f"s-{role}", **values))
            found.append(Side(ranks, scheduler, await stack.enter_async_context(serve_client(scheduler.address))))
        yield found


async def reserve(both: list[Side], transfer_id: str, prompt: list[int]) -> scheduler_pb2.ReservationResult:
    """The answer of the decode side."""
    sending, receiving = both[0].client, both[1].client
    reservation = scheduler_pb2.Reservation(
        transfer_id=transfer_id,
        prompt_ids=pack_ints(prompt),
        lease_ms=60_000,
        granule=sending.hello.page_size,
        kv_heads=sending.hello.kv_heads,
    )
    await receiving.write(scheduler_pb2.ServeRequest(reservations=[reservation]))
    await receiving.until(lambda: transfer_id in receiving.reservations, TIMEOUT_S)
    return receiving.reservations.pop(transfer_id)


async def through_both(both: list[Side], text: Text, number: int) -> tuple[list[int], Seen]:
    """Tokens of a text, the first from the prefill side; and what the decode side said."""
    result = await reserve(both, f"t{number}", text.prompt)
    assert result.HasField("target"), result
    sampling = common_pb2.SamplingParams(temperature=0.0)
    fields = {"max_tokens": len(text.expected), "sampling": sampling, "request_id": f"r{number}"}
    handle = await both[0].client.submit(text.prompt, send_kv_to=result.target, **fields)
    (first,) = await both[0].client.over(handle, timeout_s=TIMEOUT_S)
    handle = await both[1].client.submit(text.prompt, resumed=first.tokens, transfer_id=f"t{number}", **fields)
    (rest,) = await both[1].client.over(handle, timeout_s=TIMEOUT_S)
    return first.tokens + rest.tokens, rest


def long_prompts(model: str, num: int) -> list[Text]:
    """Known texts of which so much is the prompt that it fills a page of any size here."""
    whole = [[*text.prompt, *text.expected] for text in texts(model, num)]
    cut = 22
    return [Text(ids[:cut], ids[cut:]) for ids in whole]


def check_bytes(both: list[Side], prompt: list[int], num_tokens: int) -> None:
    """Each head of each rank of the decode side holds what some rank of the prefill side has of it."""
    slots = []
    for side in both:
        state = side.scheduler.daemon.loop.planner.state
        assert state is not None
        pages = state.pages.cache.match(state.pages.namespace_named(""), as_ints(prompt[:num_tokens])).pages
        slots.append(kv_slots(pages, num_tokens, state.group.page_size).astype("int32"))
    runners = [[worker.daemon.core.executor.runner for worker in side.ranks.workers.values()] for side in both]
    for theirs in runners[1]:
        for head in range(theirs.kv_share.start, theirs.kv_share.stop):
            part = KvShare(head, head + 1, theirs.kv_share.total)
            data = theirs.read_kv(slots[1], part).tobytes()
            sources = [ours.read_kv(slots[0], part).tobytes() for ours in runners[0] if ours.kv_share.has(part)]
            assert sources and data in sources, head


def is_clean(both: list[Side]) -> bool:
    """True if no staging is taken, no transfer is known."""
    transfers = [worker.daemon.core.transfers for side in both for worker in side.ranks.workers.values()]
    is_idle = not any(t.staging.num_bytes or t.senders or len(t.receiver) for t in transfers)
    return is_idle and not len(both[1].scheduler.daemon.loop.planner.arrivals)


FULL = pytest.mark.full


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "sizes", "page_sizes", "fields"),
    [
        ("tiny-llama", (2, 1), (1, 16), {}),
        ("tiny-llama", (1, 2), (4, 1), {}),
        pytest.param("tiny-deepseek", (2, 1), (16, 1), {}, marks=FULL),
        pytest.param("tiny-deepseek", (1, 2), (1, 16), {}, marks=FULL),
        pytest.param("tiny-llama", (2, 2), (16, 4), {}, marks=FULL),
        # Two heads on four ranks: two have the same.
        pytest.param("tiny-llama", (4, 1), (1, 4), {}, marks=FULL),
        pytest.param("tiny-llama", (1, 4), (4, 1), {}, marks=FULL),
        pytest.param("tiny-llama", (4, 2), (16, 1), {}, marks=FULL),
        pytest.param("tiny-deepseek", (4, 2), (1, 1), {}, marks=FULL),
        pytest.param("tiny-llama", (2, 1), (1, 16), {"kv_dtype": "fp8"}, marks=FULL),
        pytest.param("tiny-llama", (1, 2), (4, 1), {"kv_dtype": "fp8"}, marks=FULL),
    ],
)
async def test_texts_go_on_behind_kv_of_other_ranks(
    model: str, sizes: tuple[int, int], page_sizes: tuple[int, int], fields: dict[str, object]
) -> None:
    async with sides(model, sizes, page_sizes, **fields) as both:
        chosen = long_prompts(model, 3)
        for number, text in enumerate(chosen):
            tokens, rest = await through_both(both, text, number)
            assert tokens == text.expected
            # It is what arrived that was decoded from.
            least = len(text.prompt) // max(page_sizes) * max(page_sizes)
            assert rest.finished.usage.cached_tokens >= least - max(page_sizes)
            check_bytes(both, text.prompt, least)
        planner = both[1].scheduler.daemon.loop.planner
        assert planner.arrivals.num_arrived == len(chosen) and not planner.arrivals.num_failed
        async with asyncio.timeout(TIMEOUT_S):
            while not is_clean(both):
                await asyncio.sleep(0.01)


async def test_a_part_that_fails_fails_the_whole() -> None:
    """Of two writers one gives up: nothing of the other's is used, and no staging stays."""
    async with sides("tiny-llama", (2, 1), (1, 1)) as both:
        (text,) = long_prompts("tiny-llama", 1)
        receiving = both[1].ranks.workers[0].daemon.core.transfers
        result = await reserve(both, "t0", text.prompt)
        assert sorted(receiving.receiver.regions) == ["t0/0-0", "t0/1-0"]
        receiving.abort("t0/1-0")
        sampling = common_pb2.SamplingParams(temperature=0.0)
        fields = {"max_tokens": len(text.expected), "sampling": sampling, "request_id": "r"}
        handle = await both[0].client.submit(text.prompt, send_kv_to=result.target, **fields)
        (first,) = await both[0].client.over(handle, timeout_s=TIMEOUT_S)
        handle = await both[1].client.submit(text.prompt, resumed=first.tokens, transfer_id="t0", **fields)
        (rest,) = await both[1].client.over(handle, timeout_s=TIMEOUT_S)
        assert first.tokens + rest.tokens == text.expected and not rest.finished.usage.cached_tokens
        async with asyncio.timeout(TIMEOUT_S):
            while not is_clean(both):
                await asyncio.sleep(0.01)


async def test_kv_heads_that_do_not_make_up_a_rank_are_refused() -> None:
    async with sides("tiny-llama", (1, 1), (1, 1)) as both:
        (text,) = long_prompts("tiny-llama", 1)
        hello = both[0].client.hello
        for number, (heads, reason) in enumerate(
            (
                ([0, 1, 2], common_pb2.ERROR_REASON_TRANSFER_FAILED),
                ([0, 3, 3], common_pb2.ERROR_REASON_TRANSFER_FAILED),
                ([0, 2], common_pb2.ERROR_REASON_INVALID_ARGUMENT),
                ([1, 1, 2], common_pb2.ERROR_REASON_INVALID_ARGUMENT),
                ([0, 1, 2] * 1025, common_pb2.ERROR_REASON_INVALID_ARGUMENT),
            )
        ):
            hello.kv_heads = pack_ints(heads)
            result = await reserve(both, f"t{number}", text.prompt)
            assert result.error.reason == reason, (heads, result)
        assert is_clean(both)
