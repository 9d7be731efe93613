"""Copies that a loop in C starts, and one in Python: all of them, in order, and never more than a stream is to hold."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixmesh.daemons.worker.cuda.host_tier import copy_calls
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import (
    NUM_FIELDS,
    PACE_OF_PYTHON,
    CopyLoop,
    compiled_loop,
    driver_calls,
    one_by_one,
    paced,
)

_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_CREATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)

needs_compiler = pytest.mark.skipif(
    shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is None, reason="there is no C compiler"
)


class Device:
    """Of two streams, which have done nothing but what was waited for. numbers: of copies, as they were started."""

    def __init__(self, refused: int = -1) -> None:
        self.numbers: dict[int, list[int]] = {7: [], 9: []}
        self.most = 0
        self._done = {7: 0, 9: 0}
        self._recorded: dict[int, tuple[int, int]] = {}
        self._num_events = 0

        def copy(address: int, stream: int) -> int:
            number = (ctypes.c_int64 * NUM_FIELDS).from_address(address)[3]
            if number == refused:
                return 719
            self.numbers[stream].append(number)
            self.most = max(self.most, len(self.numbers[stream]) - self._done[stream])
            return 0

        def create(event: ctypes._Pointer[ctypes.c_void_p], flags: int) -> int:
            assert flags == 3
            self._num_events += 1
            event[0] = self._num_events
            return 0

        def record(event: int, stream: int) -> int:
            self._recorded[event] = stream, len(self.numbers[stream])
            return 0

        def wait(event: int) -> int:
            stream, num = self._recorded[event]
            self._done[stream] = num
            return 0

        self.driver = SimpleNamespace(
            cuMemcpy2DAsync_v2=_COPY(copy),
            cuEventCreate=_CREATE(create),
            cuEventRecord=_COPY(record),
            cuEventSynchronize=_WAIT(wait),
        )


def _copies(first: int, num: int) -> np.ndarray:
    copies = np.zeros((num, NUM_FIELDS), np.int64)
    copies[:, 3] = np.arange(first, first + num)
    return copies


@needs_compiler
def test_a_loop_starts_all_copies_in_order_and_paces_each_stream() -> None:
    device, sent = Device(), {7: 0, 9: 0}
    start = CopyLoop(compiled_loop(), device.driver, pace=8)
    for stream, num in ((7, 7), (9, 24), (7, 0), (7, 1), (7, 50), (9, 3)):
        start(_copies(sent[stream], num), stream)
        sent[stream] += num
    assert device.numbers == {stream: list(range(num)) for stream, num in sent.items()}
    assert device.most == 16, "a stream holds two paces of copies, and that many are under way at a time"


@needs_compiler
def test_a_refused_copy_ends_the_loop() -> None:
    device = Device(refused=5)
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        CopyLoop(compiled_loop(), device.driver, pace=4)(_copies(0, 20), 9)
    assert device.numbers[9] == [0, 1, 2, 3, 4]


@needs_compiler
def test_other_threads_run_while_the_loop_waits_for_the_bus() -> None:
    device, ended, waiting = Device(), threading.Event(), threading.Event()
    slept = ctypes.CDLL(None).usleep

    def create(event: ctypes._Pointer[ctypes.c_void_p], flags: int) -> int:
        event[0] = 300_000
        waiting.set()
        return 0

    # An event is a time for which whoever waits for it sleeps, without the interpreter.
    device.driver.cuEventCreate, device.driver.cuEventSynchronize = _CREATE(create), slept
    device.driver.cuEventRecord = _COPY(lambda event, stream: 0)
    start = CopyLoop(compiled_loop(), device.driver, pace=1)

    def run() -> None:
        start(_copies(0, 3), 7)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(10)
    time.sleep(0.05)
    assert not ended.is_set(), "this thread had to wait for the interpreter's lock"
    thread.join()
    assert device.numbers[7] == [0, 1, 2]


def test_python_gives_no_stream_more_copies_than_its_queue_holds() -> None:
    started, done, most = {7: 0, 9: 0}, {7: 0, 9: 0}, 0
    current = 7

    def call(_: int, stream: int) -> None:
        nonlocal most
        started[stream] += 1
        most = max(most, started[stream] - done[stream])

    class Event:
        """Nothing is done but what is waited for."""

        def __init__(self) -> None:
            self.stream, self.num = current, started[current]

        def synchronize(self) -> None:
            done[self.stream] = self.num

    start, pace = one_by_one(paced(call, Event)), PACE_OF_PYTHON
    for current, num in ((7, pace - 1), (9, 3 * pace), (7, 5 * pace)):
        start(_copies(0, num), current)
    assert started == {7: 6 * pace - 1, 9: 3 * pace} and most == 2 * pace
    assert 0 < done[9] < started[9] and 0 < done[7] < started[7]


@pytest.mark.parametrize("has_compiler", [True, False])
def test_python_starts_copies_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    def compiled() -> ctypes.CDLL:
        if not has_compiler:
            raise FileNotFoundError("cc")
        raise subprocess.CalledProcessError(1, "cc")

    device, record = Device(), SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(copy_calls, "compiled_loop", compiled)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: device.driver)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: device.driver)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: SimpleNamespace(record=lambda: None, **vars(record)))
    driver_calls()(_copies(3, 5), 9)
    assert device.numbers[9] == [3, 4, 5, 6, 7]
