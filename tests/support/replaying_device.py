"""A device that captures on the host: a replay does the work again and leaves the result where the capture did."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixmesh.daemons.worker.cuda.device import HostDevice


class ReplayingDevice(HostDevice):
    """Replays work as a graph does: tensors are read anew, numbers stay what they were at the capture.

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
