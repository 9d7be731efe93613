"""One request id at two routers and of two tenants: who loses a stream is told so, and strangers take none."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.invariants import observed_mesh, settled
from support.jobs import simulated_alphabet
from support.mesh import Mesh

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [10, 11, 12, 13]
NUM = 160
LIMIT_S = 60.0
ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{ALICE} alice\n{BOB} bob\n")
    keys.chmod(0o600)
    # Some 25 ms a step: a stream of NUM tokens is there to be disturbed for seconds.
    settings = {"worker": {"simulated_base_us": 25_000}, "router": {"api_keys_file": keys}}
    async with observed_mesh(scale={"router": 2}, api_key=ALICE, **settings) as mesh:  # type: ignore[arg-type]
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

    def __init__(self, mesh: Mesh, router: int, request: router_pb2.GenerateRequest, key: str = ALICE) -> None:
        self._channel = open_channel(mesh.routers[router])
        metadata = [("authorization", f"Bearer {key}")]
        self._call = router_pb2_grpc.RouterServiceStub(self._channel).Generate(request, metadata=metadata)
        self.resolved = router_pb2.Resolved()
        self.ids: list[int] = []
        self.text_bytes = 0
        self.finished: router_pb2.OutputFinished | None = None
        self.num_aborted = 0

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
                    self.num_aborted += finished.error.reason == common_pb2.ERROR_REASON_ABORTED

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


async def abort(mesh: Mesh, router: int, request_id: str, key: str) -> router_pb2.AbortOutcome:
    async with open_channel(mesh.routers[router]) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Abort(
            router_pb2.AbortRequest(request_id=request_id),
            metadata=[("authorization", f"Bearer {key}")],
            timeout=LIMIT_S,
        )
        return (await call).outcome


@pytest.mark.parametrize("router", [0, 1], ids=["own router", "other router"])
async def test_nobody_aborts_the_request_of_another_tenant(mesh: Mesh, router: int) -> None:
    """Neither does the answer tell that there is one, nor that there was."""
    stream = Reader(mesh, 0, request_of("hers"))
    await stream.until(5)
    assert await abort(mesh, router, "hers", BOB) == router_pb2.ABORT_OUTCOME_UNKNOWN
    await stream.until()
    assert stream.ids == continuation(NUM)
    assert await abort(mesh, router, "hers", BOB) == router_pb2.ABORT_OUTCOME_UNKNOWN
    assert await abort(mesh, router, "hers", ALICE) == router_pb2.ABORT_OUTCOME_FINISHED
    await stream.close()


@pytest.mark.parametrize("router", [0, 1], ids=["own router", "other router"])
async def test_a_resume_with_the_id_of_another_tenant_is_a_request_of_its_own(mesh: Mesh, router: int) -> None:
    """With all that the first message says, the tenant's name included: the key says whose a request is."""
    hers = Reader(mesh, 0, request_of("shared"))
    await hers.until(5)
    stolen = Reader(mesh, router, hers.resume(9), BOB)
    await asyncio.gather(hers.until(), stolen.until(20))
    assert stolen.resolved.tenant == "bob"
    assert hers.ids == continuation(NUM), hers.finished
    assert hers.finished is not None and hers.finished.reason == common_pb2.FINISH_REASON_LENGTH
    await stolen.close()
    await hers.close()
    await settled(mesh)


@pytest.mark.parametrize("router", [0, 1], ids=["same router", "other router"])
async def test_two_tenants_use_one_id_at_once(mesh: Mesh, router: int) -> None:
    hers, his = Reader(mesh, 0, request_of("common", 60)), Reader(mesh, router, request_of("common", 60), BOB)
    await asyncio.gather(hers.until(5), his.until(5))
    assert await abort(mesh, 1 - router, "common", BOB) == router_pb2.ABORT_OUTCOME_FOUND
    await asyncio.gather(hers.until(), his.until())
    assert hers.ids == continuation(60), hers.finished
    assert his.finished is not None and his.finished.error.reason == common_pb2.ERROR_REASON_ABORTED
    await his.close()
    await hers.close()
    await settled(mesh)


async def test_all_outputs_of_a_request_are_its_tenants(mesh: Mesh) -> None:
    """Outputs that share a submit on the wire share the tenant too: an abort finds each of them."""
    request = request_of("several")
    request.n = 3
    several = Reader(mesh, 0, request)
    await several.until(10)
    assert await abort(mesh, 1, "several", BOB) == router_pb2.ABORT_OUTCOME_UNKNOWN
    assert await abort(mesh, 1, "several", ALICE) == router_pb2.ABORT_OUTCOME_FOUND
    await several.until()
    assert several.num_aborted == 3
    await several.close()
    await settled(mesh)
