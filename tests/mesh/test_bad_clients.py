"""Clients that vanish, never read, or say nothing: bounded, told where somebody listens, and the mesh serves on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from support.invariants import METRICS_PORT, known_job, left_behind, observed_mesh, serves_on, settled
from support.mesh import Mesh
from support.wire import Proxy, metrics_of, raw_channel, refusal_from, refusal_of

from radixmesh.common.v1.common_pb2 import SamplingParams, StopParams
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

STALL_S = 1.5
GENERATE = "/radixmesh.router.v1.RouterService/Generate"
SILENT_STREAMS = {
    "scheduler": "/radixmesh.scheduler.v1.SchedulerService/Serve",
    "detokenizer": "/radixmesh.detokenizer.v1.DetokenizerService/Detokenize",
    "worker": "/radixmesh.worker.v1.WorkerService/Execute",
}
LONG = router_pb2.GenerateRequest(
    prompt_ids=pack_ints([10, 11, 12]), n=2, stop=StopParams(max_tokens=2000, ignore_eos=True)
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    worker = {"simulated_base_us": 2000}
    async with observed_mesh(worker=worker, router={"client_stall_s": STALL_S}) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def invariants_hold(mesh: Mesh) -> AsyncIterator[None]:
    """After every test the mesh gives a known answer, nothing is left behind and nobody has died."""
    pids = mesh.cluster.pids
    yield
    await serves_on(mesh, known_job())
    await settled(mesh)
    assert mesh.cluster.pids == pids, "a daemon died"


def resident_bytes(mesh: Mesh, name: str) -> int:
    fields = Path(f"/proc/{mesh.cluster.pids[name]}/status").read_text().split("VmRSS:")[1]
    return 1024 * int(fields.split()[0])


async def num_stalled(mesh: Mesh) -> float:
    samples = await metrics_of(mesh.cluster.address("router", 1, METRICS_PORT))
    return samples.get('radixmesh_errors_total{reason="CLIENT_STALLED"}', 0.0)


async def test_clients_that_hang_up_leave_nothing(mesh: Mesh) -> None:
    """The connection is closed before the first message, after it, and in the middle."""
    async with AsyncExitStack() as stack:
        for num_read in (0, 1, 5):
            channel = await stack.enter_async_context(open_channel(mesh.routers[0]))
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(LONG)
            for _ in range(num_read):
                assert await call.read() is not grpc.aio.EOF
    await settled(mesh, timeout_s=3.0)


async def test_a_client_whose_cable_is_pulled_is_noticed(mesh: Mesh) -> None:
    """No FIN, no RST, no byte: the router's pings stay unanswered, and the request ends within seconds."""
    async with Proxy(mesh.routers[0]) as proxy, open_channel(proxy.address) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(LONG)
        for _ in range(3):
            assert await call.read() is not grpc.aio.EOF
        proxy.pull()
        assert await left_behind(mesh), "the request had ended before"
        await serves_on(mesh, known_job())
        await settled(mesh, timeout_s=8.0)
        call.cancel()


async def test_a_client_that_never_reads_is_aborted_and_told(mesh: Mesh) -> None:
    """Megabytes of logprobs for a client that reads nothing: memory stays bounded, others are served, then it ends."""
    stalled_before, memory_before = await num_stalled(mesh), resident_bytes(mesh, "router-1")
    request = router_pb2.GenerateRequest(
        prompt_ids=pack_ints([10, 11, 12]),
        n=8,
        sampling=SamplingParams(num_top_logprobs=64),
        stop=StopParams(max_tokens=1500, ignore_eos=True),
    )
    async with raw_channel(mesh.routers[0]) as channel:
        call = channel.unary_stream(GENERATE)(request.SerializeToString())
        assert await call.read() is not grpc.aio.EOF
        async with asyncio.timeout(20):
            while await num_stalled(mesh) == stalled_before:
                await serves_on(mesh, known_job(8))
        assert resident_bytes(mesh, "router-1") - memory_before < 64 << 20
        await settled(mesh, timeout_s=3.0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(60):
                while await call.read() is not grpc.aio.EOF:
                    pass
        refusal = refusal_from(raised.value)
        assert (refusal.status, refusal.reason) == ("ABORTED", "CLIENT_STALLED"), refusal
        assert "read faster, or resume" in refusal.message
        assert int(refusal.metadata["stalled_ms"]) >= 1000 * STALL_S


async def test_a_client_that_reads_slowly_is_not_aborted(mesh: Mesh) -> None:
    """It pauses again and again, each time for less than the limit: nothing is lost, and nobody complains."""
    job = known_job(600)
    assert isinstance(job.prompt, str)
    ids: list[int] = []
    async for chunk in mesh.client.generate(job.prompt, **job.options):
        ids += chunk.ids
        if len(ids) % 150 == 0:
            await asyncio.sleep(STALL_S / 2)
    assert tuple(ids) == job.answers[0].ids


async def test_five_hundred_connections_that_say_nothing(mesh: Mesh) -> None:
    host, _, port = mesh.routers[0].rpartition(":")
    connections = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(500)))
    try:
        began = time.monotonic()
        await serves_on(mesh, known_job())
        assert time.monotonic() - began < 40.0
    finally:
        for _, writer in connections:
            writer.transport.abort()


@pytest.mark.parametrize("daemon", SILENT_STREAMS)
async def test_streams_that_send_no_hello_wait_and_cost_nobody(mesh: Mesh, daemon: str) -> None:
    """Two hundred of them on one connection: they hold no request, no entry and no claim, and end with it."""
    async with raw_channel(mesh.cluster.address(daemon)) as channel:
        calls = [channel.stream_stream(SILENT_STREAMS[daemon])() for _ in range(200)]
        await asyncio.sleep(0.2)
        await serves_on(mesh, known_job())
        assert (await mesh.scheduler_state()).num_routers == 1
        # One that closes without a word: only the scheduler insists on a hello. It has a connection of its own: eight
        # streams of a connection are read, the others wait and are refused.
        async with raw_channel(mesh.cluster.address(daemon)) as other:
            silent = other.stream_stream(SILENT_STREAMS[daemon])()
            await silent.done_writing()
            refusal = await refusal_of(silent)
        assert (refusal.reason if refusal else "OK") == ("PROTOCOL_VIOLATION" if daemon == "scheduler" else "OK")
        for call in calls:
            call.cancel()
