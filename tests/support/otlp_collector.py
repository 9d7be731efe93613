"""An OpenTelemetry collector for tests: keeps the spans that it is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSpan:
    """One span; ids in hex, parent "" for a root, times in nanoseconds of the epoch."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    events: tuple[str, ...]
    error: str


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """spans: in the order of arrival."""

    address: str = ""
    spans: list[SeenSpan] = field(default_factory=list)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = str(_attributes(resource.resource.attributes)["service.name"])
            for scope in resource.scope_spans:
                self.spans += [_seen(span, service) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.trace == trace]

    async def trace_with(
        self,
        is_wanted: Callable[[SeenSpan], bool],
        names: set[str],
        is_whole: Callable[[list[SeenSpan]], bool] = lambda spans: True,
    ) -> list[SeenSpan]:
        """All spans of the trace that has a span which is_wanted, once it has all of these names and is_whole."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = next((span.trace for span in self.spans if is_wanted(span)), None)
            spans = [] if found is None else self.of(found)
            if found is not None and names <= {span.name for span in spans} and is_whole(spans):
                return spans
            await asyncio.sleep(0.05)
        raise AssertionError(f"no trace with {names}: {[(s.trace[:6], s.service, s.name) for s in self.spans]}")


@asynccontextmanager
async def otlp_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)


def _seen(span: trace_pb2.Span, service: str) -> SeenSpan:
    return SeenSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        error=span.status.message,
    )


def _attributes(pairs: list[common_pb2.KeyValue]) -> dict[str, str | int | float | bool]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
