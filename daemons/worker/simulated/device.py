"""A simulated device: steps and copies of KV that run beside the host, in modelled time, as on a GPU.

launch() computes at once and returns; the step is over when the device, which runs one step after the other, has come
to its end. Copies of KV have streams of their own, and what they wait for and hold up is as on a GPU. So plans that are
sent ahead queue at the device, and a scatter neither waits for them nor keeps them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.kv_transfer.device_memory import HANDLE_BYTES, Copied, DevicePiece, KvDevice, TokenNumbers
from radixmesh.daemons.worker.runner import DecodeRows, Segment, StepOutput
from radixmesh.daemons.worker.simulated.clock import StepClock
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent, StepHandle


class TimedEnd(DeviceEvent):
    """Done at a time of the host's monotonic clock."""

    def __init__(self, end_ns: int) -> None:
        self.end_ns = end_ns

    @property
    def is_done(self) -> bool:
        return time.monotonic_ns() >= self.end_ns

    def wait(self) -> None:
        while (left_ns := self.end_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns * 1e-9)


class DeviceClock(StepClock):
    """A device that runs beside the host: run() says when a step will have run, and does not wait."""

    def __init__(self) -> None:
        self._end_ns = 0

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def run(self, duration_ns: int, ready_ns: int) -> tuple[int, int]:
        start_ns = max(self._end_ns, time.monotonic_ns())
        self._end_ns = start_ns + duration_ns
        return start_ns, self._end_ns

    def hold(self, until_ns: int) -> None:
        """The next step starts no earlier."""
        self._end_ns = max(self._end_ns, until_ns)


class DeviceRunner(SimulatedRunner):
    """A SimulatedRunner whose steps run beside the host: decode rows continue from its own tokens, never from the ids
    of the rows. num_slots: that plans may name."""

    is_asynchronous = True

    def __init__(self, *, num_slots: int, clock: DeviceClock, copied_token_us: float, **of_simulated: object) -> None:
        super().__init__(clock=clock, **of_simulated)  # type: ignore[arg-type]
        self._last_tokens = np.zeros(num_slots, np.int32)
        self.kv_device = SimulatedKvDevice(self, clock, copied_token_us)

    def admitted(self, admit: Admit) -> None:
        self._last_tokens[admit.slot] = (admit.output_ids if len(admit.output_ids) else admit.prompt_ids)[-1]

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        output = self.step(replace(rows, ids=self._last_tokens[rows.slots]), segments, ready_ns)
        self._last_tokens[rows.slots] = output.tokens
        for segment, got in zip(segments, output.segments, strict=True):
            if got.token is not None:
                self._last_tokens[segment.slot] = got.token
        event = TimedEnd(output.end_ns)

        def collect() -> StepOutput:
            event.wait()
            return output

        return StepHandle(event, collect)


class MappedKvDevice(KvDevice):
    """Memory of the host that other processes map as they would a GPU's; copies are to be added."""

    number = -1

    def __init__(self) -> None:
        self._memory = MappedMemory()

    def allocate(self, num_bytes: int) -> int:
        return self._memory.allocate(num_bytes)

    def handle(self, address: int) -> bytes:
        return self._memory.handle(address)

    def open(self, handle: bytes) -> DevicePiece:
        try:
            address = self._memory.open(handle)
        except OSError as error:
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED, f"no way to it: {error}", {"feature": "kv"}
            ) from error
        return DevicePiece(address, self._memory.size(address))

    def close(self, address: int) -> None:
        self._memory.close(address)

    def write(self, address: int, data: bytes) -> None:
        self._memory.write(address, data)

    def read(self, address: int, num_bytes: int) -> bytes:
        return self._memory.read(address, num_bytes)

    def warm_up(self, memory: DevicePiece) -> None:
        return


class SimulatedKvDevice(MappedKvDevice):
    """token_us: of a copy, per token; it begins behind its event and the copy before, in the one direction or the
    other."""

    def __init__(self, runner: SimulatedRunner, clock: DeviceClock, token_us: float) -> None:
        super().__init__()
        self._runner, self._clock, self._token_us = runner, clock, token_us
        self._ends = {"out": 0, "in": 0}

    def gather(
        self,
        tokens: TokenNumbers,
        target: DevicePiece,
        part: KvShare | None,
        after: DeviceEvent = DONE,
        *,
        tail: bytes = b"",
    ) -> Copied:
        self.write(target.address, self._runner.read_kv(tokens.numbers, part).tobytes() + tail)
        return self._copied("out", len(tokens), after)

    def scatter(
        self, tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
    ) -> Copied:
        data = np.frombuffer(self.read(source.address, source.num_bytes), np.uint8)
        self._runner.write_kv(tokens.numbers, data, part)
        copied = self._copied("in", len(tokens), DONE if after is None else after)
        if after is None:
            self.hold(copied)
        return copied

    def hold(self, copied: Copied) -> None:
        assert isinstance(copied.event, TimedEnd)
        self._clock.hold(copied.event.end_ns)

    def _copied(self, stream: str, num_tokens: int, after: DeviceEvent) -> Copied:
        behind_ns = after.end_ns if isinstance(after, TimedEnd) else 0
        start_ns = max(time.monotonic_ns(), behind_ns, self._ends[stream])
        self._ends[stream] = end_ns = start_ns + int(1e3 * self._token_us * num_tokens)
        return Copied(TimedEnd(end_ns), lambda: (end_ns - start_ns) * 1e-9)


class MappedMemory:
    """Memory of the host that processes of one user show to each other. A handle is a path below /proc of the process
    that has the memory, HANDLE_BYTES long."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._paths: dict[int, str] = {}

    def allocate(self, num_bytes: int) -> int:
        """The address of new memory, all zeros, that lives as long as the process."""
        file = os.memfd_create("radixmesh-device", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        address = self._map(file, num_bytes)
        self._paths[address] = f"/proc/{os.getpid()}/fd/{file}"
        return address

    def handle(self, address: int) -> bytes:
        """Names such memory for other processes."""
        return self._paths[address].encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        """The address here of another process's memory. Raises OSError."""
        try:
            file = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        except ValueError as error:  # A zero byte within the name.
            raise OSError(f"{handle!r} names no memory") from error
        try:
            return self._map(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def close(self, address: int) -> None:
        """Gives back what open() gave."""
        del self._maps[address]

    def size(self, address: int) -> int:
        """Bytes of what allocate() or open() gave."""
        return len(self._maps[address])

    def write(self, address: int, data: bytes) -> None:
        """Copies bytes there."""
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        """Bytes of it."""
        return ctypes.string_at(address, num_bytes)

    def _map(self, file: int, num_bytes: int) -> int:
        memory = mmap.mmap(file, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[address] = memory
        return address
