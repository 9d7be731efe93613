"""Captured steps, by number of rows: of decodes, with prompts, with drafts. One launch for some hundreds of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.step.verify_shapes import even_sizes


class StepGraphs:
    """Graphs for `sizes` rows (ascending). A step of fewer rows runs in the next larger one, with rows of padding."""

    def __init__(self, device: Device, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes if device.can_capture else ()
        self._device = device
        self._graphs: dict[tuple[int, str], Callable[[], torch.Tensor]] = {}
        self.captured_sizes: list[int] = []
        """In the order of their captures."""

    def bucket(self, num_rows: int) -> int | None:
        """Rows of the graph for a step, captured or not; None if it is too large for all."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def captured(self, num_rows: int) -> int | None:
        """Rows of the smallest captured graph for a step; None if there is none."""
        return next((size for size in self.sizes if size >= num_rows and size in self.captured_sizes), None)

    def of_size(self, num_rows: int) -> int | None:
        """The same number, if a graph is captured for just so many rows."""
        return num_rows if num_rows in self.captured_sizes else None

    def capture(
        self,
        num_rows: int,
        variant: str,
        work: Callable[[], torch.Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs `work`, which compiles what it needs, then records it, and replays it: its first launch takes longer.

        prepare: called ahead of each, puts in its place what `work` reads, as ahead of any replay.
        """
        self.run(num_rows, variant, work, prepare)
        replay = self._device.capture(work)
        prepare()
        replay()
        self._graphs[num_rows, variant] = replay
        if num_rows not in self.captured_sizes:
            self.captured_sizes.append(num_rows)

    def run(
        self,
        num_rows: int,
        variant: str,
        work: Callable[[], torch.Tensor],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """As capture(), without a graph: for graphs that have to wait until the ranks have met."""
        prepare()
        work()

    @property
    def num_captured(self) -> int:
        """Graphs of all sizes and variants."""
        return len(self._graphs)

    def drop(self) -> None:
        """Forgets all graphs: nothing is replayed until they are captured again."""
        self._graphs.clear()
        self.captured_sizes.clear()

    def replay(self, num_rows: int, variant: str) -> torch.Tensor:
        """Launches a graph; its result, which the next replay of any graph overwrites."""
        return self._graphs[num_rows, variant]()


def sizes_to_compile(sizes: Sequence[int]) -> list[int]:
    """Those of `sizes` whose steps have all kernels, or nearly: kernels are chosen by powers of two."""
    return [size for size in sizes if size.bit_count() == 1 or size == max(sizes)]


def default_graph_rows(max_rows: int) -> tuple[int, ...]:
    """Sizes up to max_rows: close where a row of padding costs much, 32 apart where it costs little."""
    sizes = {1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, *range(160, 1025, 32), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def tuned_rows(
    graph_rows: Sequence[int], max_drafts: int, two_batch_min_rows: int = 0, *, has_levels: bool = False
) -> tuple[int, ...]:
    """Rows of the forwards of steps of such sizes: of those without drafts, and of those that verify them. GEMMs have
    kernels of their own for these numbers of rows alone; for all others the library's first choice. has_levels: a
    network drafts chains, and steps may verify fewer of each row."""
    sizes = {size * width for size in graph_rows for width in (1, 1 + max_drafts)}
    if has_levels and max_drafts:
        sizes |= {*even_sizes(graph_rows, max_drafts)}
    if two_batch_min_rows:
        cut = [size for size in graph_rows if size >= max(2, two_batch_min_rows)]
        sizes |= {half for size in cut for half in (size // 2, -(-size // 2))}
    return tuple(sorted(sizes))
