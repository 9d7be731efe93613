"""Idle time of a device by traces: one pause of the host is told as the worst window, and decides no median."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bench_modules import bench_imports

pytest.importorskip("torch")
with bench_imports():
    from gpu.idle import _read, summary


def _window(folder: Path, pause_us: float) -> dict[str, object]:
    """Of 50 steps of two kernels, with 5 us between steps; behind the 40th one the host pauses."""
    events, at = [], 0.0
    for step in range(50):
        for name, duration in (("_fetch_step_inputs_kernel", 20.0), ("_finish_kernel(int)", 975.0)):
            events.append({"cat": "kernel", "name": name, "ts": at, "dur": duration})
            at += duration
        at += 5.0 + (pause_us if step == 40 else 0.0)
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return {**_read(path), "depth_reported": 7}


def test_a_pause_is_the_worst_window_alone(tmp_path: Path) -> None:
    windows = [_window(tmp_path, pause_us) for pause_us in (0.0, 0.0, 10_000.0, 0.0, 40.0)]
    found = summary(windows)
    assert found["period_ms"] == 1.0 and found["gaps_over_20us"] == 0
    assert found["idle"] == pytest.approx(0.005, abs=2e-4) and found["longest_gap_us"] == 5.0
    assert found["idle_worst"] == pytest.approx(10_195 / 49_995, abs=1e-3)
    assert found["longest_gap_us_worst"] == 10_005.0
    assert found["idle_of_windows"] == [window["idle"] for window in windows]
    assert found["gaps_us"] == {"_finish_kernel > _fetch_step_inputs_kernel": pytest.approx(5.0, abs=0.2)}
