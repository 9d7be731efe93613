"""Samples of a run over time: memory, open files, steps; and if any of them crept up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from endurance.mesh import EnduranceMesh

_Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_MIB = 1 << 20
# The needs of a process in its first minute are not those for good.
_WARM_S = 60.0
_LEAST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one process: resident memory in MiB, open files, threads."""

    pid: int
    rss_mb: float
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """at: monotonic. Counters since the start of their process, by the pids of worker and scheduler; None where one of
    them was away. gpu_mb: None without a GPU, or where it was not asked."""

    at: float
    footprints: dict[str, Footprint]
    gpu_mb: float | None
    steps: StepCounters | None
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounters:
    """device_s, steps, rows: the worker's. prefill_tokens: the scheduler's."""

    device_s: float
    steps: float
    rows: float
    prefill_tokens: float


async def take_sample(mesh: EnduranceMesh, *, with_gpu: bool) -> Sample:
    """One look at everything; takes some ms."""
    worker, scheduler = await asyncio.gather(mesh.metrics("worker"), mesh.metrics("scheduler"))
    counters = None
    if "radixmesh_step_seconds_sum" in worker and "radixmesh_requests_running" in scheduler:
        counters = StepCounters(
            device_s=worker["radixmesh_step_seconds_sum"],
            steps=worker["radixmesh_step_seconds_count"],
            rows=worker["radixmesh_batch_size_sum"],
            prefill_tokens=scheduler.get('radixmesh_step_tokens_total{kind="prefill"}', 0.0),
        )
    footprints = {}
    for service, pid in mesh.pids.items():
        with suppress(OSError, ValueError):  # It may be gone by now.
            footprints[service] = _footprint(pid)
    return Sample(
        at=time.monotonic(),
        footprints=footprints,
        gpu_mb=await asyncio.to_thread(gpu_memory_mb) if with_gpu else None,
        steps=counters,
        num_running=int(scheduler.get("radixmesh_requests_running", 0)),
        num_waiting=int(scheduler.get("radixmesh_requests_queued", 0)),
    )


def gpu_memory_mb() -> float | None:
    """Memory in use of the first GPU that processes may see, in MiB; None where there is none."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout
        return float(output.split()[0])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process from its first sample to its last. Growth is a line's slope, behind the first minute (or third) of
    it; None of too few samples."""

    service: str
    seconds: float
    first_steady_mb: float
    last_mb: float
    growth_mb_min: float | None
    first_steady_fds: int
    last_fds: int
    growth_fds_min: float | None
    last_threads: int


def lives_of(samples: Sequence[Sample]) -> list[Life]:
    """Every process that was seen at least twice, by service and start."""
    seen: dict[tuple[str, int], list[tuple[float, Footprint]]] = defaultdict(list)
    for sample in samples:
        for service, footprint in sample.footprints.items():
            seen[service, footprint.pid].append((sample.at, footprint))
    lives = [_life(service, points) for (service, _), points in seen.items() if len(points) > 1]
    return sorted(lives, key=lambda life: life.service)


def _life(service: str, points: list[tuple[float, Footprint]]) -> Life:
    begun, ended = points[0][0], points[-1][0]
    steady = [point for point in points if point[0] >= begun + min(_WARM_S, (ended - begun) / 3)]
    minutes = [at / 60 for at, _ in steady]
    return Life(
        service=service,
        seconds=round(ended - begun, 1),
        first_steady_mb=steady[0][1].rss_mb,
        last_mb=steady[-1][1].rss_mb,
        growth_mb_min=_slope(minutes, [footprint.rss_mb for _, footprint in steady]),
        first_steady_fds=steady[0][1].num_fds,
        last_fds=steady[-1][1].num_fds,
        growth_fds_min=_slope(minutes, [float(footprint.num_fds) for _, footprint in steady]),
        last_threads=steady[-1][1].num_threads,
    )


