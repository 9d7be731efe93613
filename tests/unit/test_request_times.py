"""Times of requests: what is observed when, and the spans of those requests that are traced."""

from __future__ import annotations

from typing import Any

import pytest
from support.router_requests import new_request

from radixmesh.daemons.router.placement.placement import Decision
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Ending, Journal, Request
from radixmesh.daemons.router.requests.request_times import RequestTimes
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.metrics import Metrics


class Trace:
    """A span and its tracer in one: notes what it is told. context: "" = the request is not traced."""

    def __init__(self, context: str = "00-a-b-01") -> None:
        self.context = context
        self.told: list[tuple[Any, ...]] = []

    def root(self, name: str, parent: str, attributes: dict[str, Any]) -> Trace:
        self.told.append((name, parent, attributes))
        return self

    def record(self, name: str, parent: str, begin_s: float, end_s: float, attributes: dict[str, Any]) -> None:
        self.told.append((name, parent, begin_s, end_s, attributes))

    def event(self, name: str, attributes: dict[str, Any]) -> None:
        self.told.append((name, attributes))

    def end(self, attributes: dict[str, Any], *, error: str = "") -> None:
        self.told.append((attributes, error))


class World:
    def __init__(self, context: str = "00-a-b-01", n: int = 1) -> None:
        self.now = 100.0
        self.trace = Trace(context)
        self.metrics = Metrics("router")
        self.times = RequestTimes(self.metrics, self.trace, lambda: self.now)  # type: ignore[arg-type]
        self.request: Request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), n=n, resumption=2)
        self.request.span = self.trace  # type: ignore[assignment]

    def seen(self, name: str, **labels: str) -> tuple[float, float]:
        """(observations, their sum) of a histogram."""
        count, total = (self.value(f"{name}_{what}", **labels) for what in ("count", "sum"))
        return count, total

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"radixmesh_{name}", labels)
        assert found is not None, name
        return found


def test_the_first_delta_is_a_time_to_first_token_and_later_ones_are_gaps() -> None:
    world = World(n=2)
    one, two = world.request.outputs
    world.times.delivered(one, 99.0, is_first=True)
    world.now = 100.5
    world.times.delivered(one, 99.0, is_first=False)
    world.times.delivered(two, 99.0, is_first=True)
    assert world.seen("time_to_first_token_seconds") == (2, 2.5)
    assert world.seen("inter_token_latency_seconds") == (1, 0.5)
    assert world.request.first_token_s == 1.0, "of the output that was first"
    assert world.trace.told == [("first_token", {"radixmesh.index": 0}), ("first_token", {"radixmesh.index": 1})]


def test_a_resumed_stream_has_no_gap_before_its_first_delta_here() -> None:
    world = World()
    world.times.delivered(world.request.outputs[0], 99.0, is_first=False)
    assert world.seen("inter_token_latency_seconds") == (0, 0) == world.seen("time_to_first_token_seconds")
    assert world.request.outputs[0].delivered_s == 100.0


def test_hops_are_observed_by_daemon() -> None:
    world = World()
    world.request.outputs[0].state_since = 98.0
    world.times.encoded(99.75)
    world.times.first_token_came(world.request.outputs[0])
    world.times.detokenized(0.125)
    hops = [world.seen("hop_seconds", hop=daemon) for daemon in ("tokenizer", "scheduler", "detokenizer")]
    assert hops == [(1, 0.25), (1, 2.0), (1, 0.125)]


def test_a_decision_counts_cached_and_uncached_tokens() -> None:
    world = World()
    world.times.routed(Decision(row=0, num_tokens=10, matched_tokens=7, best_tokens=7, keys=[]))
    assert [world.value("routed_tokens_total", known=kind) for kind in ("cached", "uncached")] == [7, 3]


@pytest.mark.parametrize("context", ["", "00-a-b-01"])
def test_only_traced_requests_have_spans(context: str) -> None:
    world = World(context)
    output = world.request.outputs[0]
    output.attempt_no = 1
    output.ids.extend([1, 2, 3])
    world.times.submitted(output, "s:1", 97.0)
    world.times.delivered(output, 99.0, is_first=True)
    world.times.left(None, world.trace, "given up")  # type: ignore[arg-type]
    queued = {
        "radixmesh.index": 0,
        "radixmesh.attempt": (2 << 16) + 1,
        "radixmesh.scheduler": "s:1",
        "radixmesh.resumed_len": 3,
    }
    told = [
        ("router.queue", context, 97.0, 100.0, queued),
        ("first_token", {"radixmesh.index": 0}),
        ({}, "given up"),
    ]
    assert world.trace.told == (told if context else [])


@pytest.mark.parametrize(("error", "expected"), [("", "because"), ("the client left", "the client left")])
def test_the_span_of_a_request_says_how_it_went(error: str, expected: str) -> None:
    world = World(n=3)
    failure = MeshError(ErrorReason.ERROR_REASON_INTERNAL, "because")
    endings = [
        Ending(reason=FinishReason.STOP, num_output=2, cached_tokens=5),
        Ending(reason=FinishReason.ERROR, num_output=0, cached_tokens=3, error=failure),
    ]
    for output, ending in zip(world.request.outputs, endings, strict=False):
        output.ending = ending
    world.request.outputs[0].ids.extend([1, 2])
    world.request.first_token_s = 0.0123456
    world.times.left(world.request, world.trace, error)  # type: ignore[arg-type]
    ((attributes, said),) = world.trace.told
    assert attributes == {
        "radixmesh.model": "m",
        "radixmesh.prompt_len": 4,
        "radixmesh.output_len": 2,
        "radixmesh.cached_len": 5,
        "radixmesh.finish_reasons": "stop,error",
        "radixmesh.ttft_ms": 12.346,
    }
    assert expected in said
