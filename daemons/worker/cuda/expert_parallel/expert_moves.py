"""Experts that move between GPUs while they serve: slices travel by the transport of rows, between two steps.

Weights and tables of slots are written in place, behind the last step that read them: graphs stay as they are. Steps
count the picks of their rows themselves; every few dozen of them the counts are fetched behind a step, which nothing
waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch, DispatchedExperts
from radixmesh.daemons.worker.experts.expert_moves import (
    MAX_SLICE_BYTES,
    REPORT_FORWARDS,
    ExpertMoves,
    ReadExperts,
    Wanted,
)
from radixmesh.daemons.worker.step_handle import DeviceEvent
from radixmesh.worker.v1 import worker_pb2


class DeviceExpertMoves(ExpertMoves):
    """One rank's end. read: None for weights that are random: one expert is as good as another."""

    def __init__(
        self,
        layers: Sequence[DispatchedExperts],
        dispatch: DeviceDispatch,
        device: Device,
        read: ReadExperts | None = None,
    ) -> None:
        super().__init__(layers, dispatch.ranks, read or partial(_copy_any, layers), dispatch.exchange)
        self._device, self._dispatch = device, dispatch
        self._picks = [layer.picks_E for layer in layers]
        self._num_launched = 0

    def apply(self, op: worker_pb2.BarrierOp) -> None:
        with self._device.in_order():
            super().apply(op)
            # The time that a slice takes decides on the size of the next one.
            self._device.record_event().wait()
        # Collectives that were aborted leave anything in memory that no step reads: nothing of it is placed.
        self._dispatch.check()

    def adopt(self, placement: worker_pb2.ExpertPlacement | None) -> None:
        with self._device.in_order():
            super().adopt(placement)
            self._device.record_event().wait()

    def forget_picks(self) -> None:
        """Of warm-ups: nobody asked for them."""
        self._num_launched = 0
        with self._device.in_order(), torch.inference_mode():
            for picks_E in self._picks:
                picks_E.zero_()

    def launched(self) -> Callable[[], IntArray] | None:
        """Called behind the launch of each step. Now and then the picks since the last time, int32 [L x experts], for
        when the step is over; otherwise None."""
        self._num_launched += 1
        if self._num_launched < REPORT_FORWARDS:
            return None
        self._num_launched = 0
        picks = self._device.fetch(torch.stack(self._picks))
        for picks_E in self._picks:
            picks_E.zero_()
        return partial(_when_done, self._device.record_event(), picks)


def moving_bytes(num_slots: int, expert_bytes: int) -> int:
    """Memory that a change takes on the device: experts of one layer, and a slice that goes and one that comes."""
    return num_slots * expert_bytes + 2 * min(MAX_SLICE_BYTES, num_slots * expert_bytes)


def _when_done(event: DeviceEvent, picks: torch.Tensor) -> IntArray:
    event.wait()
    loads: IntArray = picks.numpy().astype(np.int32).ravel()
    return loads


def _copy_any(layers: Sequence[DispatchedExperts], wanted: Sequence[Wanted]) -> None:
    with torch.inference_mode():
        for layer, slot, _ in wanted:
            for target, source in zip(layers[layer].bytes_of(slot), layers[layer].bytes_of(0), strict=True):
                target.copy_(source)