def gpu_growth(samples: Sequence[Sample]) -> dict[str, float] | None:
    """First steady and last MiB in use, and the slope per minute; None without a GPU."""
    points = [(sample.at, sample.gpu_mb) for sample in samples if sample.gpu_mb is not None]
    steady = [point for point in points if point[0] >= points[0][0] + _WARM_S] or points
    if not steady:
        return None
    slope = _slope([at / 60 for at, _ in steady], [mb for _, mb in steady])
    return {"first_steady_mb": steady[0][1], "last_mb": steady[-1][1], "growth_mb_min": slope or 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps between two moments (seconds since the run began) within one life of worker and scheduler. against_model:
    device time over what the run's own linear model of steps, rows and prefill tokens expects of it."""

    since_s: float
    until_s: float
    steps: int
    ms_per_step: float
    rows_per_step: float
    prefill_per_step: float
    against_model: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """us_per: microseconds of device time that the model gives a step, a row, a prefill token. Ratios: mean of the last
    third over that of the first; normalised = of device time over the model's."""

    us_per: dict[str, float]
    windows: list[Window]
    ms_per_step_ratio: float
    normalised_ratio: float


def drift_of(samples: Sequence[Sample], began: float, window_s: float) -> Drift | None:
    """None of too few samples. The model is fitted to all pairs of neighbouring samples."""
    pairs = [(a, b) for a, b in pairwise(samples) if _is_one_life(a, b)]
    deltas = np.array([_delta(a, b) for a, b in pairs])
    if len(deltas) < 6:
        return None
    model = _fit(deltas)
    times = np.array([(a.at + b.at) / 2 - began for a, b in pairs])
    first, last = np.quantile(times, (1 / 3, 2 / 3))
    early, late = _totals(deltas[times <= first], model), _totals(deltas[times >= last], model)
    numbers = (times // window_s).astype(int)
    windows = [
        Window(
            since_s=round(number * window_s, 1),
            until_s=round((number + 1) * window_s, 1),
            steps=round(total[0]),
            ms_per_step=round(total[1], 3),
            rows_per_step=round(total[2], 1),
            prefill_per_step=round(total[3], 1),
            against_model=round(total[4], 3),
        )
        for number in np.unique(numbers).tolist()
        for total in [_totals(deltas[numbers == number], model)]
    ]
    names = ("step", "row", "prefill_token")
    return Drift(
        us_per={name: round(float(value) * 1e6, 2) for name, value in zip(names, model, strict=True)},
        windows=windows,
        ms_per_step_ratio=round(late[1] / early[1], 3),
        normalised_ratio=round(late[4] / early[4], 3),
    )


def _fit(deltas: _Array) -> _Array:
    """Device seconds that a step, a row and a prefill token take, none of them below 0: least squares of relative
    errors; what comes out negative is left out, the worst first."""
    model, used = np.zeros(deltas.shape[1] - 1), list(range(deltas.shape[1] - 1))
    while used:
        # Relative errors count, not the absolute ones of long intervals.
        columns = deltas[:, 1:][:, used] / deltas[:, :1]
        found, *_ = np.linalg.lstsq(columns, np.ones(len(deltas)), rcond=None)
        if found.min() >= 0:
            model[used] = found
            break
        del used[int(found.argmin())]
    return model


def _is_one_life(a: Sample, b: Sample) -> bool:
    if a.steps is None or b.steps is None or b.steps.steps - a.steps.steps < _LEAST_STEPS:
        return False
    pids = [{s: f.pid for s, f in x.footprints.items() if s in ("worker", "scheduler")} for x in (a, b)]
    return len(pids[0]) == 2 and pids[0] == pids[1] and b.steps.prefill_tokens >= a.steps.prefill_tokens


def _delta(a: Sample, b: Sample) -> tuple[float, float, float, float]:
    """(device seconds, steps, rows, prefill tokens) in between."""
    assert a.steps is not None and b.steps is not None
    return (
        b.steps.device_s - a.steps.device_s,
        b.steps.steps - a.steps.steps,
        b.steps.rows - a.steps.rows,
        b.steps.prefill_tokens - a.steps.prefill_tokens,
    )


def _totals(deltas: _Array, model: _Array) -> tuple[float, float, float, float, float]:
    """(steps, ms a step, rows a step, prefill tokens a step, device time over the model's)."""
    device_s, steps, rows, tokens = (float(value) for value in deltas.sum(axis=0))
    expected_s = float((deltas[:, 1:] @ model).sum())
    return steps, 1e3 * device_s / steps, rows / steps, tokens / steps, device_s / expected_s


def _slope(times: Sequence[float], values: Sequence[float]) -> float | None:
    if len(times) < 4:
        return None
    return round(float(np.polyfit(np.array(times) - times[0], np.array(values), 1)[0]), 3)


def _footprint(pid: int) -> Footprint:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Footprint(
        pid=pid,
        rss_mb=round(int(status["VmRSS"].split()[0]) * 1024 / _MIB, 1),
        num_fds=len(os.listdir(f"/proc/{pid}/fd")),
        num_threads=int(status["Threads"]),
    )
