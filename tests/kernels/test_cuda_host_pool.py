"""The GPU worker's host pool with stand-ins of CUDA's streams and driver: what waits for what, and what is copied."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda.device import CudaEvent
from radixmesh.daemons.worker.cuda.host_tier import host_pool
from radixmesh.daemons.worker.cuda.host_tier.choice import StepWork, Trial, best_of, probed_pages
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import CopyCall, one_by_one
from radixmesh.daemons.worker.cuda.host_tier.copy_thread import CopyThread
from radixmesh.daemons.worker.cuda.host_tier.host_pool import CudaHostPool
from radixmesh.daemons.worker.cuda.host_tier.page_copies import EngineCopies, KernelCopies, StagedCopies
from radixmesh.daemons.worker.step_handle import DONE

PAGES = 12
REFUSED = RuntimeError("cuMemcpy2DAsync failed with CUDA error 1")


class Stream:
    """Waits that the stream was told of; work runs when it is given."""

    def __init__(self, *_: object) -> None:
        self.waits: list[object] = []
        self.cuda_stream = 7


class Event(CudaEvent):
    is_done = False  # type: ignore[assignment]

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def wait(self) -> None:
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


class Work:
    """The work of steps that no copy disturbs."""

    def __init__(self, *_: object) -> None:
        return

    def slower(self, copy: Callable[[], object], wait: Callable[[], None]) -> float:
        copy()
        wait()
        return 0.0


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
    device = SimpleNamespace(torch_device=torch.device("cpu"), stream=Stream(), event_on=Event)
    monkeypatch.setattr(host_pool, "StepWork", Work)

    def use(call: CopyCall) -> None:
        monkeypatch.setattr(host_pool, "driver_calls", lambda: one_by_one(call))

    yield SimpleNamespace(device=device, use=use)


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
    assert isinstance(pool.copies.save, ways) and isinstance(pool.copies.load, ways)
    names = {way.__name__ for way in ways} if len(ways) > 1 else set()
    assert set(pool.trials) == names and all(set(trials) == {"save", "load"} for trials in pool.trials.values())
    for plane in planes.values():
        plane[:, :PAGES].random_()
    before = {name: plane.clone() for name, plane in planes.items()}
    pages = np.array([3, 4, 5, 9], np.int32)
    pool.save(pages, np.array([0, 1, 2, 7], np.int32))
    pool.load(np.array([0, 1, 2, 7], np.int32), np.array([6, 7, 8, 0], np.int32)).wait()
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
    pool.load(one, one, DONE).wait()
    assert stream.waits == []
    pool.load(one, one, step).wait()
    assert stream.waits == [step]
    pool.load(one, one).wait()
    assert stream.waits[0] is step and stream.waits[1].stream is cuda.device.stream
    pool.save(two, two)
    saved = pool._saves[-1].event
    pool.load(two, one, DONE).wait()
    pool.load(one, two, DONE).wait()
    assert stream.waits[2:] == [saved._event] * 2
    pool.overwritten(one)
    assert cuda.device.stream.waits == []
    pool.overwritten(two)
    assert cuda.device.stream.waits == [saved._event]


def test_a_load_that_is_not_started_yet_holds_up_nobody_but_a_save_to_what_it_reads(cuda: SimpleNamespace) -> None:
    cuda.use(_driver)
    pool, planes = _pool(cuda)
    pool.wait()
    pool.copies, copies = pool.copies._replace(load=Slow(pool.copies.load)), pool.copies
    slow = pool.copies.load
    one, two, three = (np.array([page], np.int32) for page in (1, 2, 3))
    for plane in planes.values():
        plane.random_()
    before = planes["keys"][:, 1].clone()
    pool.save(one, one)
    event = pool.load(one, two, DONE)
    pool.save(three, three)
    pool._saves[-1].event.wait()
    assert not event.is_done and not torch.equal(planes["keys"][:, 2], before)
    # To the page that the load reads: the copy comes behind it.
    pool.save(three, one)
    time.sleep(0.05)
    assert not pool._saves[-1].event._is_started.is_set()
    slow.may_start.set()
    pool.wait()
    assert torch.equal(planes["keys"][:, 2], before)
    pool.copies = copies
    pool.load(one, two, DONE).wait()
    assert torch.equal(planes["keys"][:, 2], planes["keys"][:, 3])


class Slow:
    """Copies once it may."""

    def __init__(self, way: object) -> None:
        self.way, self.may_start = way, threading.Event()

    def copy(self, *arguments: object, **options: object) -> None:
        self.may_start.wait()
        self.way.copy(*arguments, **options)  # type: ignore[attr-defined]


def test_a_copy_that_fails_is_told_of(cuda: SimpleNamespace) -> None:
    cuda.use(_driver)
    pool, _ = _pool(cuda)

    def fail(*_: object, **__: object) -> None:
        raise REFUSED

    way = SimpleNamespace(copy=fail)
    pool.copies = pool.copies._replace(save=way, load=way)
    one = np.array([1], np.int32)
    event = pool.load(one, one, DONE)
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        event.wait()
    assert event.is_done
    # Nobody waits for a save: whoever copies next hears of it, as here of the load.
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        pool.save(one, one)
    pool.save(one, one)
    pool._saves[-1].event._is_started.wait()
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        pool.load(one, one, DONE)


def test_a_thread_of_copies_ends_with_whoever_has_it() -> None:
    thread = CopyThread("copies-that-end")
    assert thread.start(Event).is_done is False

    def names() -> list[str]:
        return [each.name for each in threading.enumerate()]

    assert "copies-that-end" in names()
    del thread
    gc.collect()
    until = time.monotonic() + 5
    while "copies-that-end" in names():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_ways_are_chosen_for_loads_and_saves_apart(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these two, the engines disturb steps while they load, and the buffer while it saves."""
    cuda.use(_driver)

    class Disturbed(Work):
        num = 0

        def slower(self, copy: Callable[[], object], wait: Callable[[], None]) -> float:
            Disturbed.num += 1
            return [0.3, 0.0, 0.0, 0.3][Disturbed.num - 1]

    monkeypatch.setattr(host_pool, "StepWork", Disturbed)
    pool, _ = _pool(cuda)
    assert isinstance(pool.copies.load, StagedCopies) and isinstance(pool.copies.save, EngineCopies)
    assert pool.trials["EngineCopies"]["load"].slower == 0.3


