"""KV from GPU to GPU: memory of a device is its writer's until its copies are over, whatever has become of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest
from mesh.test_kv_transfer import NUM_OUT, PROMPT, Pair, error_of, pages_of, pair, prefill
from mesh.test_kv_transports import PROCESS_S, given_to, until
from mesh.test_late_writers import NUM_TOKENS, _ended, checksums
from support.host_kv_device import HeldEvent, HostKvDevice
from support.kv_writers import needs_nixl, write_to_device
from support.plans import admit, chunk, grant
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.worker.kv_transfer import transfers
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, Pieces
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, ReceiveState
from radixmesh.daemons.worker.kv_transfer.page_io import Gathering
from radixmesh.daemons.worker.kv_transfer.transports import device_transport
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.daemons.worker.kv_transfer.transports.shared_memory import opened
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent
from radixmesh.worker.v1 import worker_pb2

DEVICE = TransferTransport.DEVICE
NIXL = pytest.param("simulated", TransferTransport.NIXL, marks=needs_nixl)
ONES = [1] * NUM_TOKENS


def device_of(both: Pair, number: int) -> HostKvDevice:
    return both.core(number).executor.runner.kv_device


def slab_of(both: Pair, number: int = 1) -> Pieces:
    transport = both.core(number).transfers.transport
    return transport.device_slab.pieces


async def sent(both: Pair, name: str = "t") -> worker_pb2.TransferRegion:
    region = await both.prepare(name)
    await both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)
    assert (await both.last_state(name)).state == worker_pb2.TRANSFER_STATE_WRITTEN
    return region


@pytest.mark.parametrize(("backend", "kind"), [("simulated", DEVICE), ("cpu", DEVICE), NIXL])
async def test_what_arrives_is_what_was_computed(backend: str, kind: TransferTransport) -> None:
    async with pair(backend, transfer_transport=kind, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        assert slab_of(both).num_free < slab_of(both).num_bytes
        before, target = checksums(both), range(100, 100 + NUM_TOKENS)
        assert (await both.commit(target)).state == worker_pb2.TRANSFER_STATE_VALIDATED
        theirs = both.core(0).executor.runner.read_kv(as_ints(range(NUM_TOKENS)))
        assert (both.core(1).executor.runner.read_kv(as_ints(target)) == theirs).all()
        changed = {page for page, (a, b) in enumerate(zip(checksums(both), before, strict=True)) if a != b}
        assert changed <= set(target)
        assert both.core(1).executor.records.filled[list(target)].all()
        assert (device_of(both, 0).num_gathered, device_of(both, 1).num_scattered) == (1, 1), "not by the host"
        transfers = both.core(1).transfers
        await until(lambda: not transfers.staging.num_bytes)
        assert slab_of(both).num_free == slab_of(both).num_bytes
        assert both.core(0).transfers.num_sent == transfers.num_received == 1
        assert slab_of(both, 0).num_free == slab_of(both, 0).num_bytes


async def test_memory_that_came_is_not_anothers_while_somebody_else_may_write_there() -> None:
    """One that was refused, and has not heard of it yet: the writer's last word says nothing of others."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        region = await sent(both)
        await until(lambda: not both.core(0).transfers.senders)
        late = opened(region)
        assert late is not None
        assert (await both.commit(range(100, 100 + NUM_TOKENS))).state == worker_pb2.TRANSFER_STATE_VALIDATED
        transfers = both.core(1).transfers
        await asyncio.sleep(0.3)
        assert slab_of(both).num_free < slab_of(both).num_bytes and transfers.staging.num_bytes == region.num_bytes
        os.close(late)
        await until(lambda: slab_of(both).num_free == slab_of(both).num_bytes)
        assert transfers.num_received == 1 and not transfers.num_failed


@pytest.mark.parametrize("kind", [DEVICE, TransferTransport.SHARED_MEMORY])
async def test_a_region_has_one_writer_ever(kind: TransferTransport) -> None:
    """A second one would say of the first that it is over, or of KV that has come that it lies elsewhere."""
    async with pair(transfer_transport=kind, has_devices=kind is DEVICE) as both:
        await prefill(both, 0, 1)
        region, transport = await sent(both), both.core(0).transfers.transport
        await until(lambda: not both.core(0).transfers.senders)
        with pytest.raises(MeshError, match="has had a writer"):
            async with transport.open(both.workers[1].address, region, "w"):
                pytest.fail("it would write")
        answer = await both.commit(range(100, 100 + NUM_TOKENS))
        assert answer.state == worker_pb2.TRANSFER_STATE_VALIDATED


