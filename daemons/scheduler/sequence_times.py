"""Times of sequences in this scheduler, for metrics and tracer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import Attributes, Span, Tracer
from radixmesh.daemons.scheduler.sequence import Sequence
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver


@dataclass(slots=True)
class _Times:
    """Moments of time.monotonic(); None = not yet."""

    span: Span
    accepted_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None


class SequenceTimes(SequenceObserver):
    """Spans: scheduler.request holds scheduler.queue (submit to slot), scheduler.prefill (slot to token, once per
    admission) and scheduler.decode (first token to end)."""

    def __init__(self, metrics: Metrics, tracer: Tracer) -> None:
        self._queue_seconds = metrics.queue_seconds
        self._prefill_seconds = metrics.prefill_seconds
        self._tracer = tracer
        self._times: dict[Sequence, _Times] = {}

    def accepted(self, sequence: Sequence) -> str:
        submission = sequence.submission
        attributes: Attributes = {
            "radixmesh.request_id": sequence.key.request_id,
            "radixmesh.index": sequence.key.index,
            "radixmesh.attempt": submission.attempt,
            "radixmesh.prompt_len": sequence.prompt_len,
            "radixmesh.resumed_len": len(sequence.output),
        }
        times = _Times(self._tracer.begin("scheduler.request", submission.trace_context, attributes))
        self._times[sequence] = times
        return times.span.context

    def admitted(self, sequence: Sequence) -> None:
        times, now = self._times[sequence], time.monotonic()
        if times.admitted_s is None:
            self._queue_seconds.observe(now - times.accepted_s)
            self._tracer.record("scheduler.queue", times.span.context, times.accepted_s, now, {})
        else:
            times.span.event("admitted_again", {})
        times.admitted_s = now

    def prefilled(self, sequence: Sequence) -> None:
        times, now = self._times[sequence], time.monotonic()
        if times.admitted_s is None:
            return
        attributes: Attributes = {"radixmesh.cached_len": max(0, sequence.cached_tokens)}
        self._tracer.record("scheduler.prefill", times.span.context, times.admitted_s, now, attributes)
        if times.first_token_s is None:
            self._prefill_seconds.observe(now - times.admitted_s)
            times.first_token_s = now

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        times = self._times.pop(sequence)
        if not times.span.context:
            return
        if times.first_token_s is not None:
            self._tracer.record("scheduler.decode", times.span.context, times.first_token_s, time.monotonic(), {})
        attributes: Attributes = {
            "radixmesh.output_len": len(sequence.output),
            "radixmesh.cached_len": max(0, sequence.cached_tokens),
            "radixmesh.finish_reason": reason.name.lower(),
        }
        times.span.end(attributes)
