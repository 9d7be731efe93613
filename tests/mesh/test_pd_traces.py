"""One trace of a request whose prompt is computed by one group and whose output by another."""

from __future__ import annotations

from collections import Counter

import pytest
from mesh.test_pd import CHECKED, state_of
from support.mesh import SERVICES, running_mesh
from support.otlp_collector import SeenSpan, otlp_collector

BOTH_SIDES = ("scheduler.request", "worker.request")


@pytest.mark.full
async def test_a_trace_spans_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    async with otlp_collector() as collector:
        traced: dict[str, object] = {"otlp_endpoint": collector.address}
        names = (*SERVICES, "worker-prefill", "scheduler-prefill")
        services = {name: {**CHECKED.get(name, {}), **traced} for name in names}
        async with running_mesh("pd", services=services) as mesh:
            await mesh.client.complete("Tyger Tyger, burning bright", temperature=0.0, max_tokens=12, request_id="r")
            assert (await state_of(mesh, "scheduler")).num_kv_arrived == 1

            def is_whole(spans: list[SeenSpan]) -> bool:
                counts = Counter(span.name for span in spans)
                ids = {span.id for span in spans}
                # Each process exports its spans when it likes: a worker's may be there before its scheduler's.
                has_parents = all(span.parent in ids for span in spans if span.name == "worker.request")
                return has_parents and all(counts[name] >= 2 for name in BOTH_SIDES)

            trace = await collector.trace_with(
                lambda span: span.attributes.get("radixmesh.request_id") == "r",
                {*BOTH_SIDES, "router.request"},
                is_whole,
            )
            (request,) = [span for span in trace if span.name == "router.request"]
            by_id = {span.id: span for span in trace}
            for span in trace:
                if span.name == "scheduler.request":
                    assert span.parent == request.id, span
                if span.name == "worker.request":
                    assert by_id[span.parent].name == "scheduler.request", span
            # The prompt was computed at one of them: the other had it cached.
            cached = [
                int(str(s.attributes.get("radixmesh.cached_len", 0))) for s in trace if s.name == "worker.request"
            ]
            assert 0 in cached and max(cached) >= 8, cached