async def test_a_writer_is_not_done_before_all_is_written() -> None:
    """No checksum says so of bytes on a device, and stamps are written by those who write the rest."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        region, transport = await both.prepare(), both.core(0).transfers.transport
        with pytest.raises(MeshError, match="failed"):
            async with transport.open(both.workers[1].address, region, "w") as writer:
                await writer.placed(0, region.num_bytes - 1)
                await writer.done(0)
        assert (await both.last_state()).failure == Failure.BAD_WRITE


async def test_what_is_mapped_for_a_call_that_was_cancelled_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    device, goes_on = HostKvDevice(None), threading.Event()
    mappings = device_transport.Mappings(device)
    region = worker_pb2.TransferRegion(num_bytes=100)
    region.device.handle = device.handle(device.allocate(1000))
    region.device.owner.CopyFrom(worker_pb2.HostProcess(**HostProcess.own()._asdict()))
    opened_one = device.open
    monkeypatch.setattr(device, "open", lambda handle: goes_on.wait() and opened_one(handle))
    taking = asyncio.ensure_future(mappings.take(region))
    await asyncio.sleep(0.05)
    taking.cancel()
    await asyncio.sleep(0.05)
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert [mapping.num_users for mapping in mappings.mapped.values()] == [0]
    mappings.close()


@pytest.mark.parametrize("end", ["abort", "both aborts", "epoch"])
async def test_memory_stays_the_writers_while_its_kernel_runs(end: str) -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        device_of(both, 0).goes_on.clear()
        region = await both.prepare()
        running = asyncio.ensure_future(_ended(both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)))
        await until(lambda: device_of(both, 0).num_gathered == 1)
        transfers, sender = both.core(1).transfers, both.core(0).transfers
        if end == "both aborts":
            # More than once: none of them may leave the region early.
            for _ in range(3):
                sender.abort("t")
                await asyncio.sleep(0.05)
        if end == "epoch":
            transfers.begin_epoch(2)
        else:
            transfers.abort("t")
        await asyncio.sleep(1.5)
        assert transfers.receiver.num_quarantined_bytes == transfers.staging.num_bytes == region.num_bytes
        device_of(both, 0).goes_on.set()
        await running
        await until(lambda: not transfers.staging.num_bytes)
        assert slab_of(both).num_free == slab_of(both).num_bytes and not sender.senders
        assert sender.num_failed == transfers.num_failed == 1


async def test_a_process_that_ends_does_not_say_that_its_kernel_is_over() -> None:
    """All of its tasks are cancelled, also the one that waits for the kernel."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        device_of(both, 0).goes_on.clear()
        region = await both.prepare()
        running = asyncio.ensure_future(_ended(both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)))
        await until(lambda: device_of(both, 0).num_gathered == 1)
        for task in asyncio.all_tasks():
            if task.get_coro().__name__ == "_copied":  # type: ignore[union-attr]
                task.cancel()
        running.cancel()
        transfers = both.core(1).transfers
        await until(lambda: not both.core(0).transfers.senders)
        transfers.abort("t")
        await asyncio.sleep(0.3)
        assert transfers.staging.num_bytes == transfers.receiver.num_quarantined_bytes == region.num_bytes
        device_of(both, 0).goes_on.set()


