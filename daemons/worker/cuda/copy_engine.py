"""Copies of KV pages by the GPU's copy engines, which take nothing of the SMs that steps compute on.

    device   plane [layers, pages, row]                      a row: the part of a page in one layer and plane
    host     [pages, plane after plane, layer after layer]

Pages that follow each other on both sides go as one 2D copy of each layer and plane; a page by itself as one of each
plane. A row has to be long enough for an engine: of shorter ones kernels.page_copy is the way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray

MIN_ROW_BYTES = 8192
"""Rows from here on are copied by an engine."""
_MAX_PITCH = (1 << 31) - 1
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
# Fields of the driver's CUDA_MEMCPY2D, 8 bytes each: (type, host address, device address, pitch) of source and target.
_NUM_FIELDS, _SOURCE, _TARGET, _WIDTH, _HEIGHT = 16, (2, 3, 4, 6), (9, 10, 11, 13), 14, 15

CopyCall = Callable[[int, int], None]
"""Starts a copy: address of a CUDA_MEMCPY2D, which is read in the call, and the stream. Raises RuntimeError."""


class CopyEngine:
    """planes: int32 [layers, pages, words], contiguous, on the device. words: int32 [host pages, words of a page],
    contiguous, page-locked, so many pages together: no copy goes from one such part to the next."""

    def __init__(
        self, planes: Sequence[torch.Tensor], words: torch.Tensor, pages_together: int, copy: CopyCall
    ) -> None:
        assert words.is_contiguous() and all(plane.is_contiguous() for plane in planes), "rows lie at fixed distances"
        self._planes, self._words, self._copy, self._pages_together = planes, words, copy, pages_together

    def copy(self, device_pages: IntArray, host_pages: IntArray, stream: int, *, to_host: bool) -> None:
        """Copies pages, int32 [n] of either side, distinct where they are written to. Raises RuntimeError."""
        copies = self.copies(device_pages, host_pages, to_host=to_host)
        size, start = copies.itemsize * _NUM_FIELDS, copies.ctypes.data
        for address in range(start, start + size * len(copies), size):
            self._copy(address, stream)

    def copies(self, device_pages: IntArray, host_pages: IntArray, *, to_host: bool) -> npt.NDArray[np.int64]:
        """A CUDA_MEMCPY2D a row, int64 [copies, 16]."""
        order = np.argsort(device_pages, kind="stable")
        device, host = device_pages[order].astype(np.int64), host_pages[order].astype(np.int64)
        is_first = np.ones(len(device), np.bool_)
        is_first[1:] = (np.diff(device) != 1) | (np.diff(host) != 1) | (np.diff(host // self._pages_together) != 0)
        starts = np.flatnonzero(is_first)
        lengths = np.diff(np.append(starts, len(device)))
        page_bytes = 4 * self._words.shape[1]
        parts, offset = [], self._words.data_ptr()
        for plane in self._planes:
            num_layers, num_pages, num_words = plane.shape
            row, layers = 4 * num_words, np.arange(num_layers, dtype=np.int64)
            is_long = lengths >= num_layers
            runs = starts[is_long]
            # A copy of each layer, a row of it a page.
            on_device = plane.data_ptr() + row * (device[runs][:, None] + num_pages * layers)
            on_host = offset + page_bytes * host[runs][:, None] + row * layers
            heights = np.repeat(lengths[is_long], num_layers)
            parts.append(_copies(on_device, row, on_host, page_bytes, row, heights, to_host=to_host))
            # A copy of each page, a row of it a layer.
            pages = np.flatnonzero(np.repeat(~is_long, lengths))
            on_device, on_host = plane.data_ptr() + row * device[pages], offset + page_bytes * host[pages]
            heights = np.full(len(pages), num_layers)
            parts.append(_copies(on_device, row * num_pages, on_host, row, row, heights, to_host=to_host))
            offset += row * num_layers
        return np.concatenate(parts)


def fits_engine(planes: Sequence[torch.Tensor], min_row_bytes: int = MIN_ROW_BYTES) -> bool:
    """True if the rows of all planes are long enough, and no further apart than the engines can go."""
    return all(
        4 * plane.shape[2] >= min_row_bytes and 4 * plane.shape[1] * plane.shape[2] <= _MAX_PITCH for plane in planes
    )


def driver_copy() -> CopyCall:
    """The driver's call, on the current context. Raises OSError where there is no driver."""
    # Keeps the interpreter's lock: a call takes a microsecond or two, and to get the lock back may take milliseconds.
    call = ctypes.PyDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int

    def copy(address: int, stream: int) -> None:
        if status := call(address, stream):
            raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {status}")

    return copy


def _copies(
    on_device: npt.NDArray[np.int64],
    device_pitch: int,
    on_host: npt.NDArray[np.int64],
    host_pitch: int,
    width: int,
    heights: npt.NDArray[np.int64],
    *,
    to_host: bool,
) -> npt.NDArray[np.int64]:
    copies = np.zeros((len(heights), _NUM_FIELDS), np.int64)
    of_device, of_host = (_SOURCE, _TARGET) if to_host else (_TARGET, _SOURCE)
    kind, _, address, pitch = of_device
    copies[:, kind], copies[:, address], copies[:, pitch] = _DEVICE, on_device.reshape(-1), device_pitch
    kind, address, _, pitch = of_host
    copies[:, kind], copies[:, address], copies[:, pitch] = _HOST, on_host.reshape(-1), host_pitch
    copies[:, _WIDTH], copies[:, _HEIGHT] = width, heights
    return copies
