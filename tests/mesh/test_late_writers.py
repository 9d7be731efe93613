"""Writers, commits and gathers that outlive their transfer: they change no page and no staging of another."""

from __future__ import annotations

import asyncio
import threading
import zlib

import grpc
import numpy as np
import pytest
from mesh import test_kv_handover
from mesh.test_kv_transfer import TIMEOUT_S, Pair, pages_of, pair, prefill
from support.kv_writers import needs_nixl
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.worker.kv_transfer.lifecycle import ReceiveState
from radixmesh.daemons.worker.kv_transfer.staging import STAMP_BYTES
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.worker.v1 import worker_pb2

NUM_TOKENS = 48
GRPC, SHARED, DEVICE = TransferTransport.GRPC, TransferTransport.SHARED_MEMORY, TransferTransport.DEVICE


def checksums(both: Pair) -> list[int]:
    """One a page of the receiver."""
    runner, num_pages = both.core(1).executor.runner, both.core(1).executor.limits.num_pages
    size = runner.page_size
    tokens = (as_ints(range(page * size, (page + 1) * size)) for page in range(num_pages))
    return [zlib.crc32(np.ascontiguousarray(runner.read_kv(at)).tobytes()) for at in tokens]


async def until(is_true) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


class Late:
    """Makes the next transfer of a worker wait before its first byte, or before its last word."""

    def __init__(self, both: Pair, where: str) -> None:
        self.is_there, self.goes_on = asyncio.Event(), asyncio.Event()
        transport = both.core(0).transfers.transport
        write = transport.written

        async def written(call, request) -> None:
            if not self.is_there.is_set() and (where == "first byte") != bool(request.last_word):
                self.is_there.set()
                await self.goes_on.wait()
            await write(call, request)

        transport.written = written


@pytest.mark.parametrize("where", ["first byte", "last word"])
@pytest.mark.parametrize("end", ["lease", "abort", "epoch"])
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("simulated", GRPC),
        ("simulated", SHARED),
        ("cpu", SHARED),
        ("simulated", DEVICE),
        pytest.param("simulated", TransferTransport.NIXL, marks=[needs_nixl, pytest.mark.full]),
    ],
)
async def test_a_late_writer_changes_no_page_that_is_not_its_own(
    backend: str, kind: TransferTransport, end: str, where: str
) -> None:
    async with pair(backend, transfer_transport=kind, has_devices=kind is DEVICE) as both:
        await prefill(both, 0, 1)
        late, source = Late(both, where), pages_of(1, 0, NUM_TOKENS)
        region = await both.prepare(lease_ms=2_000 if end == "lease" else 30_000)
        reception = both.core(1).transfers.receiver.get("t").reception
        # On a device a call waits for its writer, which has a place there.
        first = asyncio.ensure_future(_ended(both.start(region, source, [1] * NUM_TOKENS)))
        async with asyncio.timeout(TIMEOUT_S):
            await late.is_there.wait()
        if end == "abort":
            await both.stub.AbortTransfer(worker_pb2.AbortTransferRequest(transfer_id="t"))
        elif end == "epoch":
            async with WorkerClient(both.workers[1].address, "e") as next_one:
                await next_one.hold(2)
        await until(lambda: reception.state is ReceiveState.FAILED)
        # The writer still waits. A receiver that itself copies what arrives ends the quarantine by itself; memory that
        # the writer has mapped, or was let into, is the writer's until that is over.
        staging = both.core(1).transfers.staging
        is_free = kind is GRPC or (kind is TransferTransport.NIXL and where == "first byte")
        if is_free:
            await until(lambda: not staging.num_bytes)
        else:
            await asyncio.sleep(0.3)
            assert staging.num_bytes == both.core(1).transfers.receiver.num_quarantined_bytes == region.num_bytes
        target: range | list[int] = []
        if end != "epoch":
            # Another transfer, of the same id where that is free, has staging now and has filled pages from it.
            name = "t" if is_free else "u"
            again = await both.prepare(name)
            both.core(0).transfers.senders.clear()
            await both.start(again, source, [1] * NUM_TOKENS)
            assert (await both.last_state(name)).state == worker_pb2.TRANSFER_STATE_WRITTEN
            target = range(100, 100 + NUM_TOKENS)
        before = checksums(both)
        late.goes_on.set()
        await first
        await until(lambda: not both.core(0).transfers.staging.num_bytes)
        await until(lambda: both.core(0).transfers.num_failed == 1)
        assert checksums(both) == before, "pages were written by nobody's leave"
        if end == "epoch":
            return
        assert (await both.commit(target, transfer_id=name)).state == worker_pb2.TRANSFER_STATE_VALIDATED
        after = checksums(both)
        assert {page for page, (a, b) in enumerate(zip(after, before, strict=True)) if a != b} <= set(target)
        sent = both.core(0).executor.runner.read_kv(as_ints(source))
        assert (both.core(1).executor.runner.read_kv(as_ints(target)) == sent).all()
        await until(lambda: not staging.num_bytes)


