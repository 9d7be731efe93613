"""The contract of all KV transports: what a writer writes arrives, and what was given up is nobody else's memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from mesh.test_kv_transfer import TIMEOUT_S, Pair, pair
from support.host_kv_device import HostKvDevice
from support.kv_writers import hold_and_write, needs_nixl, write_by_nixl

from radixmesh.cli import transfers as cli_transfers
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.kv_transfer import host_process
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, ReceiveState
from radixmesh.daemons.worker.kv_transfer.receiver import Region
from radixmesh.daemons.worker.kv_transfer.staging import STAMP_BYTES
from radixmesh.daemons.worker.kv_transfer.transport import KvTransport, checksum_of
from radixmesh.daemons.worker.kv_transfer.transports import nixl_agent, shared_memory
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport, make_transport
from radixmesh.daemons.worker.kv_transfer.transports.nixl_transport import NixlTransport
from radixmesh.worker.v1 import worker_pb2

NIXL = pytest.param(TransferTransport.NIXL, marks=needs_nixl)
PROCESS_S = 150.0  # Until a process has started, on a loaded machine.
KINDS = [TransferTransport.GRPC, TransferTransport.SHARED_MEMORY, TransferTransport.DEVICE, NIXL, "elsewhere", "afar"]
KINDS.append(pytest.param("nixl-device", marks=needs_nixl))
"""elsewhere: shared memory of another host. afar: a device that the writer's does not reach. nixl-device: NIXL between
devices."""
ON_DEVICES = (TransferTransport.DEVICE, "nixl-device")


@asynccontextmanager
async def receiver(kind: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Pair, KvTransport]]:
    """Workers that have no scheduler's requests, and a transport of that kind to the second one."""
    others = {"elsewhere": TransferTransport.SHARED_MEMORY, "afar": TransferTransport.DEVICE}
    given = TransferTransport({**others, "nixl-device": TransferTransport.NIXL}.get(kind, kind))
    has_devices = given is TransferTransport.DEVICE or kind == "nixl-device"
    async with pair(transfer_transport=given, has_devices=has_devices) as both:
        if kind == "elsewhere":
            monkeypatch.setattr(shared_memory, "host_name", lambda: "another")
        transport = make_transport(given, staging_bytes=1 << 20)
        if has_devices:
            transport.use_device(HostKvDevice(None, can_open=kind != "afar"))
        yield both, transport
        transport.close()


def written_of(both: Pair, region: Region) -> np.ndarray:
    """Bytes of a region, wherever its writer wrote them."""
    if isinstance(region.written, DevicePiece):
        return np.frombuffer(both.core(1).executor.runner.kv_device.read(*region.written), np.uint8)
    assert region.written is not None
    return region.written


def data_of(region: worker_pb2.TransferRegion) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, region.num_bytes, np.uint8)


async def until(is_true) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


async def given_to(pipe, both: Pair) -> worker_pb2.TransferRegion:
    """A region that a process is told of, once it has started."""
    assert await asyncio.to_thread(pipe.poll, PROCESS_S) and pipe.recv() == "started"
    region = await both.prepare(lease_ms=60_000)
    pipe.send(region.SerializeToString())
    return region


