"""Regions of KV transfers in shared memory: what is opened, and what is left when one cannot be made."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource

import pytest

from radixmesh.daemons.worker.kv_transfer.receiver import TransferReceiver
from radixmesh.daemons.worker.kv_transfer.staging import StagingPool
from radixmesh.daemons.worker.kv_transfer.transports import shared_memory
from radixmesh.worker.v1 import worker_pb2

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has memfd")

SIZE = 1000


def described(memory: shared_memory.SharedMemory) -> worker_pb2.TransferRegion:
    region = worker_pb2.TransferRegion(num_bytes=SIZE)
    memory.describe(region)
    return region


def test_a_region_is_opened_and_nothing_else_is() -> None:
    memory = shared_memory.SharedMemory(SIZE)
    region = described(memory)
    fd = shared_memory.opened(region)
    assert fd is not None
    os.close(fd)
    for changes in ({"inode": 1}, {"host": "another"}, {"fd": 0}, {"pid": 0}):
        other = worker_pb2.TransferRegion()
        other.CopyFrom(region)
        other.shared_memory.MergeFrom(worker_pb2.SharedMemory(**changes))
        if "fd" in changes or "pid" in changes:
            setattr(other.shared_memory, *next(iter(changes.items())))
        assert shared_memory.opened(other) is None, changes
    memory.close()
    assert shared_memory.opened(region) is None


def test_a_file_that_its_owner_can_shrink_is_no_region() -> None:
    """The writer would be killed by SIGBUS."""
    fd = os.memfd_create("radixmesh-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE + mmap.PAGESIZE)
        region = worker_pb2.TransferRegion(
            num_bytes=SIZE,
            shared_memory=worker_pb2.SharedMemory(
                host=shared_memory.host_name(), pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino
            ),
        )
        assert shared_memory.opened(region) is None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        again = shared_memory.opened(region)
        assert again is not None
        os.close(again)
    finally:
        os.close(fd)


def test_memory_that_cannot_be_mapped_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    create = os.memfd_create

    def memfd_create(name: str, flags: int) -> int:
        made.append(create(name, flags))
        return made[-1]

    def refused(*args: object) -> mmap.mmap:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(shared_memory.mmap, "mmap", refused)
    with pytest.raises(OSError, match="no memory"):
        shared_memory.SharedMemory(SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


def test_regions_leave_files_to_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(20, 64)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    transport = shared_memory.SharedMemoryTransport()
    assert limits[-1] == (64, 64)
    held = [transport.new_memory(SIZE) for _ in range(20)]
    assert [type(memory) is shared_memory.SharedMemory for memory in held] == [True] * 16 + [False] * 4
    held[3].close()
    del held[3]
    assert type(transport.new_memory(SIZE)) is shared_memory.SharedMemory


def test_quarantined_bytes_are_counted_while_regions_come_and_go() -> None:
    """By the thread of the metrics, beside the loop to which the regions belong."""
    receiver = TransferReceiver("w", StagingPool(1 << 20), clock=lambda: 0.0)
    for name in ("a", "b", "c"):
        receiver.prepare(name, 1, first_token=0, num_tokens=4, token_bytes=8, lease_s=1.0)

    class GoneMeanwhile:
        @property
        def is_quarantined(self) -> bool:
            receiver.abort("b")
            return True

    receiver.get("a").reception = GoneMeanwhile()  # type: ignore[assignment]
    assert receiver.num_quarantined_bytes == receiver.get("a").num_bytes
    assert len(receiver) == 2
