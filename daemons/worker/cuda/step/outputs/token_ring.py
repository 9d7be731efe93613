"""A ring of sampled tokens, and of their logprobs, in host memory. The device writes each step's to a row of its own:

    ring       step n   step n + 1   ...   16 rows, one a step

A row is used again only when its step is done; what was not asked for by then is copied out of it first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.sampling import MAX_TOP_LOGPROBS
from radixmesh.daemons.runtime.steps.step import TokenLogprobs
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle
from radixmesh.kernels.sampling.sample import TokenTarget

_NUM_STEPS = 16


class Asking(NamedTuple):
    """Indexes of the rows that ask for logprobs, and how many alternatives each of them wants."""

    rows: Sequence[int]
    num_top: Sequence[int]


NOBODY = Asking((), ())


class Fetched(NamedTuple):
    """Tokens of a step, int32 [rows], and the logprobs of the rows that asked."""

    tokens: IntArray
    logprobs: Mapping[int, TokenLogprobs]


NOTHING = Fetched(empty_ints(), {})


class TokenRing:
    """rows: int32 [num_steps, max_rows] of host memory that the device writes; logprobs: int32 [num_steps, max_rows,
    1 + 2 MAX_TOP_LOGPROBS], as `kernels/sampling/logprobs.py` leaves them."""

    def __init__(self, device: Device, *, max_rows: int, num_steps: int = _NUM_STEPS) -> None:
        self.rows = device.host_ints(num_steps, max_rows)
        self.logprobs = device.host_ints(num_steps, max_rows, 1 + 2 * MAX_TOP_LOGPROBS)
        self._ints: IntArray = self.rows.numpy()
        self._numbers: IntArray = self.logprobs.numpy()
        self._fetched: list[StepHandle[Fetched] | None] = [None] * num_steps
        self._index = 0

    def take(self) -> int:
        """The ring index of the next step's tokens: their row of `rows`."""
        self._index = (self._index + 1) % len(self._fetched)
        before, self._fetched[self._index] = self._fetched[self._index], None
        if before is not None:
            before.result()
        return self._index

    def target(self, ring_index_1: torch.Tensor, last_tokens_S: torch.Tensor) -> TokenTarget:
        """Destination of a step's tokens: the row of the ring that the device reads its index of, and the slots."""
        return TokenTarget(ring_RT=self.rows, ring_index_1=ring_index_1, last_tokens_S=last_tokens_S)

    def fetch(self, count: int, done: DeviceEvent, asking: Asking = NOBODY) -> StepHandle[Fetched]:
        """The first `count` tokens of the row that was taken last, and the logprobs of those that ask, the caller's to
        keep; on the host when the event `done` is."""
        row, numbers = self._ints[self._index, :count], self._numbers[self._index]
        lock, kept = threading.Lock(), list[IntArray]()

        def tokens() -> IntArray:
            done.wait()
            with lock:
                if not kept:
                    kept.append(row.copy())
                return kept[0]

        def copy() -> Fetched:
            done.wait()
            logprobs = {
                index: _logprobs(numbers[index, : 1 + 2 * num_top].copy(), num_top)
                for index, num_top in zip(asking.rows, asking.num_top, strict=True)
            }
            return Fetched(tokens(), logprobs)

        fetched = self._fetched[self._index] = StepHandle(done, copy, tokens)
        return fetched


def _logprobs(numbers: IntArray, num_top: int) -> TokenLogprobs:
    floats = numbers.view(np.float32)
    return TokenLogprobs(
        own=floats[:1],
        num_top=num_top,
        top_ids=numbers[None, 1 : 1 + num_top],
        top=floats[None, 1 + num_top :],
    )
