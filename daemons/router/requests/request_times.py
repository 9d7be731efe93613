"""Times of requests at this router, phase by phase, for metrics and tracer."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixmesh.daemons.router.placement.placement import Decision
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import Attributes, NoTracer, Span, Tracer


class RequestTimes:
    """One of a router. Moments are of its clock: monotonic seconds."""

    def __init__(
        self, metrics: Metrics, tracer: Tracer | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self.tracer = tracer or NoTracer()
        self._first_token = metrics.time_to_first_token_seconds
        self._inter_token = metrics.inter_token_latency_seconds
        self._tokenizer = metrics.hop_seconds.labels("tokenizer")
        self._scheduler = metrics.hop_seconds.labels("scheduler")
        self._detokenizer = metrics.hop_seconds.labels("detokenizer")
        self._decisions = {reason: metrics.routing_decisions.labels(reason) for reason in ("cached", "spread", "new")}
        self._cached = metrics.routed_tokens.labels("cached")
        self._uncached = metrics.routed_tokens.labels("uncached")

    def opened(self, request_id: str, parent: str, resumption: int) -> Span:
        """A client has come. parent: the context that it sent, or that of the stream which broke."""
        attributes: Attributes = {"radixmesh.request_id": request_id, "radixmesh.resumption": resumption}
        return self.tracer.root("router.request", parent, attributes)

    def encoded(self, since_s: float) -> None:
        """A tokenizer has answered."""
        self._tokenizer.observe(self._clock() - since_s)

    def submitted(self, output: Output, address: str, since_s: float) -> None:
        """An output that waited for a scheduler since then is sent to the one at address."""
        request = output.request
        if request.trace_context:
            attributes: Attributes = {
                "radixmesh.index": output.index,
                "radixmesh.attempt": output.attempt,
                "radixmesh.scheduler": address,
                "radixmesh.resumed_len": len(output.ids),
            }
            self.tracer.record("router.queue", request.trace_context, since_s, self._clock(), attributes)

    def routed(self, decision: Decision) -> None:
        """An output is submitted where placement decided."""
        self._decisions[decision.reason].inc()
        self._cached.inc(decision.matched_tokens)
        self._uncached.inc(decision.num_tokens - decision.matched_tokens)

    def first_token_came(self, output: Output) -> None:
        """The first token that this router has of an output came from its scheduler."""
        self._scheduler.observe(self._clock() - output.state_since)

    def detokenized(self, seconds: float) -> None:
        """A detokenizer took that long for the tokens of a frame."""
        self._detokenizer.observe(seconds)

    def delivered(self, output: Output, opened_s: float, is_first: bool) -> None:
        """A client can be sent new tokens of an output. Once per output and frame at most."""
        now = self._clock()
        if is_first:
            self._first_token.observe(now - opened_s)
            if output.request.trace_context:
                output.request.span.event("first_token", {"radixmesh.index": output.index})
            if output.request.first_token_s is None:
                output.request.first_token_s = now - opened_s
        elif output.delivered_s:
            self._inter_token.observe(now - output.delivered_s)
        output.delivered_s = now

    def left(self, request: Request | None, span: Span, error: str) -> None:
        """The client's stream is over. error: what ended it before its time."""
        if not span.context:
            return
        if request is None:
            span.end({}, error=error)
            return
        endings = [output.ending for output in request.outputs if output.ending is not None]
        attributes: dict[str, str | int | float | bool] = {
            "radixmesh.model": request.resolved.model,
            "radixmesh.prompt_len": request.num_prompt,
            "radixmesh.output_len": sum(len(output.ids) for output in request.outputs),
            "radixmesh.cached_len": max((ending.cached_tokens for ending in endings), default=0),
            "radixmesh.finish_reasons": ",".join(ending.reason.label for ending in endings),
        }
        if request.first_token_s is not None:
            attributes["radixmesh.ttft_ms"] = round(1000 * request.first_token_s, 3)
        failed = next((str(ending.error) for ending in endings if ending.error is not None), "")
        span.end(attributes, error=error or failed)
