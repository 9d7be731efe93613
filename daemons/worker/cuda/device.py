"""The device as the runner sees it: copies, memory that host and device share, events, captured graphs.

`HostDevice` computes where it is called and captures nothing, so that the same runner can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.compilers.launchers import load_launchers_apart
from radixmesh.daemons.worker.cuda.locked_memory import LockedMemory
from radixmesh.daemons.worker.cuda.step.inputs.pinned_ring import PinnedRing
from radixmesh.daemons.worker.step_handle import DeviceEvent

_SPARE_EVENTS = 64
# Of host memory from which kernels fetch what is uploaded, and how often that is possible ahead of the device. A step
# with chunks has some five uploads.
_UPLOAD_BYTES, _NUM_UPLOADS = 128 << 10, 64


def shared_memory(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Zeroed memory without a name, which is gone when the last process that maps it is; and its descriptor."""
    descriptor = os.memfd_create("radixmesh-masks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return mmap.mmap(descriptor, num_bytes), descriptor


class TimedEvent(DeviceEvent):
    """An event on the device's stream. recorded_ns: the host's monotonic time just before it was recorded."""

    recorded_ns: int

    @abstractmethod
    def seconds_since(self, earlier: TimedEvent) -> float:
        """Device time between two events that are done."""


class Device(ABC):
    """One device and the stream on which everything runs in order."""

    torch_device: torch.device
    can_capture: bool

    @abstractmethod
    def record_event(self) -> TimedEvent:
        """Records an event behind all work so far."""

    @abstractmethod
    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        """Copies int32 `values` to the first of `target`, int32 and contiguous, behind all work so far on the current
        stream. `values` may change afterwards. Any thread."""

    @abstractmethod
    def copy_bytes(self, source: int, target: int, num_bytes: int) -> None:
        """Copies a few bytes, at least one, between addresses that the device reaches, host_ints() among them, in order
        with the current stream. The source stays as it is until then."""

    @abstractmethod
    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, behind all work so far; filled when an event behind it is done."""

    @abstractmethod
    def send_beside(self, source: torch.Tensor, target: torch.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        """Copies ranges of rows of host_ints() to the same rows of `target`, on the device, beside all other work.

        Calls keep their order, and return when the rows are there. Any thread."""

    @abstractmethod
    def run_beside(
        self, work: Callable[[], object], after: DeviceEvent, *, is_urgent: bool
    ) -> tuple[TimedEvent, TimedEvent]:
        """Runs work behind an event and behind other such work of that urgency, beside all else: nothing waits for it
        but for what hold() says. is_urgent: it goes ahead of a step. Events at its begin and end."""

    @abstractmethod
    def fork(self, work: Callable[[], object]) -> Callable[[], None]:
        """Launches `work` behind all work so far, beside what is launched until the result is called: that waits for
        it. Can be captured. Tensors that `work` reads live until then, and it uses nothing that is shared by stream, as
        a workspace of GEMMs is."""

    @abstractmethod
    def hold(self, event: DeviceEvent) -> None:
        """All that is launched from now on, but for urgent work, waits for an event of run_beside()."""

    @abstractmethod
    def host_ints(self, *shape: int) -> torch.Tensor:
        """int32 zeros on the host, which kernels read and write where they lie.

        Kernels see what was written before they were launched; what they write is there when an event behind them is
        done.
        """

    @abstractmethod
    def locked_ints(self, *shape: int, field: str) -> torch.Tensor:
        """The same, of memory that the host reads as fast as any other. field: the setting that is to be smaller where
        it cannot be had (INVALID_ARGUMENT)."""

    @abstractmethod
    def shared_ints(self, *shape: int, field: str) -> tuple[torch.Tensor, int]:
        """As locked_ints(), of memory that other processes may map; and the descriptor to hand to them, which is open
        as long as the tensor is there."""

    @abstractmethod
    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Records `work`, which has run before and does not now; what replays it gives its result, the same memory each
        time, until another graph is replayed. docs/gpu-design.md has the rules that `work` keeps."""

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Work launched inside goes to the stream."""
        yield

    def stay_in_order(self) -> None:
        """From now on work of the calling thread goes to the stream. Cheap if it does so already: for what is called
        in every step, by the one thread that runs them."""
        return


class HostEvent(TimedEvent):
    """Done when it is recorded."""

    def __init__(self) -> None:
        self.recorded_ns = time.monotonic_ns()

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: TimedEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return (self.recorded_ns - earlier.recorded_ns) * 1e-9


class HostDevice(Device):
    """The CPU: work is done when its call returns."""

    torch_device = torch.device("cpu")
    can_capture = False

    def record_event(self) -> TimedEvent:
        return HostEvent()

    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        target[: len(values)] = torch.from_numpy(values)

    def copy_bytes(self, source: int, target: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @torch.inference_mode()
    def send_beside(self, source: torch.Tensor, target: torch.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        for start, end in rows:
            target[start:end] = source[start:end]

    def run_beside(
        self, work: Callable[[], object], after: DeviceEvent, *, is_urgent: bool
    ) -> tuple[TimedEvent, TimedEvent]:
        after.wait()
        start = HostEvent()
        work()
        return start, HostEvent()

    def fork(self, work: Callable[[], object]) -> Callable[[], None]:
        work()
        return lambda: None

    def hold(self, event: DeviceEvent) -> None:
        event.wait()

    def host_ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def locked_ints(self, *shape: int, field: str) -> torch.Tensor:
        return self.host_ints(*shape)

    def shared_ints(self, *shape: int, field: str) -> tuple[torch.Tensor, int]:
        num = math.prod(shape)
        memory, descriptor = shared_memory(4 * num)
        return _closing(torch.from_numpy(np.frombuffer(memory, np.int32, num).reshape(shape)), descriptor)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise AssertionError("the host captures nothing")


class CudaEvent(TimedEvent):
    def __init__(self, stream: torch.cuda.Stream, spare: deque[torch.cuda.Event]) -> None:
        """spare: events of the driver, of those that are gone: to make one takes longer than to record it."""
        self.recorded_ns = time.monotonic_ns()
        self._was_done = False
        self._spare = spare
        try:
            self._event = spare.pop()
        except IndexError:
            # Blocking: the waiting thread sleeps instead of spinning on a core.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def __del__(self) -> None:
        # Nobody has the event any more, so that it may be recorded again, whether it is done or not.
        self._spare.append(self._event)

    @property
    def is_done(self) -> bool:
        if not self._was_done:
            try:
                self._was_done = bool(self._event.query())  # type: ignore[no-untyped-call]
            except RuntimeError:
                return True  # wait() raises.
        return self._was_done

    def wait(self) -> None:
        # Several ask for one event, and each question to the driver takes microseconds.
        if not self._was_done:
            self._event.synchronize()
            self._was_done = True

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Work that the stream is given from now on waits for the event."""
        stream.wait_event(self._event)

    def seconds_since(self, earlier: TimedEvent) -> float:
        if earlier is self:
            return 0.0
        assert isinstance(earlier, CudaEvent)
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class _Current(threading.local):
    """The device whose stream the thread's work goes to."""

    device: CudaDevice | None = None


class CudaDevice(Device):
    """One GPU; work goes to one stream. Graphs share one memory pool: one runs at a time."""

    _current = _Current()
    _is_first = True

    can_capture = True

    def __init__(self, index: int = 0) -> None:
        # Ahead of all kernels: several threads of a worker launch them.
        load_launchers_apart()
        if not CudaDevice._is_first:
            # Memory and graphs of an earlier runner of the process, before this one sizes its own. A worker has none.
            gc.collect()
        CudaDevice._is_first = False
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        # Blocks of its kernels go first as those of a step retire.
        self._urgent = torch.cuda.Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]
        self._patient = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._forked = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._spare: deque[torch.cuda.Event] = deque(maxlen=_SPARE_EVENTS)
        # Triton is needed where there is a GPU alone.
        from radixmesh.kernels.copy_words import WordCopies

        self._words = WordCopies()
        self._uploads: PinnedRing | None = None
        self._uploading = threading.Lock()

    def record_event(self) -> TimedEvent:
        return CudaEvent(self._stream, self._spare)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The one on which steps run."""
        return self._stream

    def event_on(self, stream: torch.cuda.Stream) -> CudaEvent:
        """An event behind all work of another stream."""
        return CudaEvent(stream, self._spare)

    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        num = len(values)
        if 4 * num > _UPLOAD_BYTES:
            # Pinned blocks come from torch's cache, which gives one out again only after the copy from it is over.
            target[:num].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
            return
        if not num:
            return
        assert target.dtype == torch.int32 and target.is_contiguous() and len(target) >= num, target.shape
        # A copy engine would come to these few bytes behind the KV that it has yet to load for other requests.
        with self._uploading:
            if self._uploads is None:
                self._uploads = PinnedRing(_UPLOAD_BYTES, count=_NUM_UPLOADS)
            buffer = self._uploads.take()
            buffer.numpy()[: 4 * num].view(np.int32)[:] = values
            self._words.ints(buffer.data_ptr(), target.data_ptr(), num)
            self._uploads.fence()

    def copy_bytes(self, source: int, target: int, num_bytes: int) -> None:
        self._words.bytes(source, target, num_bytes)

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    @torch.inference_mode()
    def send_beside(self, source: torch.Tensor, target: torch.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        with torch.cuda.stream(self._beside):
            for start, end in rows:
                target[start:end].copy_(source[start:end], non_blocking=True)
            sent = CudaEvent(self._beside, self._spare)
        sent.wait()

    def run_beside(
        self, work: Callable[[], object], after: DeviceEvent, *, is_urgent: bool
    ) -> tuple[TimedEvent, TimedEvent]:
        stream = self._urgent if is_urgent else self._patient
        with self.in_order():
            # Not torch.cuda.stream(): its bookkeeping takes longer than a launch.
            torch.cuda.set_stream(stream)
            try:
                if isinstance(after, CudaEvent):
                    after.hold(stream)
                start = CudaEvent(stream, self._spare)
                work()
                end = CudaEvent(stream, self._spare)
            except BaseException:
                # Nobody has an event of what was launched: memory that it uses would be another's while it runs.
                with suppress(RuntimeError):
                    stream.synchronize()
                raise
            finally:
                torch.cuda.set_stream(self._stream)
        return start, end

    def fork(self, work: Callable[[], object]) -> Callable[[], None]:
        current, forked = torch.cuda.current_stream(), self._forked
        forked.wait_stream(current)
        with torch.cuda.stream(forked):
            work()
        return lambda: current.wait_stream(forked)

    def hold(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        for stream in (self._stream, self._patient):
            event.hold(stream)

    def host_ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def locked_ints(self, *shape: int, field: str) -> torch.Tensor:
        return _locked_as(shape, LockedMemory(math.prod(shape), self.torch_device, field=field))

    def shared_ints(self, *shape: int, field: str) -> tuple[torch.Tensor, int]:
        num = math.prod(shape)
        memory, descriptor = shared_memory(4 * num)
        rows = np.frombuffer(memory, np.uint8, 4 * num)
        return _closing(_locked_as(shape, LockedMemory(num, self.torch_device, rows, field=field)), descriptor)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory, lock it or give it back meanwhile, for KV transfers: that ends no capture.
        mode = "thread_local"
        # Not torch.cuda.graph(): it waits for all streams, and empties torch's caches, which the next step fills again.
        self._stream.synchronize()
        if not self._graphs:
            # The last graph of a pool that goes takes the pool along: torch keeps its memory until its caches are
            # emptied, and no capture may use its name again.
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        with without_collections(), torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode=mode)
            try:
                result = work()
            finally:
                graph.capture_end()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    @contextmanager
    def in_order(self) -> Iterator[None]:
        before = self._current.device
        if before is self:
            yield
            return
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._stream):
            self._current.device = self
            try:
                yield
            finally:
                self._current.device = before

    def stay_in_order(self) -> None:
        if self._current.device is not self:
            torch.cuda.set_device(self.torch_device)
            torch.cuda.set_stream(self._stream)
            self._current.device = self


def _closing(ints: torch.Tensor, descriptor: int) -> tuple[torch.Tensor, int]:
    weakref.finalize(ints, os.close, descriptor).atexit = False
    return ints, descriptor


def _locked_as(shape: tuple[int, ...], memory: LockedMemory) -> torch.Tensor:
    ints = memory.words.view(shape)
    # Locked as long as the tensor is there.
    weakref.finalize(ints, lambda _: None, memory).atexit = False
    return ints


@contextmanager
def without_collections() -> Iterator[None]:
    """The garbage collector rests meanwhile. What it frees may be graphs or page-locked memory, and a capture of the
    thread on which it runs would be invalidated by that."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class DeviceClock:
    """Device times of steps on the host's monotonic clock.

    Each event is placed by its device time since the one before, so spans are exact. The drift between the clocks is
    bounded from both sides: a step cannot start before it was launched, nor end later than it was seen to be done.
    """

    def __init__(self, origin: TimedEvent) -> None:
        self._last = self._ahead = origin
        self._last_ns = time.monotonic_ns()

    def begin(self, device: Device) -> TimedEvent:
        """The start event of the next launch: the end event of the last one while that still runs, since an event
        between two graphs costs the device some microseconds."""
        return device.record_event() if self._ahead.is_done else self._ahead

    def end(self, device: Device) -> TimedEvent:
        """The end event, behind all that was launched."""
        self._ahead = device.record_event()
        return self._ahead

    def place(self, start: TimedEvent, end: TimedEvent) -> tuple[int, int]:
        """Times of a step's start and end events, ns; both are done. Steps are placed in their order."""
        start_ns = max(self._last_ns + int(start.seconds_since(self._last) * 1e9), start.recorded_ns)
        end_ns = start_ns + int(end.seconds_since(start) * 1e9)
        late_ns = end_ns - time.monotonic_ns()
        if late_ns > 0:
            start_ns, end_ns = start_ns - late_ns, end_ns - late_ns
        self._last, self._last_ns = end, end_ns
        return start_ns, end_ns
