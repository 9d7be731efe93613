"""The router's gRPC service for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from radixmesh.daemons.router.messages import identity_to_proto
from radixmesh.daemons.router.responses import response_of
from radixmesh.daemons.router.router import Router
from radixmesh.router.v1 import router_pb2, router_pb2_grpc


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """Writes what streams give, as fast as clients take it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    # A coroutine that writes itself, where the stub foresees a generator: a write that hangs has to be seen.
    async def Generate(  # type: ignore[override]
        self,
        request: router_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse],
    ) -> None:
        """See router.proto. The call's end, however it comes, ends the request."""
        stream = self._router.open(request)
        task = asyncio.current_task()
        assert task is not None
        stream.on_broken = _canceller(task)
        try:
            while (update := await stream.take()) is not None:
                # Returns when flow control lets it: meanwhile what comes up merges into the next message.
                await context.write(response_of(update))
        except asyncio.CancelledError:
            if stream.error is None:
                raise
            # Cancelled by on_broken, not by the client's leaving.
            task.uncancel()
            raise stream.error from None
        finally:
            stream.close()

    async def Abort(
        self,
        request: router_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[router_pb2.AbortRequest, router_pb2.AbortResponse],
    ) -> router_pb2.AbortResponse:
        return router_pb2.AbortResponse(outcome=await self._router.cancel(request.request_id))

    async def Tokenize(
        self,
        request: router_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[router_pb2.TokenizeRequest, router_pb2.TokenizeResponse],
    ) -> router_pb2.TokenizeResponse:
        return await self._router.tokenize(request)

    async def GetModelInfo(
        self,
        request: router_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[router_pb2.GetModelInfoRequest, router_pb2.GetModelInfoResponse],
    ) -> router_pb2.GetModelInfoResponse:
        return router_pb2.GetModelInfoResponse(
            models=[
                router_pb2.ModelInfo(
                    model=identity_to_proto(model.identity),
                    base_model=model.base_model,
                    num_schedulers=model.num_schedulers,
                )
                for model in await self._router.models()
            ]
        )


def _canceller(task: asyncio.Task[object]) -> Callable[[], None]:
    def cancel() -> None:
        task.cancel()

    return cancel
