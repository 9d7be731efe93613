"""Spans of requests in slots, from the plan that admits one to the plan that releases it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixmesh.daemons.runtime.steps.step import Admit, StepPlan, StepResult
from radixmesh.daemons.runtime.telemetry.tracing import Span, Tracer


@dataclass(slots=True)
class _Traced:
    """A slot whose request is traced. prefill_ns: device time of the steps that computed chunks of it."""

    span: Span
    generation: int
    first_step: int
    num_chunks: int = 0
    prefill_ns: int = 0


@dataclass(frozen=True, slots=True)
class TracedChunk:
    """A chunk of a traced request in a plan that runs."""

    traced: _Traced
    length: int

    def ran(self, result: StepResult) -> None:
        """The plan has run, on the device for as long as the result says."""
        device_ns = max(0, result.device_end_ns - result.device_start_ns)
        self.traced.num_chunks += 1
        self.traced.prefill_ns += device_ns
        self.traced.span.event(
            "chunk",
            {
                "radixmesh.step": result.step_id,
                "radixmesh.chunk_len": self.length,
                "radixmesh.device_ms": device_ns / 1e6,
            },
        )


class SlotTraces:
    """The traced slots of one worker; costs next to nothing for plans without any. The step thread calls it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._slots: dict[int, _Traced] = {}

    def launched(self, plan: StepPlan) -> Sequence[TracedChunk]:
        """A plan is about to be launched; what of it is traced."""
        if not self._slots and not plan.admits:
            return ()
        if self._slots:
            for release in plan.releases:
                traced = self._slots.get(release.slot)
                if traced is not None and traced.generation == release.generation:
                    self._end(release.slot, plan.step_id)
        for admit in plan.admits:
            if admit.trace_context:
                self._begin(admit, plan)
        slots = self._slots
        return [TracedChunk(slots[chunk.slot], chunk.length) for chunk in plan.chunks if chunk.slot in slots]

    def begin_epoch(self) -> None:
        """All slots are free."""
        for slot in tuple(self._slots):
            self._end(slot, 0)

    def _begin(self, admit: Admit, plan: StepPlan) -> None:
        span = self._tracer.begin(
            "worker.request",
            admit.trace_context,
            {
                "radixmesh.request_id": admit.request_id,
                "radixmesh.index": admit.index,
                "radixmesh.slot": admit.slot,
                "radixmesh.epoch": plan.epoch,
                "radixmesh.first_step": plan.step_id,
                "radixmesh.cached_len": admit.cached_len,
            },
        )
        if span.context:
            self._slots[admit.slot] = _Traced(span, admit.generation, plan.step_id)

    def _end(self, slot: int, step_id: int) -> None:
        traced = self._slots.pop(slot)
        attributes: dict[str, str | int | float | bool] = {
            "radixmesh.num_chunks": traced.num_chunks,
            "radixmesh.prefill_device_ms": traced.prefill_ns / 1e6,
        }
        if step_id:
            attributes["radixmesh.num_steps"] = step_id - traced.first_step
        traced.span.end(attributes, error="" if step_id else "the epoch ended")