@pytest.mark.parametrize("kind", KINDS)
async def test_bytes_arrive_in_whatever_pieces_they_are_written(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver(kind, monkeypatch) as (both, transport):
        transfers = both.core(1).transfers
        for name, cuts in (("a", [0]), ("b", [0, 1, 100, 101])):
            region = await both.prepare(name)
            held, data = transfers.receiver.get(name), data_of(region)
            async with transport.open(both.workers[1].address, region, "w") as writer:
                for start, end in zip(cuts, [*cuts[1:], len(data)], strict=True):
                    await writer.write(start, data[start:end])
                await writer.done(checksum_of(data))
            assert held.reception.state is ReceiveState.WRITTEN and held.num_written == region.num_bytes
            assert (written_of(both, held) == data).all()
            assert isinstance(held.written, DevicePiece) == (kind in ON_DEVICES)
            transfers.abort(name)
            assert held.memory is None and not transfers.staging.num_bytes, "the last word was said"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_refused_or_broken_off_fails_on_both_sides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver(kind, monkeypatch) as (both, transport):
        address, transfers = both.workers[1].address, both.core(1).transfers
        region = await both.prepare("a")
        data = data_of(region)
        reception = transfers.receiver.get("a").reception
        with pytest.raises(MeshError, match=r"failed|is over|broke"):
            async with transport.open(address, region, "w") as writer:
                await writer.write(0, data)
                if kind in ON_DEVICES:
                    # No checksum tells.
                    await until(lambda: reception.state is ReceiveState.WRITING)
                    transfers.abort("a")
                await writer.done(1)
        region = await both.prepare("b")
        reception = transfers.receiver.get("b").reception
        with pytest.raises(ZeroDivisionError):
            async with transport.open(address, region, "w") as writer:
                await writer.write(0, data[:100])
                await until(lambda: reception.state is ReceiveState.WRITING)
                raise ZeroDivisionError
        await until(lambda: reception.failure is Failure.WRITER_GONE)
        await until(lambda: not transfers.staging.num_bytes)
        stranger = worker_pb2.TransferRegion()
        stranger.CopyFrom(region)
        stranger.incarnation += 1
        with pytest.raises(MeshError):
            await transport.send(address, stranger, "w", data)
        with pytest.raises(MeshError):
            await transport.send("127.0.0.1:1", region, "w", data)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_writer_that_has_not_begun_gives_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiver(kind, monkeypatch) as (both, transport):
        address, transfers = both.workers[1].address, both.core(1).transfers
        region = await both.prepare("a")
        reception = transfers.receiver.get("a").reception
        await transport.give_up(address, region, "w")
        assert reception.failure is Failure.WRITER_ABORTED and not transfers.staging.num_bytes
        await transport.give_up(address, region, "w")  # It is known already.
        with pytest.raises(MeshError):
            await transport.send(address, region, "w", data_of(region))
        # A region that has a writer is that writer's: the end of its stream tells.
        region = await both.prepare("b")
        reception = transfers.receiver.get("b").reception
        async with transport.open(address, region, "w") as writer:
            await writer.write(0, data_of(region))
            await until(lambda: reception.state is ReceiveState.WRITING)
            await transport.give_up(address, region, "w")
            assert reception.state is ReceiveState.WRITING
            await writer.done(checksum_of(data_of(region)))
        assert reception.state is ReceiveState.WRITTEN
        with pytest.raises(MeshError):
            await transport.give_up("127.0.0.1:1", region, "w")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_region_that_was_given_up_takes_no_writer_and_is_free(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiver(kind, monkeypatch) as (both, transport):
        transfers = both.core(1).transfers
        region = await both.prepare()
        transfers.abort("t")
        assert not transfers.staging.num_bytes, "nobody had begun"
        with pytest.raises(MeshError):
            await transport.send(both.workers[1].address, region, "w", data_of(region))
        again = await both.prepare()
        held = transfers.receiver.get("t")
        assert again.incarnation != region.incarnation and held.memory is not None and not held.memory.any()


@pytest.mark.parametrize("how", ["dies", "ends"])
async def test_shared_memory_is_its_writers_until_that_process_is_gone(how: str) -> None:
    async with pair(transfer_transport=TransferTransport.SHARED_MEMORY) as both:
        transfers = both.core(1).transfers
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=hold_and_write, args=(theirs,))
        process.start()
        try:
            region = await given_to(ours, both)
            held = transfers.receiver.get("t")
            assert await asyncio.to_thread(ours.poll, PROCESS_S) and ours.recv() == "locked"
            transfers.abort("t")
            await asyncio.sleep(0.5)
            assert transfers.receiver.num_quarantined_bytes == transfers.staging.num_bytes == region.num_bytes
            if how == "dies":
                process.kill()
            else:
                ours.send("write")
                assert await asyncio.to_thread(ours.poll, PROCESS_S) and ours.recv() == "written"
            await until(lambda: not transfers.staging.num_bytes)
            assert held.memory is None and not len(transfers.receiver)
        finally:
            process.kill()
            process.join()


def test_nothing_but_a_region_is_opened(tmp_path) -> None:
    memory = shared_memory.SharedMemory(100)
    region = worker_pb2.TransferRegion(num_bytes=100)
    memory.describe(region)
    fd = shared_memory.opened(region)
    assert fd is not None and not memory.is_writer_gone()
    os.close(fd)
    assert memory.is_writer_gone()
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(os.fstat(region.shared_memory.fd).st_size)
        region.shared_memory.fd, region.shared_memory.inode = file.fileno(), os.fstat(file.fileno()).st_ino
        assert shared_memory.opened(region) is None
    memory.describe(region)
    for field in ("inode", "pid", "fd"):
        other = worker_pb2.TransferRegion()
        other.CopyFrom(region)
        setattr(other.shared_memory, field, 99999)
        assert shared_memory.opened(other) is None, field
    region.num_bytes += 1
    assert shared_memory.opened(region) is None, "of another size"
    memory.close()


def test_every_transport_is_under_the_contract() -> None:
    given = {getattr(kind, "values", [kind])[0] for kind in KINDS}
    assert given > set(TransferTransport)


@needs_nixl
@pytest.mark.parametrize("how", ["dies", *(pytest.param(how, marks=pytest.mark.full) for how in ("ends", "operator"))])
async def test_nixl_memory_is_its_writers_until_that_is_over(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped, it could still write: deregistered memory too, as the library does between processes."""
    async with pair(transfer_transport=TransferTransport.NIXL) as both:
        transfers = both.core(1).transfers
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=write_by_nixl, args=(both.workers[1].address, theirs))
        process.start()
        try:
            region = await given_to(ours, both)
            held = transfers.receiver.get("t")
            assert await asyncio.to_thread(ours.poll, PROCESS_S) and ours.recv() == "written"
            assert held.memory is not None and (held.memory[:1000] == 7).all()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            transfers.abort("t")
            await asyncio.sleep(1.5)
            assert transfers.receiver.num_quarantined_bytes == transfers.staging.num_bytes == region.num_bytes
            if how == "dies":
                process.kill()
            elif how == "ends":
                os.kill(process.pid, signal.SIGCONT)
                assert await asyncio.to_thread(ours.poll, PROCESS_S) and ours.recv() == "refused"
            else:
                await both.stub.AbortTransfer(worker_pb2.AbortTransferRequest(transfer_id="t"))
                assert transfers.staging.num_bytes, "an abort alone is no proof"
                command = [both.workers[1].address, "--timeout", "60"]
                assert await asyncio.to_thread(cli_transfers.run, command) == 0
                assert f"quarantined {region.num_bytes} bytes\n  t\n" in capsys.readouterr().out
                assert await asyncio.to_thread(cli_transfers.run, [*command, "--free", "t", "--json"]) == 0
                assert '"quarantined_bytes": 0' in capsys.readouterr().out
            await until(lambda: not transfers.staging.num_bytes)
            assert held.memory is None and not len(transfers.receiver)
            assert transfers.transport.slab.num_free == transfers.transport.slab.num_bytes
        finally:
            process.kill()
            process.join()


@needs_nixl
async def test_a_way_over_grpc_in_place_of_nixl_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    num_fallbacks = 0

    def count() -> None:
        nonlocal num_fallbacks
        num_fallbacks += 1

    async with pair(transfer_transport=TransferTransport.GRPC) as both:
        transport = make_transport(TransferTransport.NIXL, staging_bytes=1 << 20, on_fallback=count)
        for name in ("a", "b"):
            region = await both.prepare(name)
            held, data = both.core(1).transfers.receiver.get(name), data_of(region)
            await transport.send(both.workers[1].address, region, "w", data)
            assert held.reception.state is ReceiveState.WRITTEN and (written_of(both, held) == data).all()
        transport.close()
    said = [record.levelname for record in caplog.records if record.getMessage() == "nixl_does_not_lead_there"]
    assert (num_fallbacks, said) == (2, ["WARNING"])


@needs_nixl
async def test_a_writer_that_was_not_let_in_writes_nothing() -> None:
    async with pair(transfer_transport=TransferTransport.NIXL) as both:
        transport = make_transport(TransferTransport.NIXL)
        region = await both.prepare()
        held = both.core(1).transfers.receiver.get("t").held
        both.core(1).transfers.abort("t")
        with pytest.raises(MeshError):
            async with transport.open(both.workers[1].address, region, "w"):
                pytest.fail("it was let in")
        assert not held.array.any()


@needs_nixl
async def test_a_writer_over_nixl_tells_of_its_end_and_registers_nothing_for_stamps() -> None:
    async with pair(transfer_transport=TransferTransport.NIXL) as both:
        transport = make_transport(TransferTransport.NIXL)
        assert isinstance(transport, NixlTransport)
        register, registered, num_free = transport.agent.register, [], transport.slab.num_free
        transport.agent.register = lambda *memory: (registered.append(memory), register(*memory))[1]  # type: ignore[method-assign]
        region = await both.prepare()
        received = both.core(1).transfers.receiver.get("t")
        async with transport.open(both.workers[1].address, region, "w") as writer:
            await writer.write(0, np.arange(STAMP_BYTES, dtype=np.uint8))
            await _until(lambda: received.num_written == STAMP_BYTES)
            assert received.memory is not None and not received.is_ending
            assert received.memory[:STAMP_BYTES].tolist() == list(range(STAMP_BYTES))
            assert not registered and transport.slab.num_free == num_free
            await writer.ending()
            await _until(lambda: received.is_ending)


@needs_nixl
def test_pieces_of_the_slab_are_nobody_elses_and_come_back() -> None:
    slab = nixl_agent.Slab(nixl_agent.NixlAgent(), 1 << 20)
    rng, pieces = random.Random(22), []
    for step in range(2000):
        if pieces and (rng.random() < 0.5 or len(pieces) > 40):
            piece, value = pieces.pop(rng.randrange(len(pieces)))
            assert (piece == value).all(), "another one was written there"
            slab.give_back(piece)
            continue
        try:
            piece = slab.take(rng.randrange(1, 100_000))
        except MemoryError:
            assert slab.num_free < slab.num_bytes
            continue
        piece[:] = step % 251
        pieces.append((piece, step % 251))
    for piece, _ in pieces:
        slab.give_back(piece)
    assert slab.num_free == slab.num_bytes
    slab.give_back(slab.take(slab.num_bytes))
    with pytest.raises(MemoryError):
        slab.take(slab.num_bytes + 1)


def test_a_process_is_gone_by_its_start_and_only_on_this_host() -> None:
    own = HostProcess.own()
    assert not own.is_gone() and own.started
    assert own._replace(started=own.started + 1).is_gone(), "its number is another process's by now"
    assert not own._replace(started=own.started + 1, host="elsewhere").is_gone()
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    seen = HostProcess(own.host, process.pid or 0, host_process.started_at(process.pid or 0) or 0)
    assert not seen.is_gone()
    process.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while not seen.is_gone() and time.monotonic() < deadline:  # A zombie has no memory.
        time.sleep(0.01)
    assert seen.is_gone()
    process.join()


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.001)
