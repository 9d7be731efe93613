"""Pages copied between planes and host pages: the kernel is its reference, bit by bit."""

import pytest
import torch

from radixmesh.kernels.page_copy import copy_pages, copy_pages_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


@pytest.mark.parametrize("num_programs", [1, 5, 48])
@pytest.mark.parametrize(
    ("layers", "page_words"), [(1, 8), (3, 40), (5, 512), pytest.param(2, 5000, marks=pytest.mark.full)]
)
def test_pages_go_to_the_host_and_back(layers: int, page_words: int, num_programs: int) -> None:
    offset, other = 24, 16
    plane = _words(layers, 9, page_words).to(DEVICE)
    host = _words(7, offset + layers * page_words + other)
    host = host.pin_memory() if DEVICE == "cuda" else host
    device_pages = torch.tensor([8, 0, 3, 5], dtype=torch.int32, device=DEVICE)
    host_pages = torch.tensor([2, 6, 0, 3], dtype=torch.int32, device=DEVICE)
    want = host.clone()
    copy_pages_reference(plane, want, device_pages, host_pages, offset, to_host=True)
    copy_pages(plane, host, device_pages, host_pages, offset, to_host=True, num_programs=num_programs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, want) and not torch.equal(want, _words(*want.shape))
    back, want_back = _words(layers, 9, page_words).to(DEVICE), None
    want_back = back.clone()
    copy_pages_reference(want_back, host, device_pages, host_pages, offset, to_host=False)
    copy_pages(back, host, device_pages, host_pages, offset, to_host=False, num_programs=num_programs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, want_back)
    assert torch.equal(back[:, [8, 0, 3, 5]], plane[:, [8, 0, 3, 5]])


def test_nothing_is_no_launch() -> None:
    plane, host = _words(1, 2, 4).to(DEVICE), _words(2, 4)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    copy_pages(plane, host, none, none, 0, to_host=True)
