"""A collector for one machine: takes spans by OTLP over gRPC and keeps them in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from observability.spans import Span, SpanEvent


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens at 127.0.0.1 at any free port; an async context manager. endpoint: what daemons are told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""
        self._server = grpc.aio.server()
        self._arrived = asyncio.Event()

    async def __aenter__(self) -> OtlpReceiver:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = str(_attributes(resource.resource.attributes).get("service.name", ""))
            self.spans += [_span(span, service) for scope in resource.scope_spans for span in scope.spans]
        self._arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def wait_for(self, condition: Callable[[list[Span]], bool], timeout_s: float) -> list[Span]:
        """All spans so far, once `condition` holds for them. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition(self.spans):
                self._arrived.clear()
                await self._arrived.wait()
        return list(self.spans)


def _span(span: trace_pb2.Span, service: str) -> Span:
    return Span(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        service=service,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(SpanEvent(name=event.name, at_ns=event.time_unix_nano) for event in span.events),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: object) -> dict[str, str | int | float | bool]:
    values: dict[str, str | int | float | bool] = {}
    for pair in pairs:  # type: ignore[attr-defined]  # a repeated field
        assert isinstance(pair, common_pb2.KeyValue)
        kind = pair.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            values[pair.key] = getattr(pair.value, kind)
    return values
