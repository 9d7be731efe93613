"""Page-locked host memory of a GPU worker, with a stand-in for CUDA's calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda import locked_memory


@pytest.mark.parametrize("is_inference", [False, True])
def test_memory_is_locked_by_threads_on_the_device_that_uses_it(
    monkeypatch: pytest.MonkeyPatch, is_inference: bool
) -> None:
    current, registered, released = threading.local(), [], []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.device = device
        yield
        del current.device

    def register(address: int, num_bytes: int, flags: int) -> int:
        registered.append((address, num_bytes, getattr(current, "device", torch.device("cuda", 0))))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=released.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(locked_memory, "_LOCKED_WORDS", 1024)
    device = torch.device("cuda", 3)
    # Inference mode is a thread's own.
    with torch.inference_mode(is_inference):
        memory = locked_memory.LockedMemory(4096, device)
    assert [(num, of) for _, num, of in registered] == [(4096, device)] * 4
    assert not memory.words.any() and not released
    del memory
    assert sorted(released) == sorted(address for address, _, _ in registered)


@pytest.mark.parametrize(("page_words", "part_words"), [(1, 1 << 28), (3 << 18, 170 * (3 << 19)), (7**9, 1 << 28)])
def test_parts_hold_whole_pages_where_they_can(
    monkeypatch: pytest.MonkeyPatch, page_words: int, part_words: int
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    assert (
        locked_memory.LockedMemory(0, torch.device("cuda", 0), torch.zeros(0).numpy(), page_words).part_words
        == part_words
    )
