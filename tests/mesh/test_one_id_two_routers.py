"""One request id at two routers: whoever loses a stream is told so, and a resume wins while its first router hangs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.jobs import simulated_alphabet
from support.mesh import Mesh
from support.unharmed import observed_mesh, settled

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.channel import open_channel
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [10, 11, 12, 13]
NUM = 400
LIMIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    # Some 10 ms a step: a stream of NUM tokens is there to be disturbed for seconds.
    async with observed_mesh(scale={"router": 2}, worker={"simulated_base_us": 10_000}) as mesh:
        yield mesh


def continuation(num: int) -> list[int]:
    return simulated_continuation(PROMPT, num, alphabet=simulated_alphabet())


def request_of(request_id: str, num: int = NUM) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(
        request_id=request_id,
        prompt_ids=pack_ints(PROMPT),
        sampling=common_pb2.SamplingParams(temperature=0, seed=7),
        stop=common_pb2.StopParams(max_tokens=num, ignore_eos=True),
    )


class Reader:
    """A stream read by hand, as far as a test wants."""

    def __init__(self, mesh: Mesh, router: int, request: router_pb2.GenerateRequest) -> None:
        self._channel = open_channel(mesh.routers[router])
        self._call = router_pb2_grpc.RouterServiceStub(self._channel).Generate(request)
        self.resolved = router_pb2.Resolved()
        self.ids: list[int] = []
        self.text_bytes = 0
        self.finished: router_pb2.OutputFinished | None = None

    async def until(self, num_ids: int = 1 << 30) -> None:
        """Reads until there are so many ids, or to the end."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.ids) < num_ids:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    return
                if response.HasField("resolved"):
                    self.resolved.CopyFrom(response.resolved)
                for delta in response.deltas:
                    self.ids += unpack_ints(delta.ids, "ids").tolist()
                    self.text_bytes += len(delta.text.encode())
                for finished in response.finished:
                    self.finished = finished

    def resume(self, resumption: int) -> router_pb2.GenerateRequest:
        progress = router_pb2.OutputProgress(output_ids=pack_ints(self.ids), text_bytes=self.text_bytes)
        resume = router_pb2.Resume(resolved=self.resolved, outputs=[progress], resumption=resumption)
        return router_pb2.GenerateRequest(resume=resume)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def test_a_stream_is_not_taken_away_in_silence(mesh: Mesh) -> None:
    """The very same request at both routers: one stream gets all of it, the other is told that it lost it."""
    first = Reader(mesh, 0, request_of("twin"))
    await first.until(5)
    second = Reader(mesh, 1, request_of("twin"))
    await asyncio.gather(first.until(), second.until())
    assert second.ids == continuation(NUM)
    assert first.ids == continuation(len(first.ids)) and len(first.ids) < NUM
    assert first.finished is not None
    assert first.finished.error.reason == common_pb2.ERROR_REASON_SUPERSEDED
    await first.close()
    await second.close()
    await settled(mesh)


async def test_a_resume_wins_while_the_first_router_hangs(mesh: Mesh) -> None:
    """The scheduler has noticed nothing: the first router's stream is open."""
    first = Reader(mesh, 0, request_of("hangs"))
    await first.until(5)
    mesh.cluster.kill("router", number=signal.SIGSTOP)
    try:
        second = Reader(mesh, 1, first.resume(1))
        await second.until(len(first.ids) + 5)
    finally:
        mesh.cluster.kill("router", number=signal.SIGCONT)
    await second.until()
    assert first.ids + second.ids == continuation(NUM)
    assert second.finished is not None and second.finished.reason == common_pb2.FINISH_REASON_LENGTH
    await first.until()
    assert first.finished is not None
    assert first.finished.error.reason == common_pb2.ERROR_REASON_SUPERSEDED
    await first.close()
    await second.close()
    await settled(mesh)


async def test_the_id_of_a_request_that_was_resumed_and_ended_is_free(mesh: Mesh) -> None:
    first = Reader(mesh, 0, request_of("again", 40))
    await first.until(5)
    await first.close()
    second = Reader(mesh, 1, first.resume(3))
    await second.until()
    assert first.ids + second.ids == continuation(40)
    third = Reader(mesh, 0, request_of("again", 20))
    await third.until()
    assert third.finished is not None and third.finished.reason == common_pb2.FINISH_REASON_LENGTH, third.finished
    assert third.ids == continuation(20)
    await second.close()
    await third.close()
    await settled(mesh)
