"""The rows of a step in another order, and back."""

from __future__ import annotations

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.step.inputs.pinned_ring import PinnedRing


class RowOrder:
    """On the device, where a graph that has captured `sort` and `unsort` finds what was sent last."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._ints = torch.zeros(2, max_rows, dtype=torch.int32, device=device)
        self._pinned = PinnedRing(8 * max_rows)
        self._sent = b""

    def send(self, order: IntArray) -> None:
        """order int32 [rows]: which row comes first, second, ... The copy goes to the current stream."""
        if order.tobytes() == self._sent:
            return
        self._sent = order.tobytes()
        packed = self._pinned.take()[: 8 * self._max_rows].view(torch.int32).view(2, -1)
        ints, rows = packed.numpy(), len(order)
        ints[0, :rows] = order
        ints[1, order] = np.arange(rows)
        self._ints.copy_(packed, non_blocking=True)
        self._pinned.fence()

    def sort(self, rows_T: torch.Tensor) -> torch.Tensor:
        """[T, ...], as many as were sent, in the order that was sent."""
        return rows_T.index_select(0, self._ints[0, : len(rows_T)])

    def unsort(self, sorted_T: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(sorted_T, 0, self._ints[1, : len(sorted_T)], out=out)
