"""The GPU worker's host pool with stand-ins of CUDA's streams and driver: what waits for what, and what is copied."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda import host_pool
from radixmesh.daemons.worker.cuda.device import CudaEvent
from radixmesh.daemons.worker.cuda.host_pool import CudaHostPool
from radixmesh.daemons.worker.cuda.page_copies import EngineCopies, KernelCopies, StagedCopies
from radixmesh.daemons.worker.step_handle import DONE

PAGES = 12
REFUSED = RuntimeError("cuMemcpy2DAsync failed with CUDA error 1")


class Stream:
    """Waits that the stream was told of; work runs when it is given."""

    def __init__(self, *_: object) -> None:
        self.waits: list[object] = []
        self.cuda_stream = 7
        self.synchronize = lambda: None

    def wait_stream(self, stream: Stream) -> None:
        self.waits.append(stream)


class Event(CudaEvent):
    is_done = False  # type: ignore[assignment]

    def __init__(self) -> None:
        return

    def __del__(self) -> None:
        return

    def hold(self, stream: Stream) -> None:  # type: ignore[override]
        stream.waits.append(self)


def _driver(address: int, stream: int) -> None:
    fields = (ctypes.c_int64 * 16).from_address(address)
    (source, target), (width, height) = ((fields[n + 3] or fields[n + 4] for n in (0, 7)), fields[14:16])
    for row in range(height):
        ctypes.memmove(target + row * fields[13], source + row * fields[6], width)


def _refuse(address: int, stream: int) -> None:
    raise REFUSED


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    def nothing(*_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    stand_ins = {"cudart": lambda: runtime, "check_error": lambda _: None, "Stream": Stream}
    stand_ins["is_current_stream_capturing"] = lambda: False
    for name, stand_in in {**stand_ins, "device": nothing, "stream": nothing}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = SimpleNamespace(torch_device=torch.device("cpu"), stream=Stream(), event_on=lambda stream: Event())
    yield SimpleNamespace(device=device, use=lambda call: monkeypatch.setattr(host_pool, "driver_call", lambda: call))


def _pool(cuda: SimpleNamespace, words: int = 2048) -> tuple[CudaHostPool, dict[str, torch.Tensor]]:
    planes = {
        name: torch.randint(1, 2**31 - 1, (2, PAGES + 1, words), dtype=torch.int32) for name in ("keys", "values")
    }
    for plane in planes.values():
        plane[:, PAGES] = 0
    pool = CudaHostPool(cuda.device, planes, 10 * 4 * 4 * words, PAGES)
    # Its start takes no page but those that hold nothing yet.
    assert not any(plane[:, PAGES].any() for plane in planes.values())
    return pool, planes


@pytest.mark.parametrize(
    ("call", "words", "ways"),
    [(_driver, 2048, (EngineCopies, StagedCopies)), (_driver, 64, (StagedCopies, KernelCopies)),
     (_refuse, 2048, (KernelCopies,))],
)  # fmt: skip
def test_pages_are_saved_and_loaded_elsewhere(
    cuda: SimpleNamespace, call: object, words: int, ways: tuple[type, ...]
) -> None:
    cuda.use(call)
    pool, planes = _pool(cuda, words)
    assert isinstance(pool.copies, ways)
    for plane in planes.values():
        plane[:, :PAGES].random_()
    before = {name: plane.clone() for name, plane in planes.items()}
    pages = np.array([3, 4, 5, 9], np.int32)
    pool.save(pages, np.array([0, 1, 2, 7], np.int32))
    pool.load(np.array([0, 1, 2, 7], np.int32), np.array([6, 7, 8, 0], np.int32))
    for name, plane in planes.items():
        assert torch.equal(plane[:, [6, 7, 8, 0]], before[name][:, [3, 4, 5, 9]])
        others = [1, 2, 3, 4, 5, 9, 10, 11, 12]
        assert torch.equal(plane[:, others], before[name][:, others])


def test_a_load_waits_for_a_step_or_for_all_and_for_saves_of_its_pages(cuda: SimpleNamespace) -> None:
    cuda.use(_driver)
    pool, _ = _pool(cuda)
    pool.wait()
    stream, step = pool.load_stream, Event()
    stream.waits.clear()
    one, two = np.array([1], np.int32), np.array([2], np.int32)
    pool.load(one, one, DONE)
    assert stream.waits == []
    pool.load(one, one, step)
    assert stream.waits == [step]
    pool.load(one, one)
    assert stream.waits == [step, cuda.device.stream]
    pool.save(two, two)
    pool.load(two, one, DONE)
    pool.load(one, two, DONE)
    assert stream.waits[2:] == [pool.saved()] * 2
    pool.overwritten(one)
    assert cuda.device.stream.waits == []
    pool.overwritten(two)
    assert cuda.device.stream.waits == [pool.saved()]
