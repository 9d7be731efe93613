"""Launches of steps: how long each took, beside what, and where the thread was in those that took long.

`cpu_ms` of a launch is the time in which its thread ran; the rest it waited: for the interpreter's lock, in the driver,
or for an event. `where` tells which: a thread of the watch looks every 2 ms at a launch that has taken 5 ms already,
and names the project's innermost line, and the innermost call behind it. Lines all over a launch, mostly behind small
operations of torch, mean the lock; one and the same line means what it calls. `copiers`: where the threads that start
copies of KV were meanwhile. `gc_ms`: of it, in the garbage collector.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

_LONG_S, _LOOK_S = 0.005, 0.002
_BUCKETS_MS = (1, 2, 5, 10, 20, 50)
_MOST_LONGEST, _MOST_LINES = 6, 8
_COPIERS = "kv-"
"""Names of threads that start copies begin so."""


class Launch(NamedTuple):
    what: str
    ms: float
    cpu_ms: float
    gc_ms: float
    where: tuple[str, ...]
    copiers: tuple[str, ...]


class LaunchWatch:
    """Of the thread that makes it. clock: seconds. looks: False, nobody looks where a launch is: of virtual time."""

    def __init__(self, clock: Callable[[], float], *, looks: bool = True) -> None:
        self._clock, self._looks = clock, looks
        self._step_thread = threading.get_ident()
        self.launches: list[Launch] = []
        self._began: float | None = None
        self._where: list[str] = []
        self._copiers: list[str] = []
        self._gc_s = self._gc_began = 0.0
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The watch looks meanwhile."""
        if not self._looks:
            yield
            return
        thread = threading.Thread(target=self._look, name="launch-watch", daemon=True)
        gc.callbacks.append(self._collecting)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            gc.callbacks.remove(self._collecting)

    @contextmanager
    def launching(self, what: str) -> Iterator[None]:
        self._where, self._copiers, self._gc_s = [], [], 0.0
        cpu, begin = time.thread_time(), self._clock()
        self._began = begin
        yield
        self._began = None
        ms, cpu_ms = 1000 * (self._clock() - begin), 1000 * (time.thread_time() - cpu)
        where, copiers = tuple(self._where), tuple(self._copiers)
        self.launches.append(Launch(what, ms, cpu_ms, 1000 * self._gc_s, where, copiers))

    def summary(self) -> dict[str, object]:
        by_kind: dict[str, list[Launch]] = defaultdict(list)
        for launch in self.launches:
            by_kind[launch.what].append(launch)
        longest = sorted(self.launches, key=lambda launch: -launch.ms)[:_MOST_LONGEST]
        is_long = [launch for launch in self.launches if launch.where]
        return {
            "kinds": {what: _of_kind(launches) for what, launches in sorted(by_kind.items())},
            "longest": [_of_launch(launch) for launch in longest if launch.ms >= 1000 * _LONG_S],
            "where": _counted(line for launch in is_long for line in launch.where),
            "copiers": _counted(line for launch in is_long for line in launch.copiers),
        }

    def _collecting(self, phase: str, info: object) -> None:
        if threading.get_ident() != self._step_thread:
            return
        now = time.perf_counter()
        if phase == "start":
            self._gc_began = now
        else:
            self._gc_s += now - self._gc_began

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            began = self._began
            if began is None or self._clock() - began < _LONG_S:
                continue
            frames = sys._current_frames()
            where, copiers = self._where, self._copiers
            if (frame := frames.get(self._step_thread)) is not None:
                where.append(line_of(frame))
            for thread in threading.enumerate():
                if thread.name.startswith(_COPIERS) and (at := frames.get(thread.ident or 0)) is not None:
                    copiers.append(f"{thread.name} {line_of(at)}")


def line_of(frame: FrameType) -> str:
    """The project's innermost line, and the innermost function where that is another's."""
    innermost, at = frame, frame
    while not _is_ours(at) and at.f_back is not None:
        at = at.f_back
    if not _is_ours(at):
        at = innermost
    name = at.f_code.co_filename.split("radixmesh/")[-1]
    line = f"{name}:{at.f_lineno} {at.f_code.co_name}"
    return line if at is innermost else f"{line} > {innermost.f_code.co_name}"


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return any(f"/{folder}/" in name for folder in ("daemons", "kernels")) and "site-packages" not in name


def _of_kind(launches: list[Launch]) -> dict[str, object]:
    ms = [launch.ms for launch in launches]
    buckets = Counter(sum(each >= bound for bound in _BUCKETS_MS) for each in ms)
    names = ["<1", *(f">={bound}" for bound in _BUCKETS_MS)]
    return {
        "launches": len(ms),
        "mean_ms": round(sum(ms) / len(ms), 2),
        "mean_cpu_ms": round(sum(launch.cpu_ms for launch in launches) / len(ms), 2),
        "most_ms": round(max(ms), 2),
        "ms": {names[bucket]: num for bucket, num in sorted(buckets.items())},
    }


def _of_launch(launch: Launch) -> dict[str, object]:
    numbers = {name: round(getattr(launch, name), 2) for name in ("ms", "cpu_ms", "gc_ms")}
    return {"what": launch.what, **numbers, "where": _counted(launch.where), "copiers": _counted(launch.copiers)}


def _counted(lines: Iterator[str] | tuple[str, ...]) -> dict[str, int]:
    return dict(Counter(lines).most_common(_MOST_LINES))
