"""Workers that answer nonsense, and workers that nobody asked: the scheduler ends their stream and loses nothing.

A worker that makes up tokens of the vocabulary is believed: docs/threats.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from support.running_daemon import running
from support.serve_client import serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

VOCAB_SIZE = 1000
PROMPT = list(range(3, 40))
NUM_TOKENS, NUM_REQUESTS = 60, 4
# Fewer than make a suspect of a request.
NUM_LIES = 2
SETTINGS = WorkerSettings(
    backend=Backend.SIMULATED,
    simulated_vocab_size=VOCAB_SIZE,
    num_pages=4096,
    num_slots=32,
    max_total_len=1024,
    simulated_base_us=2000.0,
)
Answer = worker_pb2.ExecuteResponse


def _repeated(answer: Answer) -> list[Answer]:
    answer.more_results.extend([answer.result] * 1_000)
    return [answer]


def _result(**fields: object) -> Callable[[Answer], list[Answer]]:
    def lie(answer: Answer) -> list[Answer]:
        for name, value in fields.items():
            setattr(answer.result, name, value)
        return [answer]

    return lie


def _ids(token: int) -> Callable[[Answer], list[Answer]]:
    def lie(answer: Answer) -> list[Answer]:
        answer.result.ids = pack_ints([token] * (len(answer.result.ids) // 4))
        return [answer]

    return lie


def _counts(change: Callable[[list[int]], list[int]], num_ids: int) -> Callable[[Answer], list[Answer]]:
    def lie(answer: Answer) -> list[Answer]:
        answer.result.counts = pack_ints(change(unpack_ints(answer.result.counts, "").tolist()))
        answer.result.ids = pack_ints([5] * num_ids)
        return [answer]

    return lie


def _later(answer: Answer) -> list[Answer]:
    answer.result.step_id += 7
    return [answer]


def _wide(answer: Answer) -> list[Answer]:
    values = common_pb2.Logprobs(token_logprobs=bytes(4), num_top=100_000, top_ids=bytes(400_000), top_logprobs=b"")
    answer.result.logprobs.add(slot=0, generation=1, logprobs=values)
    return [answer]


def _many(answer: Answer) -> list[Answer]:
    answer.result.logprobs.extend([worker_pb2.SlotLogprobs()] * 200_000)
    return [answer]


LIES: dict[str, Callable[[Answer], list[Answer]]] = {
    "ids outside the vocabulary": _ids(2**31 - 1),
    "negative ids": _ids(-1),
    "no rows": _counts(lambda counts: [], 0),
    "a row too many": _counts(lambda counts: [*counts, 1], 1),
    "negative counts": _counts(lambda counts: [-1 for _ in counts], 0),
    "a thousand tokens a row": _counts(lambda counts: [1000 for _ in counts], 1000),
    "three bytes of counts": _result(counts=b"123"),
    "three bytes of ids": _result(ids=b"123"),
    "a later step": _later,
    "a step of all": _result(step_id=2**64 - 1),
    "each result twice": lambda answer: [answer, answer],
    "each result a thousand times in one message": _repeated,
    "a claim that nobody made": lambda answer: [Answer(claimed=worker_pb2.Claimed(epoch=99))],
    "another hello": lambda answer: [Answer(hello=worker_pb2.WorkerHello())],
    "nothing at all": lambda answer: [Answer()],
    "logprobs of 100,000 alternatives": _wide,
    "200,000 logprobs": _many,
}


class RogueWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that passes on what another one says, but for `lie`, which it tells so often."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.lie: Callable[[Answer], list[Answer]] = lambda answer: [answer]
        self.is_ready: Callable[[], bool] = lambda: False
        self.num_lies = 0
        self.num_calls = 0

    async def GetCapabilities(
        self, request: worker_pb2.GetCapabilitiesRequest, context: object
    ) -> worker_pb2.GetCapabilitiesResponse:
        self.num_calls += 1
        return await self._stub.GetCapabilities(request)

    async def SnapshotCache(
        self, request: worker_pb2.SnapshotCacheRequest, context: object
    ) -> AsyncIterator[worker_pb2.SnapshotCacheResponse]:
        async for records in self._stub.SnapshotCache(request):
            yield records

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: object
    ) -> AsyncIterator[Answer]:
        self.num_calls += 1
        call = self._stub.Execute()

        async def forward() -> None:
            async for request in request_iterator:
                await call.write(request)

        forwarding = asyncio.ensure_future(forward())
        try:
            # A stream that ends badly ends: why is told by the worker's own tests.
            with suppress(grpc.aio.AioRpcError):
                while (answer := await call.read()) is not grpc.aio.EOF:
                    for each in self._told(answer):
                        yield each
        finally:
            forwarding.cancel()
            call.cancel()

    def _told(self, answer: Answer) -> Iterator[Answer]:
        if answer.result.counts and self.num_lies < NUM_LIES and self.is_ready():
            self.num_lies += 1
            yield from self.lie(answer)
        else:
            yield answer

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def rogue_worker(address: str) -> AsyncIterator[tuple[RogueWorker, str]]:
    rogue, server = RogueWorker(address), grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(rogue, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield rogue, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await rogue.close()


@asynccontextmanager
async def scheduler_of(worker: str) -> AsyncIterator[str]:
    async with running(SchedulerDaemon, SchedulerSettings(workers=(worker,), check_invariants=True)) as scheduler:
        yield scheduler.address


def expected(number: int) -> list[int]:
    prompt = PROMPT[: 5 + number]
    return simulated_continuation(prompt, NUM_TOKENS, alphabet=Alphabet.of(VOCAB_SIZE))


async def state_of(address: str) -> scheduler_pb2.GetStateResponse:
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)


@pytest.mark.parametrize("name", LIES)
async def test_a_worker_that_answers_nonsense_loses_its_stream_and_nobody_a_token(name: str) -> None:
    async with (
        running(WorkerDaemon, SETTINGS) as worker,
        rogue_worker(worker.address) as (rogue, address),
        scheduler_of(address) as scheduler,
        serve_client(scheduler) as client,
    ):
        rogue.lie = LIES[name]
        rogue.is_ready = lambda: any(len(seen.tokens) > 3 for seen in client.seen.values())
        handles = [await client.submit(PROMPT[: 5 + i], max_tokens=NUM_TOKENS) for i in range(NUM_REQUESTS)]
        for number, seen in enumerate(await client.over(*handles, timeout_s=60)):
            assert seen.tokens == expected(number)
            assert seen.finished is not None and seen.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert rogue.num_lies
        state = await state_of(scheduler)
        assert state.num_page_violations == 0 and state.load.epoch > 1, "it was believed"
