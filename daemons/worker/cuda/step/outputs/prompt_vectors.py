"""Vectors of prompts: hidden states pooled for embed tasks, and scores.

    launch    final norm -> sum over the chunk's rows, or its last row -> copy to the host       nothing waits
    collect   sums of a prompt's chunks are added on the host, in the order of the steps

A chunk is summed in float64: cuts of a prompt change at most the last bit of a mean in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu.pooling import hidden_pools
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.model.device_model import DeviceModel
from radixmesh.daemons.worker.runner import Segment

# Rows in float32 and float64 at a time: those of a long chunk would take gigabytes.
_ROWS = 1024

Collect = Callable[[], FloatArray | None]
"""The vector of a prompt whose last chunk the step computed, else None; called once, when the step is done."""


class PromptVectors:
    """pooling: "mean" over the prompt or "last". Raises MeshError UNSUPPORTED for another."""

    def __init__(self, device: Device, model: DeviceModel, pooling: str) -> None:
        hidden_pools().create(pooling)
        if pooling not in ("mean", "last"):
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"the cuda backend does not pool by {pooling!r} yet: choose mean or last, or --backend cpu",
                {"feature": f"embed pooling {pooling}"},
            )
        self._device = device
        self._model = model
        self._is_mean = pooling == "mean"
        # By slot: positions added so far, and their sum.
        self._sums: dict[int, tuple[int, npt.NDArray[np.float64]]] = {}

    def launch(self, segment: Segment, hidden_LD: torch.Tensor) -> Collect | None:
        """hidden_LD: the segment's rows of `DeviceModel.layers`. None for a segment that needs nothing of them."""
        if segment.task is Task.SCORE and segment.is_last_chunk:
            return self._last(self._model.scores(hidden_LD[-1:].contiguous()))
        if segment.task is not Task.EMBED:
            return None
        if self._is_mean:
            return self._mean(segment, hidden_LD)
        if not segment.is_last_chunk:
            return None
        return self._last(self._model.final_hidden(hidden_LD[-1:].contiguous())[0])

    def _last(self, vector: torch.Tensor) -> Collect:
        host = self._device.fetch(vector)
        return lambda: host.numpy().copy()

    def _mean(self, segment: Segment, hidden_LD: torch.Tensor) -> Collect:
        parts = [self._model.final_hidden(rows_LD.contiguous()) for rows_LD in torch.split(hidden_LD, _ROWS)]
        host = self._device.fetch(torch.stack([part.sum(dim=0, dtype=torch.float64) for part in parts]).sum(dim=0))
        slot, start, length, is_last = segment.slot, segment.start, len(segment.ids), segment.is_last_chunk

        def collect() -> FloatArray | None:
            num_added, sum_D = self._sums.pop(slot, (0, np.zeros(0)))
            # A prompt that was aborted may have left its sum in the slot.
            sum_D = host.numpy() + (sum_D if start else 0.0)
            assert start == 0 or num_added == start, f"slot {slot} goes on at {start} after {num_added} positions"
            if is_last:
                mean: FloatArray = (sum_D / (start + length)).astype(np.float32)
                return mean
            self._sums[slot] = (start + length, sum_D)
            return None

        return collect