async def test_a_call_that_is_cancelled_leaves_no_kernel_behind() -> None:
    """As of a scheduler that dies while its chunk is gathered."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        device_of(both, 0).goes_on.clear()
        region = await both.prepare()
        call = both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)
        running = asyncio.ensure_future(_ended(call))
        await until(lambda: device_of(both, 0).num_gathered == 1)
        call.cancel()
        await asyncio.gather(running, return_exceptions=True)
        transfers = both.core(1).transfers
        await asyncio.sleep(0.3)
        transfers.abort("t")
        assert transfers.staging.num_bytes == region.num_bytes
        device_of(both, 0).goes_on.set()
        await until(lambda: not transfers.staging.num_bytes)


@needs_nixl
async def test_buffers_of_a_device_go_over_grpc_where_nixl_leads_nowhere() -> None:
    async with pair(transfer_transport=TransferTransport.NIXL, has_devices=True) as both:
        await prefill(both, 0, 1)
        region = await both.prepare()
        region.nixl.agent_metadata = b"of no agent"
        await both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        target = range(100, 100 + NUM_TOKENS)
        assert (await both.commit(target)).state == worker_pb2.TRANSFER_STATE_VALIDATED
        theirs = both.core(0).executor.runner.read_kv(as_ints(range(NUM_TOKENS)))
        assert (both.core(1).executor.runner.read_kv(as_ints(target)) == theirs).all()
        assert device_of(both, 0).num_gathered == 1 and not device_of(both, 1).num_scattered
        await until(lambda: not both.core(0).transfers.staging.num_bytes)
        assert all(slab_of(both, number).num_free == slab_of(both, number).num_bytes for number in (0, 1))


@needs_nixl
async def test_a_buffer_is_nobody_elses_while_its_kernel_runs() -> None:
    async with pair(transfer_transport=TransferTransport.NIXL, has_devices=True) as both:
        await prefill(both, 0, 1)
        device_of(both, 0).goes_on.clear()
        region = await both.prepare()
        call = both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)
        running = asyncio.ensure_future(_ended(call))
        await until(lambda: device_of(both, 0).num_gathered == 1)
        call.cancel()
        await asyncio.gather(running, return_exceptions=True)
        both.core(0).transfers.abort("t")
        await asyncio.sleep(0.5)
        assert slab_of(both, 0).num_free < slab_of(both, 0).num_bytes
        device_of(both, 0).goes_on.set()
        await until(lambda: slab_of(both, 0).num_free == slab_of(both, 0).num_bytes)
        assert not both.core(0).transfers.staging.num_bytes


@pytest.mark.parametrize("where", ["head", "tail"])
@pytest.mark.parametrize(("backend", "kind"), [("simulated", DEVICE), NIXL])
async def test_stamps_of_another_region_are_seen_behind_the_scatter(
    backend: str, kind: TransferTransport, where: str
) -> None:
    async with pair(backend, transfer_transport=kind, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        piece = both.core(1).transfers.receiver.get("t").written
        assert isinstance(piece, DevicePiece)
        at = piece.address if where == "head" else piece.address + piece.num_bytes - 1
        device_of(both, 1).write(at, bytes([device_of(both, 1).read(at, 1)[0] ^ 1]))
        answer = await both.commit(range(100, 100 + NUM_TOKENS))
        assert answer.state == worker_pb2.TRANSFER_STATE_FAILED and answer.failure == Failure.STAMP
        assert not both.core(1).executor.records.filled[100 : 100 + NUM_TOKENS].any()
        await until(lambda: not both.core(1).transfers.staging.num_bytes)


def _behind_the_kv(first_page: int = 100) -> dict[str, object]:
    """A plan for a request whose prompt has come, but for the last token."""
    pages, num = list(range(first_page, first_page + NUM_TOKENS)), len(PROMPT) - NUM_TOKENS
    return {
        "admits": (
            admit(
                0,
                PROMPT,
                cached_len=NUM_TOKENS,
                cached_pages=as_ints(pages),
                cached_page_generations=as_ints(ONES),
                max_total_len=len(PROMPT) + NUM_OUT,
            ),
        ),
        "grants": (grant(0, [200]),),
        "chunks": (chunk(0, num),),
    }


async def _plan(both: Pair, **plan: object) -> None:
    both.steps[1] += 1
    await both.clients[1].plan(StepPlan(epoch=1, step_id=both.steps[1], **plan))  # type: ignore[arg-type]


async def test_a_plan_may_name_pages_while_they_are_scattered_to() -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        token = await prefill(both, 0, 1)
        await sent(both)
        device_of(both, 1).lands.clear()
        # Whoever does not know the answer waits for the end.
        late = asyncio.ensure_future(_ended(both.commit(range(100, 100 + NUM_TOKENS))))
        await until(lambda: device_of(both, 1).num_scattered == 1)
        assert not late.done()
        device_of(both, 1).lands.set()
        await late
        await sent(both, "u")
        device_of(both, 1).lands.clear()
        answer = await both.commit(range(150, 150 + NUM_TOKENS), transfer_id="u", takes_scattering=True)
        assert answer.state == worker_pb2.TRANSFER_STATE_SCATTERING
        await _plan(both, **_behind_the_kv(150))
        result = asyncio.ensure_future(both.clients[1].result())
        await until(lambda: not both.core(1).executor.arriving.is_empty)
        assert not result.done() and both.core(1).transfers.staging.num_bytes
        device_of(both, 1).lands.set()
        assert (await result).ids.tolist() == [token]
        await until(lambda: not both.core(1).transfers.staging.num_bytes)
        assert both.core(1).transfers.num_received == 2 and both.core(1).executor.arriving.is_empty


async def test_a_commit_is_answered_ahead_of_the_scatter_s_launch() -> None:
    """A plan that comes behind the answer runs behind the scatter."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        token = await prefill(both, 0, 1)
        await sent(both)
        device, may_launch = device_of(both, 1), threading.Event()
        scatter = device.scatter
        device.scatter = lambda *inputs: (may_launch.wait(), scatter(*inputs))[1]  # type: ignore[method-assign]
        answer = await both.commit(range(100, 100 + NUM_TOKENS), takes_scattering=True)
        assert answer.state == worker_pb2.TRANSFER_STATE_SCATTERING and not device.num_scattered
        await _plan(both, **_behind_the_kv())
        result = asyncio.ensure_future(both.clients[1].result())
        await asyncio.sleep(0.05)
        assert not result.done()
        may_launch.set()
        assert (await result).ids.tolist() == [token]
        await until(lambda: not both.core(1).transfers.staging.num_bytes)


