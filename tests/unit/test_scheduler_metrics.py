"""A scheduler's exported metrics agree with what it did."""

from __future__ import annotations

import pytest
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.scheduler.scheduler_metrics import SchedulerMetrics


def test_counters_and_gauges_are_those_of_a_life() -> None:
    metrics = Metrics()
    exported = SchedulerMetrics(metrics)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"radixmesh_{name}", labels)

    world = World(num_pages=96, num_slots=2, max_queue=3, eos_rate=0.0, queue_policy="priority")
    exported.export(world.planner, 1.0)
    prompt = [2 + i for i in range(48)]
    records = [world.submit(prompt, sampling=Sampling(temperature=0.0), stop=Stop(max_tokens=6)) for _ in range(4)]
    assert records[3].rejected is not None
    world.plan()
    exported.planned(0.0004)
    exported.export(world.planner, 1.5)
    assert (value("requests_running"), value("requests_queued"), value("requests_waiting_for_prefix")) == (1, 2, 2)
    assert value("plans_in_flight") == 1
    assert value("pages", state="owned") > 0 and value("queued_tokens") == 2 * 48  # type: ignore[operator]
    while world.execute():
        result = world.results[-1]
        world.process()
        exported.processed(result, len(result.counts), 0.0003)
        world.plan()
    world.submit([60] * 60, stop=Stop(max_tokens=1))  # Evicts.
    world.run()
    exported.export(world.planner, 2.0)
    assert value("plans_in_flight") == 0
    counters = world.planner.counters
    assert value("steps_total") == counters.num_steps > 5
    assert value("step_tokens_total", kind="prefill") == counters.prefilled_tokens == 48 + 2 + 60
    assert value("step_tokens_total", kind="decode") == value("output_tokens_total") == 3 * 6 + 1
    assert value("requests_started_total") == 4 and value("requests_rejected_total") == 1
    assert value("requests_finished_total", reason="length") == 4
    assert value("prompt_tokens_total") == 3 * 48 + 60 and value("cached_tokens_total") == 2 * 47
    assert 0 < value("cache_hit_ratio") < 1  # type: ignore[operator]
    assert value("prefix_deduplications_total") == 2 and value("page_evictions_total") > 0  # type: ignore[operator]
    assert (
        value("page_invariant_violations_total"),
        value("requests_preempted_total"),
        value("requests_waiting_for_prefix"),
    ) == (0, 0, 0)
    assert value("plan_seconds_count") == 1 and value("process_seconds_count") == value("step_seconds_count") > 0  # type: ignore[operator]
    assert value("tokens_per_second") == counters.output_tokens / 0.5 == 38.0
    idle_s = 0.5 - value("device_busy_seconds_total")  # type: ignore[operator]
    assert value("gpu_idle_ratio") == pytest.approx(idle_s / 0.5) and 0 < idle_s < 0.5
    evicted = value("page_evictions_total")
    world.begin_epoch()
    exported.export(world.planner, 2.5)
    assert (value("tokens_per_second"), value("gpu_idle_ratio")) == (0.0, 1.0)
    assert value("page_evictions_total") == evicted, "an epoch that ends takes nothing back"
