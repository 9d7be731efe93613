"""Writers of KV in processes of their own, which import little."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time

import numpy as np
import pytest

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.kv_transfer.transports import shared_memory
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport, make_transport
from radixmesh.worker.v1 import worker_pb2
from support.host_kv_device import HostKvDevice

HAS_NIXL = importlib.util.find_spec("nixl_cu13") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu13 is not installed: radixmesh[nixl]")


def write_by_nixl(address: str, pipe) -> None:
    """A writer of another process, that says when its first bytes are there and goes on until it is told not to."""
    region = _region_from(pipe)

    async def run() -> None:
        transport = make_transport(TransferTransport.NIXL)
        try:
            async with transport.open(address, region, "w") as writer:
                await writer.write(0, np.full(1000, 7, np.uint8))
                pipe.send("written")
                while True:
                    await asyncio.sleep(0.05)
                    await writer.write(0, np.full(0, 7, np.uint8))
                    await writer.words.wrote(0, 1)
        except MeshError:
            pipe.send("refused")
        await asyncio.sleep(60)

    asyncio.run(run())


def write_to_device(address: str, pipe) -> None:
    """A writer of another process: says when it has a place on the receiver's device, and leaves when it is told."""
    region = _region_from(pipe)

    async def run() -> None:
        transport = make_transport(TransferTransport.DEVICE, staging_bytes=1 << 20)
        transport.use_device(device := HostKvDevice(None))
        try:
            async with transport.open(address, region, "w") as writer:
                piece = writer.place(0, 100)
                assert piece is not None
                device.write(piece.address, b"late" * 25)
                await writer.placed(0, 100)
                pipe.send("placed")
                await asyncio.to_thread(pipe.recv)
        except MeshError:
            pass
        await asyncio.sleep(60)

    asyncio.run(run())


def hold_and_write(pipe) -> None:
    """A writer of another process, that has the region open and writes when it is told."""
    region = _region_from(pipe)
    fd = shared_memory.opened(region)
    assert fd is not None
    pipe.send("locked")
    pipe.recv()
    os.pwrite(fd, b"late" * 8, 0)
    os.close(fd)
    pipe.send("written")
    time.sleep(60)


def _region_from(pipe) -> worker_pb2.TransferRegion:
    """Says that this process has started; a region has a lease."""
    pipe.send("started")
    return worker_pb2.TransferRegion.FromString(pipe.recv())
