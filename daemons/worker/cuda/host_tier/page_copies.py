"""Ways of copying KV pages between the device and page-locked host memory.

device   plane [layers, pages, row]                      a row: the part of a page in one layer and plane
host     [pages, plane after plane, layer after layer]   a page in one piece

EngineCopies   2D copies by the GPU's copy engines, which take nothing of the SMs; for long rows
StagedCopies   a kernel gathers pages in a buffer of the device while engines copy what it has gathered before
KernelCopies   a kernel of few programs reads and writes the host's memory where it lies; needs no driver call

Which one moves pages is measured: `choice.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import NUM_FIELDS, Addresses, CopyCalls
from radixmesh.kernels.page_copy import NUM_PROGRAMS, copy_pages

MIN_ROW_BYTES = 8192
"""Rows from here on are copied by engines without a buffer."""
_STAGE_BYTES = 64 << 20
"""Of a part of a staged copy: 1.3 ms of the bus, while a kernel goes through the part before it in 0.1 ms."""
_STAGE_PROGRAMS = 264
_NUM_STAGES = 2
_MAX_PARTS = 8
"""Parts of staged copies that streams have to do at most, some five operations each."""
_MAX_PITCH = (1 << 31) - 1
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
# Fields of the driver's CUDA_MEMCPY2D: (type, host address, device address, pitch) of source and target.
_SOURCE, _TARGET, _WIDTH, _HEIGHT = (2, 3, 4, 6), (9, 10, 11, 13), 14, 15


class PageCopies(ABC):
    """planes: int32 [layers, pages, words], contiguous, on the device. words: int32 [host pages, words of a page],
    contiguous, page-locked: plane after plane."""

    def __init__(self, planes: Sequence[torch.Tensor], words: torch.Tensor) -> None:
        assert words.is_contiguous() and all(plane.is_contiguous() for plane in planes), "rows lie at fixed distances"
        self._planes, self._words = planes, words
        self._page_bytes = 4 * words.shape[1]

    @abstractmethod
    def copy(self, device_pages: IntArray, host_pages: IntArray, stream: int, *, to_host: bool) -> None:
        """Copies pages, int32 [n] of either side, distinct where they are written to, on the current stream, whose
        handle is `stream`. Raises RuntimeError."""

    def _copy_plane_by_plane(
        self, pages: torch.Tensor, memory: torch.Tensor, memory_pages: torch.Tensor, num_programs: int, *, to_host: bool
    ) -> None:
        offset = 0
        for plane in self._planes:
            copy_pages(plane, memory, pages, memory_pages, offset, to_host=to_host, num_programs=num_programs)
            offset += plane.shape[0] * plane.shape[2]


class EngineCopies(PageCopies):
    """Pages that follow each other on both sides go as one copy of each layer and plane, a page by itself as one of
    each plane. pages_together: host pages that are locked as one: no copy goes from one such part to the next."""

    def __init__(
        self, planes: Sequence[torch.Tensor], words: torch.Tensor, pages_together: int, start: CopyCalls
    ) -> None:
        super().__init__(planes, words)
        self._start, self._pages_together = start, pages_together

    def copy(self, device_pages: IntArray, host_pages: IntArray, stream: int, *, to_host: bool) -> None:
        order = np.argsort(device_pages, kind="stable")
        device, host = device_pages[order].astype(np.int64), host_pages[order].astype(np.int64)
        starts, lengths = _runs(host, self._pages_together, np.diff(device) != 1)
        offset = self._words.data_ptr()
        for plane in self._planes:
            num_layers, num_pages, num_words = plane.shape
            row, layers = 4 * num_words, np.arange(num_layers, dtype=np.int64)
            is_long = lengths >= num_layers
            runs = starts[is_long]
            # A copy of each layer, a row of it a page.
            on_device = plane.data_ptr() + row * (device[runs][:, None] + num_pages * layers)
            on_host = offset + self._page_bytes * host[runs][:, None] + row * layers
            sizes = row, np.repeat(lengths[is_long], num_layers)
            copies = _copies((on_device, row), (on_host, self._page_bytes), sizes, to_host=to_host)
            self._start(copies, stream)
            # A copy of each page, a row of it a layer.
            pages = np.flatnonzero(np.repeat(~is_long, lengths))
            on_device, on_host = plane.data_ptr() + row * device[pages], offset + self._page_bytes * host[pages]
            copies = _copies((on_device, row * num_pages), (on_host, row), (row, num_layers), to_host=to_host)
            self._start(copies, stream)
            offset += row * num_layers


class StagedCopies(PageCopies):
    """Host pages that follow each other are one copy. Each direction has a buffer of two parts: engines copy one while
    a kernel goes through the other. Calls of one direction are on one stream. pages_together: as of EngineCopies."""

    def __init__(
        self, planes: Sequence[torch.Tensor], words: torch.Tensor, pages_together: int, start: CopyCalls
    ) -> None:
        super().__init__(planes, words)
        self._start, self._pages_together = start, pages_together
        self._num_staged = min(len(words), max(1, _STAGE_BYTES // self._page_bytes))
        shape, device = (_NUM_STAGES * self._num_staged, words.shape[1]), planes[0].device
        self._stages = tuple(torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._turns = tuple(Turns(device) for _ in range(2))

    def copy(self, device_pages: IntArray, host_pages: IntArray, stream: int, *, to_host: bool) -> None:
        stage, turns, num_staged = self._stages[to_host], self._turns[to_host], self._num_staged
        order = np.argsort(host_pages, kind="stable")
        host = host_pages[order].astype(np.int64)
        index = np.arange(len(order))
        places = index % num_staged + num_staged * ((index // num_staged + turns.num) % _NUM_STAGES)
        pages = _sent(np.stack([device_pages[order], places.astype(np.int32)]), stage.device)

        def between_stage_and_host(number: int) -> None:
            part = slice(number * num_staged, (number + 1) * num_staged)
            firsts, lengths = _runs(host[part], self._pages_together)
            on_device = stage.data_ptr() + self._page_bytes * places[part][firsts]
            on_host = self._words.data_ptr() + self._page_bytes * host[part][firsts]
            width = self._page_bytes * lengths
            copies = _copies((on_device, width), (on_host, width), (width, 1), to_host=to_host)
            self._start(copies, stream)

        def between_planes_and_stage(number: int) -> None:
            part = slice(number * num_staged, (number + 1) * num_staged)
            self._copy_plane_by_plane(pages[0, part], stage, pages[1, part], _STAGE_PROGRAMS, to_host=to_host)

        num = -(-len(order) // num_staged)
        if to_host:
            turns.run(num, between_planes_and_stage, between_stage_and_host, fills_beside=True)
        else:
            turns.run(num, between_stage_and_host, between_planes_and_stage, fills_beside=False)


class Turns:
    """Fills parts of a buffer on one stream while another empties those before: the current stream, and one of its own.
    Of one direction, on one thread. num: parts so far; the next one is number `num % 2` of the buffer."""

    def __init__(self, device: torch.device) -> None:
        self.num = 0
        self._is_on_device = device.type == "cuda"
        if self._is_on_device:
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Behind what empties the last parts, the latest one at the end.
            self._emptied: deque[torch.cuda.Event] = deque()

    def run(self, num: int, fill: Callable[[int], None], empty: Callable[[int], None], *, fills_beside: bool) -> None:
        """Fills and empties parts [0, num); all that the current stream is given later is behind them.

        fills_beside: the other stream fills, and this one empties. Blocks while streams have too many parts to do.
        """
        if not self._is_on_device:
            for number in range(num):
                fill(number)
                empty(number)
            self.num += num
            return
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        filler, emptier = (self._beside, here) if fills_beside else (here, self._beside)
        for number in range(num):
            if len(self._emptied) >= _NUM_STAGES:
                filler.wait_event(self._emptied[-_NUM_STAGES])
            with torch.cuda.stream(filler):
                fill(number)
            emptier.wait_event(filler.record_event(_blocking_event()))
            with torch.cuda.stream(emptier):
                empty(number)
            self._emptied.append(emptier.record_event(_blocking_event()))
            self.num += 1
            if len(self._emptied) > _MAX_PARTS:
                self._emptied.popleft().synchronize()
        here.wait_stream(self._beside)


class KernelCopies(PageCopies):
    """num_programs: of the kernel. On an H200, 16 of them reach 50 GB/s, and work that reads the device's memory takes
    three times as long beside them."""

    def __init__(self, planes: Sequence[torch.Tensor], words: torch.Tensor, num_programs: int = NUM_PROGRAMS) -> None:
        super().__init__(planes, words)
        self._num_programs = num_programs

    def copy(self, device_pages: IntArray, host_pages: IntArray, stream: int, *, to_host: bool) -> None:
        pages = _sent(np.stack([device_pages, host_pages]), self._planes[0].device)
        self._copy_plane_by_plane(pages[0], self._words, pages[1], self._num_programs, to_host=to_host)


def ways_for(
    planes: Sequence[torch.Tensor], words: torch.Tensor, pages_together: int, start: CopyCalls | None
) -> list[PageCopies]:
    """Ways for pages of these rows, the one first that takes least of the SMs. pages_together: 0 if pages lie across
    the ends of locked parts. start: None if the driver cannot be called."""
    if start is None or not pages_together:
        return [KernelCopies(planes, words)]
    staged = StagedCopies(planes, words, pages_together, start)
    rows = [4 * plane.shape[2] for plane in planes]
    pitches = [row * plane.shape[1] for row, plane in zip(rows, planes, strict=True)]
    if min(rows) >= MIN_ROW_BYTES and max(pitches) <= _MAX_PITCH:
        return [EngineCopies(planes, words, pages_together, start), staged]
    return [staged, KernelCopies(planes, words)]


def _blocking_event() -> torch.cuda.Event:
    """An event whose waiters sleep."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _runs(
    host: Addresses, pages_together: int, is_apart: npt.NDArray[np.bool_] | None = None
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Indexes of the first page of runs that follow each other, and their lengths. is_apart: [n - 1], pages that do not
    follow on the one before them."""
    is_first = np.ones(len(host), np.bool_)
    is_first[1:] = (np.diff(host) != 1) | (np.diff(host // pages_together) != 0)
    if is_apart is not None:
        is_first[1:] |= is_apart
    starts = np.flatnonzero(is_first)
    return starts, np.diff(np.append(starts, len(host)))


def _copies(
    device: tuple[Addresses, int | Addresses],
    host: tuple[Addresses, int | Addresses],
    sizes: tuple[int | Addresses, int | Addresses],
    *,
    to_host: bool,
) -> Addresses:
    """CUDA_MEMCPY2D, a row each. device, host: addresses and pitches, bytes; sizes: width in bytes, and height."""
    copies = np.zeros((device[0].size, NUM_FIELDS), np.int64)
    of_device, of_host = (_SOURCE, _TARGET) if to_host else (_TARGET, _SOURCE)
    kind, _, address, pitch = of_device
    copies[:, kind], copies[:, address], copies[:, pitch] = _DEVICE, device[0].reshape(-1), device[1]
    kind, address, _, pitch = of_host
    copies[:, kind], copies[:, address], copies[:, pitch] = _HOST, host[0].reshape(-1), host[1]
    copies[:, _WIDTH], copies[:, _HEIGHT] = sizes
    return copies


def _sent(values: IntArray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
