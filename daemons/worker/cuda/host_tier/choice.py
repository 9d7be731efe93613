"""The way that copies pages of a worker: all are tried at the start, each direction apart, alone and beside steps.

What is tried is a long chat's KV as it comes back: one run of host pages, which goes to runs of a dozen device pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import CudaDevice, CudaEvent

PROBED_BYTES = 512 << 20
MOST_SLOWER = 0.02
"""Share by which a step may take longer beside copies."""
_RUN_PAGES = 12
_REPEATS = 3
# A way may take so much longer than the fastest if it takes less of the interpreter's time.
_ALIKE = 1.1
# If every way disturbs steps too much: requests whose steps a copy slows, for each that waits for it.
_OTHER_ROWS = 8
# Read again and again beside copies, as decodes read weights: rows of 4096 bf16, by 16 requests.
_ROW, _NUM_ROWS, _REQUESTS, _READS = 4096, 1 << 16, 16, 16


class Trial(NamedTuple):
    """Of one way and direction. seconds: of the copy alone; slower: share by which a step's work takes longer beside
    it; cpu_s: time of the thread that starts it; gbps: of the copy alone, 1e9 bytes a second."""

    seconds: float
    slower: float
    cpu_s: float
    gbps: float = 0.0


def best_of(trials: Sequence[Trial]) -> int:
    """Index of the fastest one that leaves steps alone; of those nearly as fast, the one that the thread starts first.
    Where all disturb steps: the one by which all requests together lose least."""
    if free := [index for index, trial in enumerate(trials) if trial.slower <= MOST_SLOWER]:
        fastest = min(trials[index].seconds for index in free)
        alike = [index for index in free if trials[index].seconds <= _ALIKE * fastest]
        return min(alike, key=lambda index: trials[index].cpu_s)
    return min(range(len(trials)), key=lambda index: trials[index].seconds * (1 + _OTHER_ROWS * trials[index].slower))


def probed_pages(num_device: int, num_host: int, page_bytes: int) -> tuple[IntArray, IntArray]:
    """Pages of the device, in runs that lie apart, and of the host, in one; both int32 [n]."""
    num = min(num_device, num_host, max(1, PROBED_BYTES // page_bytes))
    runs = np.array_split(np.arange(num, dtype=np.int32), -(-num // _RUN_PAGES))
    order = np.random.default_rng(0).permutation(len(runs))
    return np.concatenate([runs[index] for index in order]), np.arange(num, dtype=np.int32)


class StepWork:
    """Work like that of decodes, which reads the device's memory. planes: int32, contiguous; they are read as they
    are."""

    def __init__(self, device: CudaDevice, planes: Sequence[torch.Tensor]) -> None:
        self._device = device
        words = max(planes, key=torch.Tensor.numel).view(-1)
        num_rows = min(_NUM_ROWS, 2 * len(words) // _ROW)
        self._rows = words[: num_rows * _ROW // 2].view(torch.bfloat16).view(num_rows, _ROW)
        with device.in_order(), torch.inference_mode():
            self._columns = torch.zeros(_ROW, _REQUESTS, dtype=torch.bfloat16, device=device.torch_device)
            self._sums = torch.empty(num_rows, _REQUESTS, dtype=torch.bfloat16, device=device.torch_device)

    def slower(self, copy: Callable[[], object], wait: Callable[[], None]) -> float:
        """Share by which it takes longer beside copies, 0 at least. copy: starts one; wait: for its end."""
        self._seconds()
        alone = min(self._seconds() for _ in range(_REPEATS))
        beside = []
        for _ in range(_REPEATS):
            # Two, so that the work is over before they are.
            copy()
            copy()
            time.sleep(0.001)
            beside.append(self._seconds())
            wait()
        return max(0.0, min(beside) / alone - 1)

    def _seconds(self) -> float:
        with self._device.in_order(), torch.inference_mode():
            begin = self._device.event_on(self._device.stream)
            for _ in range(_READS):
                torch.mm(self._rows, self._columns, out=self._sums)
            end: CudaEvent = self._device.event_on(self._device.stream)
        end.wait()
        return end.seconds_since(begin)
