"""The tracer that is on: OpenTelemetry's SDK, batches to a collector by OTLP over gRPC."""

from __future__ import annotations

import threading
import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.tracing import TRACEPARENT, Attributes, NoSpan, Span, Tracer, is_traceparent

log = get_logger(__name__)

# A collector that is away must not hold up a daemon that leaves.
_CLOSE_S = 2.0
_EXPORT_S = 5.0


class OtelTracer(Tracer):
    """endpoint: http://host:port (plain), https://host:port or host:port (TLS, unless OTEL_EXPORTER_OTLP_INSECURE).

    Sampling, batching and headers go by OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, OTEL_BSP_*, ...). What a
    client does not want sampled is not recorded.
    """

    def __init__(self, endpoint: str, daemon: str, instance_id: str) -> None:
        resource = Resource.create({"service.name": f"radixmesh-{daemon}", "service.instance.id": instance_id})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("radixmesh")
        self._propagator = TraceContextTextMapPropagator()
        self._is_closed = False

    def root(self, name: str, parent: str, attributes: Attributes) -> Span:
        # An empty context: nothing ambient is ever the parent.
        context = self._context_of(parent) if is_traceparent(parent) else Context()
        return _RecordedSpan.of(self._tracer.start_span(name, context, attributes=dict(attributes)))

    def begin(self, name: str, parent: str, attributes: Attributes) -> Span:
        if not is_traceparent(parent):
            return NoSpan()
        return _RecordedSpan.of(self._tracer.start_span(name, self._context_of(parent), attributes=dict(attributes)))

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        if not is_traceparent(parent):
            return
        # By the clock of now: the system's clock may have been set since the process began.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        start_ns, end_ns = int(start_s * 1e9) + epoch_ns, int(end_s * 1e9) + epoch_ns
        span = self._tracer.start_span(name, self._context_of(parent), attributes=dict(attributes), start_time=start_ns)
        span.end(end_time=end_ns)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # A thread that does not keep the process: an export that nobody answers takes its time.
        closing = threading.Thread(target=self._provider.shutdown, name="close tracing", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            log.warning("spans_not_sent")

    def _context_of(self, parent: str) -> Context:
        return self._propagator.extract({TRACEPARENT: parent}, Context())


class _RecordedSpan(Span):
    def __init__(self, span: OtelSpan, context: str) -> None:
        self._span = span
        self.context = context

    @classmethod
    def of(cls, span: OtelSpan) -> Span:
        context = span.get_span_context()
        if not span.is_recording() or not context.trace_flags.sampled:
            return NoSpan()
        return cls(span, f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}")

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, dict(attributes))

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()
