"""Spans of requests, which show where their time goes. No OpenTelemetry here: it is imported when it is on.

A span belongs under the one whose context (a W3C traceparent) it is given. Contexts travel with requests: in metadata
of unary calls and of clients' calls, in messages of streams, which carry many requests. Only routers begin traces; all
others record what comes with a context, so that a request is in a trace whole or not at all.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar

from radixmesh.daemons.runtime.errors import MeshError

Attributes = Mapping[str, str | int | float | bool]
TRACEPARENT = "traceparent"
# Version, trace id, span id, flags. What later versions add behind is not taken.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

# A context variable is per task, not global state: each handler sees its own.
_context: ContextVar[str] = ContextVar("radixmesh_trace_context", default="")


class Span(ABC):
    """Something that takes time. context: for what happens within it; empty = it is not recorded."""

    context: str = ""

    @abstractmethod
    def event(self, name: str, attributes: Attributes) -> None:
        """Something happened within it now."""

    @abstractmethod
    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """It is over. error: why it failed; empty = it did not. Call once."""


class Tracer(ABC):
    """Makes spans. Any thread may call it."""

    is_on: bool = True

    @abstractmethod
    def root(self, name: str, parent: str, attributes: Attributes) -> Span:
        """A span that begins now: under parent, or a trace of its own if parent is empty or no traceparent."""

    @abstractmethod
    def begin(self, name: str, parent: str, attributes: Attributes) -> Span:
        """A span that begins now under parent; one that is not recorded if parent is empty or no traceparent."""

    @abstractmethod
    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span under parent that is over, by moments of time.monotonic(); nothing where begin() would record none."""

    @abstractmethod
    def close(self) -> None:
        """Sends what is left, without waiting long. Spans that end later are lost. Idempotent."""


class NoSpan(Span):
    """A span that nobody sees."""

    def event(self, name: str, attributes: Attributes) -> None:
        return

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        return


class NoTracer(Tracer):
    """Tracing is off."""

    is_on = False

    def __init__(self) -> None:
        self._span = NoSpan()

    def root(self, name: str, parent: str, attributes: Attributes) -> Span:
        return self._span

    def begin(self, name: str, parent: str, attributes: Attributes) -> Span:
        return self._span

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        return

    def close(self) -> None:
        return


def make_tracer(
    endpoint: str | None, daemon: str, instance_id: str, environ: Mapping[str, str] | None = None
) -> Tracer:
    """The tracer that sends to a collector at endpoint, else to that of OTEL_EXPORTER_OTLP_ENDPOINT, else none.

    Raises MeshError UNSUPPORTED where OpenTelemetry is not installed.
    """
    environ = os.environ if environ is None else environ
    if endpoint is None and environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        endpoint = next((environ[name] for name in _ENDPOINT_VARIABLES if environ.get(name)), None)
    if endpoint is None:
        return NoTracer()
    try:
        from radixmesh.daemons.runtime.telemetry.otel_tracing import OtelTracer
    except ImportError as error:
        from radixmesh.common.v1.common_pb2 import ErrorReason

        message = f"tracing needs OpenTelemetry ({error}): pip install 'radixmesh[otel]', or leave --otlp-endpoint out"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "otlp_endpoint"}) from error
    return OtelTracer(endpoint, daemon, instance_id)


def is_traceparent(text: str) -> bool:
    """True if text is a context as W3C writes it."""
    return _TRACEPARENT.fullmatch(text) is not None


def set_context(context: str) -> None:
    """Binds a context for the rest of the current task."""
    _context.set(context)


def current_context() -> str:
    """The bound context, empty if none is: what the caller sent, or what set_context() was given since."""
    return _context.get()
