"""A scheduler's end of the worker contract, for tests: says what it is told to, in any order."""

from __future__ import annotations

import asyncio

import grpc

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.steps.result_codec import result_from_proto
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 10.0
_EXECUTE = "/radixmesh.worker.v1.WorkerService/Execute"


class WorkerClient:
    """One Execute stream and the unary verbs. Plans go out as bytes, as a scheduler sends them."""

    def __init__(self, address: str, instance_id: str) -> None:
        self.instance_id = instance_id
        self._channel = open_channel(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._call = self._channel.stream_stream(
            _EXECUTE, request_serializer=None, response_deserializer=worker_pb2.ExecuteResponse.FromString
        )()

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._channel.close()

    def cut(self) -> None:
        """Ends the stream without a word."""
        self._call.cancel()

    async def send(self, request: worker_pb2.ExecuteRequest | bytes) -> None:
        await self._call.write(request if isinstance(request, bytes) else request.SerializeToString())

    async def read(self) -> worker_pb2.ExecuteResponse | None:
        """The next message; None at the end of the stream. Raises the MeshError that ended it."""
        try:
            response = await asyncio.wait_for(self._call.read(), _TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from None
        return None if response is grpc.aio.EOF else response

    async def greet(self) -> worker_pb2.WorkerHello:
        await self.send(worker_pb2.ExecuteRequest(hello=make_hello(self.instance_id, "scheduler")))
        response = await self.read()
        assert response is not None and response.HasField("hello"), response
        return response.hello

    async def claim(self, epoch: int, *, takes_result_batches: bool = False) -> worker_pb2.ExecuteResponse:
        claim = worker_pb2.Claim(epoch=epoch, takes_result_batches=takes_result_batches)
        await self.send(worker_pb2.ExecuteRequest(claim=claim))
        response = await self.read()
        assert response is not None
        return response

    async def hold(self, epoch: int) -> worker_pb2.WorkerHello:
        """Greets and claims, and wins."""
        hello = await self.greet()
        response = await self.claim(epoch)
        assert response.claimed.epoch == epoch, response
        return hello

    async def plan(self, plan: StepPlan) -> None:
        await self.send(encode_plan(plan))

    async def result(self) -> StepResult:
        response = await self.read()
        assert response is not None and response.HasField("result"), response
        return result_from_proto(response.result)

    async def refusal(self) -> worker_pb2.Refusal:
        """The refusal, which must be the last message."""
        response = await self.read()
        assert response is not None and response.HasField("refusal"), response
        assert await self.read() is None
        return response.refusal

    async def ended(self) -> MeshError:
        """The error that ends the stream, whatever still comes before it."""
        try:
            while await self.read() is not None:
                pass
        except MeshError as error:
            return error
        raise AssertionError("the stream ended well")

    async def snapshot(self, epoch: int) -> list[worker_pb2.SnapshotCacheResponse]:
        request = worker_pb2.SnapshotCacheRequest(epoch=epoch, instance_id=self.instance_id)
        try:
            return [message async for message in self.stub.SnapshotCache(request, timeout=_TIMEOUT_S)]
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from None
