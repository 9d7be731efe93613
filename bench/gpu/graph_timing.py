"""Times of kernels by replays of a CUDA graph, so that no launch by the host is in them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def micros(run: Callable[[int], object], num_turns: int, num_replays: int = 5) -> float:
    """Of one launch, the least of several replays of a graph in which launch i is `run(i)`, with inputs of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        graph.capture_begin()
        # Results are kept: memory that is free again would be in the cache.
        results = [run(turn) for turn in range(num_turns)]
        graph.capture_end()
        least = float("inf")
        for _ in range(num_replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            least = min(least, start.elapsed_time(end) * 1e3 / len(results))
    return least