async def test_plans_are_refused_where_a_scatter_fails_behind_its_answer() -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        device = device_of(both, 1)

        def broken(*inputs: object) -> Copied:
            raise RuntimeError("no launch")

        device.scatter = broken  # type: ignore[method-assign]
        answer = await both.commit(range(100, 100 + NUM_TOKENS), takes_scattering=True)
        assert answer.state == worker_pb2.TRANSFER_STATE_SCATTERING
        await _plan(both, **_behind_the_kv())
        refusal = await both.clients[1].refusal()
        assert refusal.error.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED
        await until(lambda: not both.core(1).transfers.staging.num_bytes)
        assert not both.core(1).executor.records.filled[100 : 100 + NUM_TOKENS].any()


@pytest.mark.parametrize("changes", [{"generation": 2}, {"ids": [1 << 30] * NUM_TOKENS}])
async def test_what_is_wrong_with_a_commit_is_its_answer(changes: dict[str, Any]) -> None:
    """Nobody is told that plans may name the pages."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        answer = await both.commit(range(100, 100 + NUM_TOKENS), takes_scattering=True, **changes)
        assert answer.state == worker_pb2.TRANSFER_STATE_FAILED and answer.failure == Failure.PAGES
        executor = both.core(1).executor
        assert executor.arriving.is_empty and executor.arriving.error is None
        await until(lambda: not both.core(1).transfers.staging.num_bytes)


@pytest.mark.parametrize("is_named", [True, False])
async def test_what_turns_out_unsound_behind_its_answer_is_in_no_result(is_named: bool) -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        device, executor, target = device_of(both, 1), both.core(1).executor, range(100, 100 + NUM_TOKENS)
        piece = both.core(1).transfers.receiver.get("t").written
        device.lands.clear()
        answer = await both.commit(target, takes_scattering=True)
        assert answer.state == worker_pb2.TRANSFER_STATE_SCATTERING
        await until(lambda: bool(executor.records.filled[list(target)].all()))
        if is_named:
            await _plan(both, **_behind_the_kv())
        device.write(piece.address, bytes([device.read(piece.address, 1)[0] ^ 1]))
        device.lands.set()
        if not is_named:
            await until(lambda: executor.arriving.is_empty)
            await _plan(both, **_behind_the_kv())
        refusal = await both.clients[1].refusal()
        assert refusal.error.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED and refusal.step_id == both.steps[1]
        assert not executor.records.filled[list(target)].any(), "nobody adopts it"
        await until(lambda: not both.core(1).transfers.staging.num_bytes)
        async with WorkerClient(both.workers[1].address, "again") as client:
            await client.hold(2)
            pages = list(range(len(PROMPT) + NUM_OUT))
            plan = {"admits": (admit(0, PROMPT),), "grants": (grant(0, pages),), "chunks": (chunk(0, len(PROMPT)),)}
            await client.plan(StepPlan(epoch=2, step_id=1, **plan))  # type: ignore[arg-type]
            assert len((await client.result()).ids) == 1


async def test_pages_that_are_granted_anew_while_they_are_scattered_to_wait_for_that() -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        token = await prefill(both, 0, 1)
        await sent(both)
        device, target = device_of(both, 1), range(100, 100 + NUM_TOKENS)
        device.lands.clear()
        await both.commit(target, takes_scattering=True)
        pages = list(range(100, 100 + len(PROMPT)))
        await _plan(both, admits=(admit(0, PROMPT),), grants=(grant(0, pages),), chunks=(chunk(0, len(PROMPT)),))
        result = asyncio.ensure_future(both.clients[1].result())
        await asyncio.sleep(0.05)
        assert not result.done()
        device.lands.set()
        assert (await result).ids.tolist() == [token]
        assert (both.core(1).executor.records.generations[list(target)] == 2).all()


async def test_pages_that_do_not_hold_the_tokens_are_told_of_and_not_counted_on() -> None:
    """Of four tokens each: those of some tokens are missing, on the side that sends, and on the side that receives."""
    async with pair(sizes=(4, 4), transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 4)
        pages = pages_of(4, 0, NUM_TOKENS)
        region = await both.prepare("short")
        refused = await error_of(both.start(region, pages[:-2], [1] * (len(pages) - 2)))
        assert refused.reason_name == "PAGE_CONFLICT"
        region = await both.prepare("t")
        await both.start(region, pages, [1] * len(pages))
        assert (await both.last_state("t")).state == worker_pb2.TRANSFER_STATE_WRITTEN
        answer = await both.commit(range(30, 30 + len(pages) - 2), ids=list(range(3, 3 + NUM_TOKENS)))
        assert answer.state == worker_pb2.TRANSFER_STATE_FAILED and answer.failure == Failure.PAGES
        assert not both.core(1).executor.records.filled[30:].any()


async def test_pages_that_another_epoch_has_granted_get_no_records() -> None:
    """Its scatter was launched before, and is seen to be over behind that."""
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        await sent(both)
        device, records = device_of(both, 1), both.core(1).executor.records
        scatter, target = device.scatter, list(range(100, 100 + NUM_TOKENS))

        def granted_meanwhile(*args):
            records.generations[target] += 1
            return scatter(*args)

        device.scatter = granted_meanwhile
        answer = await both.commit(target)
        assert answer.failure == Failure.PAGES and not records.filled[target].any()


async def test_regions_that_have_no_place_on_the_device_lie_in_shared_memory() -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        slab_of(both).take(slab_of(both).num_bytes)
        region = await sent(both)
        assert not region.HasField("device") and region.HasField("shared_memory")
        assert (await both.commit(range(100, 100 + NUM_TOKENS))).state == worker_pb2.TRANSFER_STATE_VALIDATED
        assert not device_of(both, 0).num_gathered and not device_of(both, 1).num_scattered


@pytest.mark.parametrize("wrong", ["offset", "handle", "length"])
async def test_what_names_no_memory_is_not_written_to(wrong: str) -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        region = await both.prepare()
        if wrong == "offset":
            region.device.offset = (1 << 64) - region.num_bytes - 1
        else:
            region.device.handle = b"/nowhere".ljust(64 if wrong == "handle" else 63, b"\0")
        longer = worker_pb2.TransferRegion()
        longer.CopyFrom(region)
        longer.device.handle = b"0" * 65
        with pytest.raises(grpc.aio.AioRpcError, match="handle has 65 bytes"):
            await both.start(longer, pages_of(1, 0, NUM_TOKENS), ONES)
        await both.start(region, pages_of(1, 0, NUM_TOKENS), ONES)
        # It goes another way.
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        assert not device_of(both, 0).num_gathered
        assert (await both.commit(range(100, 100 + NUM_TOKENS))).state == worker_pb2.TRANSFER_STATE_VALIDATED


@pytest.mark.parametrize("how", ["dies", "ends"])
async def test_memory_of_a_device_is_its_writers_until_that_process_is_gone(how: str) -> None:
    async with pair(transfer_transport=DEVICE, has_devices=True) as both:
        transfers = both.core(1).transfers
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=write_to_device, args=(both.workers[1].address, theirs))
        process.start()
        try:
            region = await given_to(ours, both)
            held = transfers.receiver.get("t")
            assert await asyncio.to_thread(ours.poll, PROCESS_S) and ours.recv() == "placed"
            assert isinstance(held.written, DevicePiece)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            transfers.abort("t")
            await asyncio.sleep(1.5)
            assert transfers.receiver.num_quarantined_bytes == transfers.staging.num_bytes == region.num_bytes
            if how == "dies":
                process.kill()
                await asyncio.to_thread(process.join)
                # Its lock is free at once. What it had launched may come for a while yet.
                await asyncio.sleep(0.5)
                assert transfers.staging.num_bytes == region.num_bytes
            else:
                ours.send("leave")
                os.kill(process.pid, signal.SIGCONT)
            await until(lambda: not transfers.staging.num_bytes)
            assert slab_of(both).num_free == slab_of(both).num_bytes and not len(transfers.receiver)
            assert held.reception.state is ReceiveState.FAILED
        finally:
            process.kill()
            process.join()


async def test_memory_of_a_process_that_has_ended_is_mapped_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device would keep it, and the process that takes its place would find it taken."""
    monkeypatch.setattr(device_transport, "_WATCH_S", 0.02)
    device, closed = HostKvDevice(None), []
    monkeypatch.setattr(device, "close", closed.append)
    own = HostProcess.own()
    region = worker_pb2.TransferRegion(num_bytes=100)
    mappings = device_transport.Mappings(device)
    for name, process in (("here", own), ("gone", own._replace(started=own.started + 1))):
        region.device.handle = device.handle(device.allocate(1000))
        region.device.owner.CopyFrom(worker_pb2.HostProcess(**process._asdict()))
        mapping = await mappings.take(region)
        assert mapping is not None and await mappings.take(region) is mapping and mapping.num_users == 2, name
    await asyncio.sleep(0.2)
    assert not closed, "there are writers"
    mapping.num_users = 0
    await until(lambda: closed == [mapping.memory.address])
    assert len(mappings.mapped) == 1
    mappings.close()


