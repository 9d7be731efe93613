"""Regions of KV transfers in shared memory: what is opened, and what is left when one cannot be made."""

from __future__ import annotations

import fcntl
import mmap
import os

import pytest

from radixmesh.daemons.worker.kv_transfer import shared_memory
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
    fd = shared_memory._opened(region)
    assert fd is not None
    os.close(fd)
    for changes in ({"inode": 1}, {"host": "another"}, {"fd": 0}, {"pid": 0}):
        other = worker_pb2.TransferRegion()
        other.CopyFrom(region)
        other.shared_memory.MergeFrom(worker_pb2.SharedMemory(**changes))
        if "fd" in changes or "pid" in changes:
            setattr(other.shared_memory, *next(iter(changes.items())))
        assert shared_memory._opened(other) is None, changes
    memory.close()
    assert shared_memory._opened(region) is None


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
        assert shared_memory._opened(region) is None
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        opened = shared_memory._opened(region)
        assert opened is not None
        os.close(opened)
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
