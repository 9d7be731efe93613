"""Plans that a worker has not answered: their number, and the patience of its health with the oldest that runs."""

from __future__ import annotations

from typing import Any

from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.worker.plans.plans_in_flight import PlansInFlight
from radixmesh.worker.v1 import worker_pb2


class Health:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def work_pending(self, num: int, *, patience_s: float = 0.0) -> None:
        self.told.append((num, patience_s))


def plan(step_id: int, expected_us: int) -> worker_pb2.StepPlan:
    message = worker_pb2.StepPlan()
    message.header.epoch, message.header.step_id, message.header.expected_us = 1, step_id, expected_us
    return message


def test_health_waits_for_the_oldest_plan_that_runs_and_counts_all() -> None:
    health: Any = Health()
    plans = PlansInFlight(health, Metrics("worker"))
    plans.export()
    plans.received(plan(1, 2_000_000), will_run=True)
    plans.received(plan(2, 1_000_000), will_run=True)
    plans.received(plan(2, 9_000_000), will_run=False)
    plans.export()
    plans.answered(1, 1)
    plans.export()
    plans.answered(1, 2)
    plans.received(plan(3, 0), will_run=True)
    plans.export()
    # Three times the expected time; of a step of which nobody knows anything, a minute.
    assert health.told == [(0, 0.0), (3, 6.0), (2, 3.0), (2, 60.0)]
    plans.answered(1, 2)
    plans.answered(1, 3)
    plans.export()
    assert health.told[-1] == (0, 0.0)