def test_pieces_are_nobody_elses() -> None:
    rng, pieces, taken = np.random.default_rng(22), Pieces(1 << 16, 256), {}
    owner = np.zeros(1 << 16, np.int64)
    for step in range(1, 3000):
        if taken and rng.random() < 0.5:
            number = list(taken)[rng.integers(len(taken))]
            start, size = taken.pop(number)
            assert (owner[start : start + size] == number).all()
            owner[start : start + size] = 0
            pieces.give_back(start, size)
            continue
        try:
            start = pieces.take(size := int(rng.integers(1, 5000)))
        except MemoryError:
            continue
        assert start % 256 == 0 and not owner[start : start + size].any()
        owner[start : start + size], taken[step] = step, (start, size)
    for start, size in taken.values():
        pieces.give_back(start, size)
    assert pieces.num_free == pieces.num_bytes and pieces.take(pieces.num_bytes) == 0
    with pytest.raises(MemoryError):
        pieces.take(1)


async def test_a_fault_holds_a_scatter_on_a_device() -> None:
    # The stand-in's copy is the runner's own, which comes to that phase first.
    faults = ("scattering@2:400",)
    async with pair(transfer_transport=DEVICE, has_devices=True, faults=faults) as both:
        await prefill(both, 0, 1)
        await sent(both)
        began = time.monotonic()
        assert (await both.commit(range(100, 100 + NUM_TOKENS))).state == worker_pb2.TRANSFER_STATE_VALIDATED
        assert time.monotonic() - began >= 0.4 and device_of(both, 1).num_scattered == 1