@pytest.mark.parametrize("what", ["gather", "scatter"])
async def test_staging_stays_taken_until_a_cancelled_copy_is_over(what: str) -> None:
    """Its scheduler is gone: the call is cancelled, the step thread still reads or writes the memory."""
    async with pair() as both:
        await prefill(both, 0, 1)
        number = 0 if what == "gather" else 1
        runner, staging = both.core(number).executor.runner, both.core(number).transfers.staging
        began, goes_on = threading.Event(), threading.Event()
        name = "read_kv" if what == "gather" else "write_kv"
        copy = getattr(runner, name)

        def slow(*args):
            began.set()
            assert goes_on.wait(TIMEOUT_S)
            return copy(*args)

        region = await both.prepare()
        if what == "scatter":
            await both.start(region, range(NUM_TOKENS), [1] * NUM_TOKENS)
            assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        setattr(runner, name, slow)
        is_gather = what == "gather"
        call = both.start(region, range(NUM_TOKENS), [1] * NUM_TOKENS) if is_gather else both.commit(range(100, 148))
        running = asyncio.ensure_future(_ended(call))
        await until(began.is_set)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # The daemon hears of it by a frame: whatever it answers afterwards has come behind that.
        for _ in range(3):
            await both.clients[number].stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest())
        taken = staging.num_bytes
        goes_on.set()
        assert taken == region.num_bytes - (2 * STAMP_BYTES if is_gather else 0)
        await until(lambda: not staging.num_bytes)
        assert not both.core(1).transfers.receiver.regions or is_gather


async def _ended(call) -> None:
    try:
        await call
    except grpc.aio.AioRpcError:
        return


async def test_pages_of_a_commit_that_was_refused_are_free_again() -> None:
    """As of a scheduler that was stopped between the last word and the commit: the lease has run out meanwhile."""
    async with test_kv_handover.pair() as both:
        transfers, expected = both.workers[1].daemon.core.transfers, await test_kv_handover.alone(both)
        commit = transfers.commit

        async def late(request):
            transfers.receiver.abort(request.transfer_id)
            transfers.commit = commit
            return await commit(request)

        transfers.commit = late
        result = await both.reserve()
        await both.prefill(result.target)
        rest = await both.decode(expected[:1])
        assert expected[:1] + rest.tokens == expected
        await test_kv_handover.until(both.is_clean)
        # The generations are the worker's: the same pages are granted and filled again.
        result = await both.reserve("u", prompt := [7, *test_kv_handover.PROMPT])
        first = await both.prefill(result.target, prompt, request_id="u")
        rest = await both.decode(first.tokens, "u", prompt, request_id="v")
        assert first.tokens + rest.tokens == await test_kv_handover.alone(both, prompt)
        assert both.planner(1).arrivals.num_arrived == 1 and both.schedulers[1].daemon.loop.epoch == 1
        await test_kv_handover.until(both.is_clean)
