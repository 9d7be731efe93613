"""What the runner needs of a device: copies, memory that both see, marks in its order of work, captured graphs.

`HostDevice` computes where it is called and captures nothing, so that the same runner can be tested without a GPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from radixmesh.daemons.runtime.arrays import IntArray


class Mark(ABC):
    """A place in the device's order of work. made_ns: the host's monotonic time just before it was made."""

    made_ns: int

    @property
    @abstractmethod
    def is_reached(self) -> bool:
        """True also where the device has failed: wait() says so then."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it is reached, without the interpreter's lock. Raises RuntimeError if the device failed."""

    @abstractmethod
    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that are reached."""


class Device(ABC):
    """One device and the stream on which everything runs in order."""

    torch_device: torch.device
    can_capture: bool

    @abstractmethod
    def mark(self) -> Mark:
        """A mark behind all work so far."""

    @abstractmethod
    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        """Copies int32 `values` to the first of `target`, behind all work so far. `values` may change afterwards."""

    @abstractmethod
    def host_ints(self, *shape: int) -> torch.Tensor:
        """int32 zeros on the host, which kernels read and write where they lie.

        Kernels see what was written before they were launched; what they write is there when a mark behind them is
        reached.
        """

    @abstractmethod
    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Records `work`, which has run before and does not now; what replays it gives its result, the same memory each
        time."""

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Work launched inside goes to the stream."""
        yield


class HostMark(Mark):
    """Reached when it was made."""

    def __init__(self) -> None:
        self.made_ns = time.monotonic_ns()

    @property
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return (self.made_ns - earlier.made_ns) * 1e-9


class HostDevice(Device):
    """The CPU: work is done when its call returns."""

    torch_device = torch.device("cpu")
    can_capture = False

    def mark(self) -> Mark:
        return HostMark()

    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        target[: len(values)] = torch.from_numpy(values)

    def host_ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise AssertionError("the host captures nothing")


class CudaMark(Mark):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.made_ns = time.monotonic_ns()
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @property
    def is_reached(self) -> bool:
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) * 1e-3


class CudaDevice(Device):
    """One GPU; work goes to one stream. Graphs share one memory pool: one runs at a time."""

    can_capture = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def mark(self) -> Mark:
        return CudaMark(self._stream)

    def upload(self, values: IntArray, target: torch.Tensor) -> None:
        # Pinned blocks come from torch's cache, which gives one out again only after the copy from it is over.
        target[: len(values)].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def host_ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._stream):
            yield


class DeviceClock:
    """Device times of steps on the host's monotonic clock.

    Each mark is placed by its device time since the one before: a span is exact. The clocks' drift is made up for from
    both sides: a step cannot start before it was launched, nor end later than it was seen to be over.
    """

    def __init__(self, origin: Mark) -> None:
        self._last = self._ahead = origin
        self._last_ns = time.monotonic_ns()

    def begin(self, device: Device) -> Mark:
        """Of what is launched next: the end of what was launched last while that runs still, since a mark between two
        graphs keeps the device waiting for some microseconds."""
        return device.mark() if self._ahead.is_reached else self._ahead

    def end(self, device: Device) -> Mark:
        """Behind what was launched."""
        self._ahead = device.mark()
        return self._ahead

    def place(self, start: Mark, end: Mark) -> tuple[int, int]:
        """Times of a step's start and end, ns, both reached. Steps are placed in their order."""
        start_ns = max(self._last_ns + int(start.seconds_since(self._last) * 1e9), start.made_ns)
        end_ns = start_ns + int(end.seconds_since(start) * 1e9)
        late_ns = end_ns - time.monotonic_ns()
        if late_ns > 0:
            start_ns, end_ns = start_ns - late_ns, end_ns - late_ns
        self._last, self._last_ns = end, end_ns
        return start_ns, end_ns
