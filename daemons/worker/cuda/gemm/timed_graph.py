"""Device time of work as it runs inside a decode step: captured, back to back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

_CACHE_BYTES = 256 << 20
Matrix = TypeVar("Matrix")


class TimedGraph:
    """Launches captured in a graph of their own, on a stream that is not the default one and on which all run here.

    The first launch runs once before, so that what it loads and allocates is there; they allocate nothing else.
    """

    def __init__(self, launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream) -> None:
        self._count = len(launches)
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launches[0]()
            stream.synchronize()
            # Not torch.cuda.graph(): it empties caches each time, which takes longer than what is measured.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for launch in launches:
                    launch()
            finally:
                self._graph.capture_end()

    def micros(self) -> float:
        """Of one launch: a replay's device time by the number of launches. Waits for it."""
        return elapsed_micros(self._graph.replay, self._stream) / self._count


def elapsed_micros(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Device time of `work` on the stream, and of nothing before it. Waits for it."""
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def beyond_cache(matrices: Sequence[Matrix], nbytes: int) -> Sequence[Matrix]:
    """The first of them, of so many bytes each, that no cache holds together: what a step's GEMMs find."""
    return matrices[: max(1, -(-_CACHE_BYTES // nbytes))]
