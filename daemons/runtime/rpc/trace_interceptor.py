"""The trace that a call belongs to, from its metadata to the task that handles it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from radixmesh.daemons.runtime.telemetry.tracing import TRACEPARENT, is_traceparent, set_context

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Binds the W3C context of the caller; current_context() gives it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[_Req, _Resp] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[_Req, _Resp] | None:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TRACEPARENT and isinstance(value, str) and is_traceparent(value):
                set_context(value)
        return await continuation(handler_call_details)