async def test_a_chunk_behind_a_later_step_does_not_hold_up_one_behind_an_earlier_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be asked for first: with the plan of its step, while the other waits for what precedes it."""
    async with pair("simulated", transfer_transport=DEVICE, has_devices=True) as both:
        await prefill(both, 0, 1)
        first, second = both.steps[0] + 1, both.steps[0] + 2
        for _ in range(2):
            await both.run(0)
        running = threading.Event()
        begun: list[int] = []
        events: dict[int, DeviceEvent] = {first: HeldEvent(running)}
        begin_gather = transfers.begin_gather

        def noted(*arguments: Any, after_step: int, **more: Any) -> Gathering:
            begun.append(after_step)
            return begin_gather(*arguments, after_step=after_step, **more)

        monkeypatch.setattr(both.core(0).executor, "event_of", lambda step: events.get(step, DONE))
        monkeypatch.setattr(transfers, "begin_gather", noted)
        regions = [await both.prepare(name) for name in ("later", "earlier")]
        sources = pages_of(1, 0, NUM_TOKENS), ONES
        later = asyncio.ensure_future(both.start(regions[0], *sources, after_step=second))
        await until(lambda: "later" in both.core(0).transfers.senders)
        await asyncio.sleep(0.05)
        assert begun == []
        earlier = asyncio.ensure_future(both.start(regions[1], *sources, after_step=first))
        await until(lambda: begun == [first])
        running.set()
        await asyncio.gather(earlier, later)
        assert begun == [first, second]
        for name in ("later", "earlier"):
            assert (await both.last_state(name)).state == worker_pb2.TRANSFER_STATE_WRITTEN
