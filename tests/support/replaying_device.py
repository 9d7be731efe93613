"""A device that captures on the host: a replay does the work again and leaves the result where the capture did."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixmesh.daemons.worker.cuda.device import HostDevice


class ReplayingDevice(HostDevice):
    """What was a tensor in the work is read anew, what was a number stays what it was at the capture: as in a graph.

    replayed: shapes of the results.
    """

    can_capture = True

    def __init__(self) -> None:
        self.replayed: list[tuple[int, ...]] = []

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = work()

        def replay() -> None:
            self.replayed.append(tuple(result.shape))
            result.copy_(work())

        return replay, result
