"""2D copies of pages, carried out by a stand-in of the driver on the memory that they name."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda.copy_engine import CopyEngine, fits_engine


class Driver:
    """Copies rows as CUDA_MEMCPY2D says; `sizes`: rows of each copy, so far."""

    def __init__(self) -> None:
        self.heights: list[int] = []

    def __call__(self, address: int, stream: int) -> None:
        fields = (ctypes.c_int64 * 16).from_address(address)
        source, target = (self._place(fields, first) for first in (0, 7))
        width, height = fields[14], fields[15]
        assert stream == 7 and source[1] >= width and target[1] >= width and height > 0
        for row in range(height):
            ctypes.memmove(target[0] + row * target[1], source[0] + row * source[1], width)
        self.heights.append(height)

    @staticmethod
    def _place(fields: ctypes.Array[ctypes.c_int64], first: int) -> tuple[int, int]:
        """Address and pitch."""
        kind, on_host, on_device, pitch = (fields[first + field] for field in (2, 3, 4, 6))
        assert not (fields[first] or fields[first + 1] or fields[first + 5])
        assert kind in (1, 2) and not (on_device if kind == 1 else on_host)
        return (on_host if kind == 1 else on_device), pitch


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _reference(
    planes: list[torch.Tensor], host: torch.Tensor, device_pages: np.ndarray, host_pages: np.ndarray, to_host: bool
) -> None:
    for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
        rows, start = host[host_page], 0
        for plane in planes:
            part = rows[start : start + plane.shape[0] * plane.shape[2]].view(plane.shape[0], plane.shape[2])
            if to_host:
                part.copy_(plane[:, device_page])
            else:
                plane[:, device_page] = part
            start += part.numel()


@given(st.data(), st.booleans())
def test_pages_go_as_they_are_told(data: st.DataObject, to_host: bool) -> None:
    num_layers, num_pages, num_host = 3, 12, 14
    planes = [_words(num_layers, num_pages, 5), _words(num_layers, num_pages, 2)]
    host = _words(num_host, num_layers * 7)
    num = data.draw(st.integers(1, num_pages))
    device_pages = np.array(data.draw(st.permutations(range(num_pages)))[:num], np.int32)
    host_pages = np.array(data.draw(st.permutations(range(num_host)))[:num], np.int32)
    if data.draw(st.booleans()):
        # Runs of pages, as prefixes have them.
        device_pages, host_pages = np.sort(device_pages), np.sort(host_pages)
    wanted_planes, wanted_host = [plane.clone() for plane in planes], host.clone()
    _reference(wanted_planes, wanted_host, device_pages, host_pages, to_host)
    driver, pages_together = Driver(), data.draw(st.integers(1, num_host))
    CopyEngine(planes, host, pages_together, driver).copy(device_pages, host_pages, 7, to_host=to_host)
    assert torch.equal(host, wanted_host)
    assert all(torch.equal(plane, wanted) for plane, wanted in zip(planes, wanted_planes, strict=True))


def test_pages_that_follow_each_other_are_a_copy_a_layer() -> None:
    planes, host, driver = [_words(4, 100, 8)], _words(100, 32), Driver()
    device_pages = np.concatenate([np.arange(60, 90), [3, 5]]).astype(np.int32)
    host_pages = np.concatenate([np.arange(10, 40), [3, 5]]).astype(np.int32)
    order = np.random.default_rng(0).permutation(len(device_pages))
    CopyEngine(planes, host, 100, driver).copy(device_pages[order], host_pages[order], 7, to_host=True)
    assert sorted(driver.heights) == [4, 4, 30, 30, 30, 30]
    driver.heights.clear()
    # Those behind host page 24 are locked apart.
    CopyEngine(planes, host, 25, driver).copy(device_pages, host_pages, 7, to_host=False)
    assert sorted(driver.heights) == [4, 4, *[15] * 8]


def test_rows_that_are_short_or_far_apart_are_left_to_kernels() -> None:
    def plane(num_pages: int, num_words: int) -> torch.Tensor:
        return torch.empty(2, num_pages, num_words, dtype=torch.int32, device="meta")

    assert fits_engine([plane(100, 2048), plane(100, 8192)])
    assert not fits_engine([plane(100, 8192), plane(100, 2047)])
    assert not fits_engine([plane(1 << 18, 2048)]) and fits_engine([plane((1 << 18) - 1, 2048)])
