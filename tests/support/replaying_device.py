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

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        results: list[torch.Tensor] = []

        def replay() -> torch.Tensor:
            result = work()
            self.replayed.append(tuple(result.shape))
            if not results:
                results.append(result)
            return results[0].copy_(result)

        return replay
