"""Where the time of requests goes at this scheduler, told to metrics and tracer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import Attributes, Span, Tracer
from radixmesh.daemons.scheduler.request_observer import RequestObserver
from radixmesh.daemons.scheduler.results.stop_conditions import FinishReason
from radixmesh.daemons.scheduler.sequence import Request


@dataclass(slots=True)
class _Times:
    """Moments of time.monotonic(); None = not yet."""

    span: Span
    accepted_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None


class RequestTimes(RequestObserver):
    """Spans: scheduler.request holds scheduler.queue (submit to slot), scheduler.prefill (slot to token, once per
    admission) and scheduler.decode (first token to end)."""

    def __init__(self, metrics: Metrics, tracer: Tracer) -> None:
        self._queue_seconds = metrics.queue_seconds
        self._prefill_seconds = metrics.prefill_seconds
        self._tracer = tracer
        self._times: dict[Request, _Times] = {}

    def accepted(self, request: Request) -> str:
        submission = request.submission
        attributes: Attributes = {
            "radixmesh.request_id": request.key.request_id,
            "radixmesh.index": request.key.index,
            "radixmesh.attempt": submission.attempt,
            "radixmesh.prompt_len": request.prompt_len,
            "radixmesh.resumed_len": len(request.output),
        }
        times = _Times(self._tracer.begin("scheduler.request", submission.trace_context, attributes))
        self._times[request] = times
        return times.span.context

    def admitted(self, request: Request) -> None:
        times, now = self._times[request], time.monotonic()
        if times.admitted_s is None:
            self._queue_seconds.observe(now - times.accepted_s)
            self._tracer.record("scheduler.queue", times.span.context, times.accepted_s, now, {})
        else:
            times.span.event("admitted_again", {})
        times.admitted_s = now

    def prefilled(self, request: Request) -> None:
        times, now = self._times[request], time.monotonic()
        if times.admitted_s is None:
            return
        attributes: Attributes = {"radixmesh.cached_len": max(0, request.cached_tokens)}
        self._tracer.record("scheduler.prefill", times.span.context, times.admitted_s, now, attributes)
        if times.first_token_s is None:
            self._prefill_seconds.observe(now - times.admitted_s)
            times.first_token_s = now

    def finished(self, request: Request, reason: FinishReason) -> None:
        times = self._times.pop(request)
        if not times.span.context:
            return
        if times.first_token_s is not None:
            self._tracer.record("scheduler.decode", times.span.context, times.first_token_s, time.monotonic(), {})
        attributes: Attributes = {
            "radixmesh.output_len": len(request.output),
            "radixmesh.cached_len": max(0, request.cached_tokens),
            "radixmesh.finish_reason": reason.name.lower(),
        }
        times.span.end(attributes)
