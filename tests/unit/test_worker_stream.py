"""The scheduler's end of the step stream, when the worker dies between two messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.group_service import GrpcRank
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc


class QuitterWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Greets, and ends the stream: with `error`, or well."""

    def __init__(self, error: MeshError | None) -> None:
        self._error = error

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteRequest], context: object
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        await anext(request_iterator)
        yield worker_pb2.ExecuteResponse(hello=worker_pb2.WorkerHello(hello=make_hello("w", "worker")))
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, ErrorReason.ERROR_REASON_GROUP_LOST),
        (
            MeshError(ErrorReason.ERROR_REASON_EPOCH_FENCED, "somebody claimed higher"),
            ErrorReason.ERROR_REASON_EPOCH_FENCED,
        ),
    ],
)
async def test_a_write_after_the_end_says_why_the_stream_ended(
    tmp_path: Path, error: MeshError | None, reason: ErrorReason
) -> None:
    server = MeshServer(HealthService(Progress()))
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, QuitterWorker(error))
    address = f"unix:{tmp_path}/w"
    await server.start([address])
    try:
        async with open_channel(address) as channel:
            stream = WorkerStream(GrpcRank(channel), make_hello("s", "scheduler"))
            await stream.hello()
            await asyncio.sleep(0.1)  # The end is here before the claim is written.
            with pytest.raises(MeshError) as raised:
                await stream.claim(1, 0)
            assert raised.value.reason == reason
    finally:
        await server.stop(0)
