"""Calls of the driver that copy strided rows, many in one call, so that a load takes nothing of the interpreter's lock.

A load of a long prefix is about a thousand copies. Started one by one from Python they hold the lock for milliseconds
at a time, and the step thread loses it in every operation of torch that lets it go: steps that take 0.1 ms to launch
took 10 to 30 ms beside loads. So a loop in C starts them, which the machine's C compiler makes when a worker starts;
Triton needs that compiler too. Without it Python starts them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)

NUM_FIELDS = 16
"""Of the driver's CUDA_MEMCPY2D, 8 bytes each."""
PACE = 64
"""Copies from one event to the next: of rows that are worth it 16 to 64 MiB, a millisecond of the bus at most."""
PACE_OF_PYTHON = 128
"""The same where Python starts copies: it may have to wait for the lock for some milliseconds."""
_EVENT_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC: waiters sleep; CU_EVENT_DISABLE_TIMING.
_COMPILE_TIMEOUT_S = 60.0

Addresses = npt.NDArray[np.int64]
CopyCalls = Callable[[Addresses, int], None]
"""Starts copies: CUDA_MEMCPY2D int64 [n, NUM_FIELDS], contiguous, read in the call; and the stream, on the current
context. Never more than 2 x pace of them are left to do in a stream: it waits, without the interpreter's lock. Raises
RuntimeError."""
CopyCall = Callable[[int, int], None]
"""Starts one: its address, and the stream. Raises RuntimeError."""

# num_started: copies that the stream was given so far. events: of the stream, used in turn.
SOURCE = r"""
typedef int (*copy_call)(const void *copy, void *stream);
typedef int (*record_call)(void *event, void *stream);
typedef int (*wait_call)(void *event);

int start_copies(copy_call copy, record_call record, wait_call wait, const char *copies, long long num, long long size,
                 void *stream, void *const *events, long long pace, long long *num_started) {
    for (long long i = 0; i < num; i++) {
        int status = copy(copies + i * size, stream);
        if (status) return status;
        long long number = ++*num_started;
        if (number % pace) continue;
        number /= pace;
        if ((status = record(events[number % 2], stream))) return status;
        if (number > 1 && (status = wait(events[(number - 1) % 2]))) return status;
    }
    return 0;
}
"""


class _Awaited(Protocol):
    def synchronize(self) -> object:
        """Blocks without the interpreter's lock."""


class CopyLoop:
    """CopyCalls by a loop in C, without the interpreter's lock. A stream's copies are started by one thread at a time.

    The two events of a stream are never given back: streams are there as long as the worker."""

    def __init__(self, library: ctypes.CDLL, driver: ctypes.CDLL, pace: int = PACE) -> None:
        """library: of `compiled_loop`. driver: libcuda.so.1, whose calls leave the interpreter's lock."""
        self._function, self._driver, self._pace = library.start_copies, driver, pace
        pointer, number = ctypes.c_void_p, ctypes.c_longlong
        self._function.argtypes = (pointer,) * 4 + (number,) * 2 + (pointer,) * 2 + (number, pointer)
        self._function.restype = ctypes.c_int
        functions = (driver.cuMemcpy2DAsync_v2, driver.cuEventRecord, driver.cuEventSynchronize)
        self._addresses = [ctypes.cast(function, pointer) for function in functions]
        self._events: dict[int, tuple[ctypes.Array[ctypes.c_void_p], ctypes.c_longlong]] = {}

    def __call__(self, copies: Addresses, stream: int) -> None:
        assert copies.flags.c_contiguous and copies.dtype == np.int64 and copies.shape[1:] == (NUM_FIELDS,)
        if not len(copies):
            return
        if stream not in self._events:
            self._events[stream] = (ctypes.c_void_p * 2)(*(self._new_event() for _ in range(2))), ctypes.c_longlong(0)
        events, num_started = self._events[stream]
        size = copies.itemsize * NUM_FIELDS
        of_copies = copies.ctypes.data, len(copies), size
        status = self._function(*self._addresses, *of_copies, stream, events, self._pace, ctypes.byref(num_started))
        if status:
            raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {status}")

    def _new_event(self) -> int | None:
        event = ctypes.c_void_p()
        if status := self._driver.cuEventCreate(ctypes.byref(event), _EVENT_FLAGS):
            raise RuntimeError(f"cuEventCreate failed with CUDA error {status}")
        return event.value


def driver_calls() -> CopyCalls:
    """The driver's calls, on the current context. Raises OSError where there is no driver."""
    # Without the interpreter's lock: a call may wait for the bus.
    driver = ctypes.CDLL("libcuda.so.1")
    try:
        return CopyLoop(compiled_loop(), driver)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("copy_loop_not_compiled", error=repr(error), effect="launches wait for loads of KV")
    # Keeps the interpreter's lock: a call takes a microsecond or two, and to get the lock back may take milliseconds.
    function = ctypes.PyDLL("libcuda.so.1").cuMemcpy2DAsync_v2
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int

    def call(address: int, stream: int) -> None:
        if status := function(address, stream):
            raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {status}")

    return one_by_one(paced(call, _recorded))


def compiled_loop() -> ctypes.CDLL:
    """Raises OSError or SubprocessError where there is no C compiler, or it fails."""
    with tempfile.TemporaryDirectory(prefix="radixmesh-") as folder:
        source, library = Path(folder, "copies.c"), Path(folder, "copies.so")
        source.write_text(SOURCE)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        # The file may go: what is mapped stays.
        return ctypes.CDLL(str(library))


def one_by_one(call: CopyCall) -> CopyCalls:
    """CopyCalls that start one copy after the other from Python."""

    def start(copies: Addresses, stream: int) -> None:
        size, first = copies.itemsize * NUM_FIELDS, copies.ctypes.data
        for address in range(first, first + size * len(copies), size):
            call(address, stream)

    return start


def paced(call: CopyCall, record: Callable[[], _Awaited], pace: int = PACE_OF_PYTHON) -> CopyCall:
    """The same, for streams that never have more than 2 x pace copies to do.

    A stream's queue has an end (some hundreds of operations), where the driver waits for room. It would do so with the
    interpreter's lock, and copies may be behind a step that waits for a lost rank: nobody could end that step.
    record: an event behind all work of the current stream.
    """
    num_started: dict[int, int] = {}
    last: dict[int, _Awaited] = {}

    def start(address: int, stream: int) -> None:
        call(address, stream)
        num = num_started[stream] = num_started.get(stream, 0) + 1
        if num % pace == 0:
            before, last[stream] = last.get(stream), record()
            if before is not None:
                before.synchronize()

    return start


def _recorded() -> _Awaited:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
