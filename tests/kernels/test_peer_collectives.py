"""Collectives of kernels that read each other's memory, between processes: on one GPU where there is one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from support.rank_process import RankProcess

# Processes take turns on a GPU; under the interpreter a round of a program takes a millisecond.
pytestmark = pytest.mark.timeout(240)
TIMEOUT_S = 100.0
# A rank that is lost is noticed within 5 s; on a loaded machine it may take longer to be told.
MOST_S = 5.0 if torch.cuda.is_available() else 25.0
# One program; some; each more than once; by parts where there are more than two ranks; a number of elements that is no
# multiple of anything; then all programs, each more often than once.
SHAPES = ([1, 8], [3, 1000], [40, 4096], [200, 4096], [7, 33], [1, 1], [131, 1001], [300, 4096], [900, 4096])

DTYPES = ("float32", "bfloat16", "float16")


@asynccontextmanager
async def processes(size: int) -> AsyncIterator[list[RankProcess]]:
    async with asyncio.timeout(TIMEOUT_S):
        ranks = [await _started(rank, size) for rank in range(size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            await rank.kill(signal.SIGCONT)
            await rank.kill()


async def _started(rank: int, size: int) -> RankProcess:
    return await RankProcess.start(rank, size, "support.peer_rank")


async def told(ranks: list[RankProcess], *command: object) -> list[dict[str, object]]:
    async with asyncio.timeout(TIMEOUT_S):
        return list(await asyncio.gather(*(rank.tell(*command) for rank in ranks)))


async def formed(ranks: list[RankProcess], generation: int) -> None:
    names = [f"{number}-{rank.process.pid}" for number, rank in enumerate(ranks)]
    for answer in await told(ranks, "form", generation, ranks[0].rendezvous, names):
        assert "error" not in answer, answer


async def check_sums(ranks: list[RankProcess], *, turn: int = 0) -> None:
    """turn: under the interpreter a shape is summed in one dtype, which is another one in the next turn."""
    is_gpu = torch.cuda.is_available()
    for seed, shape in enumerate(SHAPES if is_gpu else SHAPES[:-2]):
        for dtype in DTYPES if is_gpu else (DTYPES[(seed + turn) % len(DTYPES)],):
            for answer in await told(ranks, "sum", shape, dtype, seed):
                assert answer.get("result") is True, (shape, dtype, answer)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.full)])
async def test_all_ranks_have_the_same_bits(size: int) -> None:
    async with processes(size) as ranks:
        await formed(ranks, 1)
        await check_sums(ranks)
        for rows, vocab in ((1, 1001), (3, 128), (33, 4001)):
            for answer in await told(ranks, "gather", rows, vocab, "float32"):
                assert answer.get("result") is True, (rows, vocab, answer)
        await check_sums(ranks, turn=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="sigkill"), pytest.param(signal.SIGSTOP, id="sigstop", marks=pytest.mark.full)],
)
async def test_a_kernel_that_waits_for_a_lost_rank_leaves(number: signal.Signals) -> None:
    async with processes(2) as ranks:
        await formed(ranks, 1)
        await check_sums(ranks)
        for generation in (2, 3)[: 2 if torch.cuda.is_available() else 1]:
            waiting = asyncio.ensure_future(ranks[0].tell("sum", [3, 1000], "float32", 1))
            await asyncio.sleep(0.5)
            assert not waiting.done(), "it waits for the other rank as long as that lives"
            lost = ranks[1]
            await lost.kill(number)
            async with asyncio.timeout(TIMEOUT_S):
                answer = await waiting
            assert answer.get("error") == "RankLost", answer
            assert isinstance(answer["seconds"], float) and answer["seconds"] < MOST_S + 0.5
            # One that only hangs is killed before another takes its place: its kernels may still write.
            await lost.kill()
            ranks[1] = await _started(1, 2)
            await formed(ranks, generation)
            await check_sums(ranks, turn=2)


@pytest.mark.full
async def test_a_rank_waits_for_one_that_is_late() -> None:
    async with processes(2) as ranks:
        await formed(ranks, 1)
        waiting = asyncio.ensure_future(ranks[1].tell("sum", [40, 4096], "bfloat16", 1))
        await asyncio.sleep(6.0)
        assert not waiting.done()
        answers = [await ranks[0].tell("sum", [40, 4096], "bfloat16", 1), await waiting]
        assert [answer.get("result") for answer in answers] == [True, True]


@pytest.mark.gpu
async def test_calls_in_a_graph() -> None:
    """Microseconds of a call between two processes that take turns on one GPU: a bound, no figure of the kernel."""
    async with processes(2) as ranks:
        await formed(ranks, 1)
        for shape in ([1, 4096], [256, 4096]):
            answers = await told(ranks, "time", shape, "bfloat16", 8)
            print(os.linesep, shape, [answer.get("result") for answer in answers])
            assert all(isinstance(answer.get("result"), float) for answer in answers), answers
        await check_sums(ranks)
