"""Page-locked host memory of a GPU worker, with a stand-in for CUDA's calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

    def unregister(address: int) -> int:
        released.append(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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


class _Driver:
    """Registers memory as CUDA does: what is registered cannot be registered again."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.status = 0
        self.num_refused = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        for start, size in self.registered.items():
            if address < start + size and start < address + num_bytes:
                return 712
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.status:
            self.num_refused += 1
            return self.status
        return 713 if self.registered.pop(address, None) is None else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    def check_error(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    driver = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return driver


def _lock() -> locked_memory.LockedMemory:
    return locked_memory.LockedMemory(4096, torch.device("cuda", 0))


def test_memory_that_stays_registered_is_nobody_elses(driver: _Driver) -> None:
    memory = _lock()
    (address,) = driver.registered
    driver.status = 900  # cudaErrorStreamCaptureUnsupported
    del memory
    others = [_lock() for _ in range(8)]
    assert address in driver.registered and driver.num_refused
    assert address not in [other.words.data_ptr() for other in others]
    driver.status = 0
    others.append(_lock())
    assert len(driver.registered) == len(others)
    others.clear()
    assert not driver.registered


def test_a_capture_is_not_disturbed(driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _lock(), _lock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    driver.status = 900
    del first
    assert len(driver.registered) == 2 and not driver.num_refused
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    driver.status = 0
    del second
    assert not driver.registered


def test_what_is_not_registered_is_not_kept(driver: _Driver) -> None:
    memory = _lock()
    driver.registered.clear()
    del memory
    driver.status = 900
    assert _lock().words.numel() == 4096 and not driver.num_refused