def test_a_step_beside_copies_is_compared_with_one_alone() -> None:
    copying = 0

    class Timed(Event):
        def seconds_since(self, earlier: object) -> float:
            return 1.2 if copying == 2 else 1.0

    device = SimpleNamespace(
        torch_device=torch.device("cpu"), stream=None, event_on=Timed, in_order=contextlib.nullcontext
    )
    planes = [torch.zeros(1, 3, 1024, dtype=torch.int32), torch.zeros(2, 3, 4096, dtype=torch.int32)]

    def copy() -> None:
        nonlocal copying
        copying += 1

    def wait() -> None:
        nonlocal copying
        assert copying == 2
        copying = 0

    work = StepWork(device, planes)  # type: ignore[arg-type]
    # The largest plane, as rows of weights would lie.
    assert work._rows.shape == (12, 4096) and work._rows.data_ptr() == planes[1].data_ptr()
    assert work.slower(copy, wait) == pytest.approx(0.2)


def test_the_fastest_way_that_leaves_steps_alone_is_chosen() -> None:
    def best(*trials: tuple[float, float, float]) -> int:
        return best_of([Trial(*trial) for trial in trials])

    assert best((2.0, 0.0, 0.1), (1.0, 0.02, 0.1)) == 1 and best((2.0, 0.0, 0.1), (1.0, 0.03, 0.1)) == 0
    # Nearly as fast, with less of the interpreter's time.
    assert best((1.0, 0.0, 0.2), (1.08, 0.0, 0.1)) == 1 and best((1.0, 0.0, 0.2), (1.2, 0.0, 0.1)) == 0
    # All disturb steps.
    assert best((1.5, 0.03, 0.1), (1.0, 0.1, 0.1)) == 1 and best((1.0, 3.0, 0.1), (2.0, 0.1, 0.1)) == 1


def test_what_is_tried_is_like_a_chat_that_comes_back() -> None:
    device_pages, host_pages = probed_pages(1000, 400, 4 << 20)
    assert sorted(device_pages.tolist()) == list(range(128)) == host_pages.tolist()
    assert 10 <= 1 + int((np.diff(device_pages) != 1).sum()) <= 11
    for num_device, num_host in ((3, 9), (9, 3), (1, 1)):
        device_pages, host_pages = probed_pages(num_device, num_host, 1 << 30)
        assert device_pages.tolist() == host_pages.tolist() == [0]
