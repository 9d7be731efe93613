"""A stand-in for a GPU that KV transfers use: memory of the host that other processes map as they would a GPU's.

What a gather has read comes to its target on a thread of its own, when `goes_on` is set: a kernel that still runs while
its process does other things. A scatter is over when `lands` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker import __main__ as worker_main
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.simulated.device import MappedKvDevice
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent


class HeldEvent(DeviceEvent):
    """Of a step or a copy that runs until it is told to be over."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    @property
    def is_done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()


class CopyEvent(DeviceEvent):
    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    @property
    def is_done(self) -> bool:
        return self._copy.done()

    def wait(self) -> None:
        self._copy.result()


class HostKvDevice(MappedKvDevice):
    """can_open: False stands for GPUs that cannot reach each other."""

    def __init__(self, runner: ModelRunner | None, *, can_open: bool = True) -> None:
        super().__init__()
        self._runner = runner
        self._copies = ThreadPoolExecutor(1)
        self.can_open = can_open
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.lands = threading.Event()
        self.lands.set()
        self.num_gathered = self.num_scattered = 0

    def gather(
        self,
        tokens: TokenNumbers,
        target: DevicePiece,
        part: KvShare | None,
        after: DeviceEvent = DONE,
        *,
        tail: bytes = b"",
    ) -> Copied:
        assert self._runner is not None
        after.wait()
        data = self._runner.read_kv(tokens.numbers, part).tobytes() + tail
        assert len(data) == target.num_bytes

        def copy() -> None:
            self.goes_on.wait()
            self.write(target.address, data)

        self.num_gathered += 1
        return Copied(CopyEvent(self._copies.submit(copy)))

    def scatter(
        self, tokens: TokenNumbers, source: DevicePiece, part: KvShare | None, after: DeviceEvent | None = None
    ) -> Copied:
        assert self._runner is not None
        data = np.frombuffer(bytearray(self.read(source.address, source.num_bytes)), np.uint8)
        self._runner.write_kv(tokens.numbers, data, part)
        self.num_scattered += 1
        return Copied(HeldEvent(self.lands))

    def open(self, handle: bytes) -> DevicePiece:
        if not self.can_open:
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "no way to the other GPU", {"feature": "kv"})
        return super().open(handle)


@contextmanager
def workers_have_devices(**fields: bool) -> Iterator[None]:
    """Workers that load a model meanwhile have a stand-in for a GPU."""
    load = worker_main.load_model

    def load_model(*args: object) -> object:
        model = load(*args)  # type: ignore[arg-type]
        model.runner.kv_device = HostKvDevice(model.runner, **fields)
        return model

    with mock.patch.object(worker_main, "load_model", load_model):
        yield
