"""CPU time that a scheduler spends on a step, by what it spends it on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

PARTS = ("plan", "encode", "write", "read", "process", "token_batch")


class StepCosts:
    """Nanoseconds of this thread's CPU time by step and part, and the requests that ran in each step.

    Thread time does not count what others do to the machine meanwhile, apart from the caches they share.
    """

    def __init__(self) -> None:
        self._rows: dict[int, npt.NDArray[np.int64]] = {}
        self._running: dict[int, int] = {}
        self._spent = np.zeros(len(PARTS), np.int64)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what happens inside for the step that charge() names next."""
        start = time.thread_time_ns()
        yield
        self._spent[PARTS.index(name)] += time.thread_time_ns() - start

    def charge(self, step_id: int, num_running: int | None = None) -> None:
        """All that was counted since the last charge was for this step."""
        row = self._rows.get(step_id)
        self._rows[step_id] = self._spent if row is None else row + self._spent
        self._spent = np.zeros(len(PARTS), np.int64)
        if num_running is not None:
            self._running[step_id] = num_running

    def report(self, at_least: int = 0) -> dict[str, object]:
        """Percentiles over the steps with so many requests running; milliseconds a step, microseconds a part."""
        steps = [row for step, row in self._rows.items() if self._running.get(step, 0) >= at_least]
        if not steps:
            return {"num_steps": 0}
        table = np.array(steps, np.float64)
        return {
            "num_steps": len(steps),
            "ms": percentiles(table.sum(axis=1) / 1e6),
            "parts_us": {name: percentiles(table[:, i] / 1e3, digits=1) for i, name in enumerate(PARTS)},
        }


def percentiles(values: npt.NDArray[np.float64], digits: int = 4) -> dict[str, float]:
    """p50, p99, mean and max; zeros where there is nothing."""
    if not len(values):
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0, "max": 0.0}
    p50, p99 = np.percentile(values, (50, 99))
    rounded = {"p50": p50, "p99": p99, "mean": values.mean(), "max": values.max()}
    return {name: round(float(value), digits) for name, value in rounded.items()}
