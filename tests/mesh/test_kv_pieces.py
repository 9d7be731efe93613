"""KV that is scattered as it comes: nobody reads it before its last word, nor gets its pages while it is copied."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from mesh.test_kv_device import DEVICE, _plan, device_of
from mesh.test_kv_transfer import TIMEOUT_S, Pair, answer_of, error_of, pair, prefill
from mesh.test_kv_transports import until
from mesh.test_late_writers import _ended
from support.kv_writers import needs_nixl
from support.plans import admit, chunk, grant
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.worker.kv_transfer.host_process import host_name
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, ReceiveState
from radixmesh.daemons.worker.kv_transfer.receiver import Region
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS, STAMP_BYTES
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.daemons.worker.kv_transfer.transports.device_transport import DeviceWriter
from radixmesh.worker.v1 import worker_pb2

NUM_TOKENS, TOKEN_BYTES = 2 * CHUNK_TOKENS + 88, 8
TARGET = range(100, 100 + NUM_TOKENS)
IDS = [3 + 7 * token % 90 for token in range(NUM_TOKENS)]
KV = np.random.default_rng(22).integers(0, 256, NUM_TOKENS * TOKEN_BYTES, np.uint8)
GATHER_MS = 5


class Sending(NamedTuple):
    """A writer that is told what to do. held: the region, at its receiver."""

    both: Pair
    writer: DeviceWriter
    held: Region

    def write(self, offset: int, data: bytes) -> None:
        """As a kernel does, without a word."""
        device_of(self.both, 0).write(self.writer.place(offset, len(data)).address, data)

    async def place(self, first: int, end: int) -> None:
        """Tokens to the region, and the word that they are there."""
        offset, data = STAMP_BYTES + first * TOKEN_BYTES, KV[first * TOKEN_BYTES : end * TOKEN_BYTES].tobytes()
        self.write(offset, data)
        await self.writer.placed(offset, len(data))

    async def finish(self, first: int) -> None:
        """The rest, with the last word."""
        offset, data = STAMP_BYTES + first * TOKEN_BYTES, KV[first * TOKEN_BYTES :].tobytes()
        self.write(offset, data + self.held.key.stamp())
        await self.writer.placed(offset, len(data) + STAMP_BYTES, is_last=True)
        began_ns = time.monotonic_ns() - GATHER_MS * 1_000_000
        start = worker_pb2.GatherStart(host=host_name(), monotonic_ns=began_ns, num_bytes=len(data))
        await self.writer.done(0, start)

    def commit(self, **more: Any) -> asyncio.Task[Any]:
        """Its answer, or what it was refused with."""
        more = {"takes_scattering": True, "takes_pieces": True, "ids": IDS, **more}
        return asyncio.ensure_future(_answer_or_error(self.both.commit(TARGET, **more)))

    @property
    def num_scattered(self) -> int:
        return device_of(self.both, 1).num_scattered

    @property
    def read(self) -> np.ndarray:
        """KV in the target's pages."""
        return self.both.core(1).executor.runner.read_kv(as_ints(TARGET))


async def _answer_or_error(call) -> worker_pb2.CommitTransferResponse | grpc.aio.AioRpcError:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error


@asynccontextmanager
async def sending(*, piece_bytes: int = 1, lease_ms: int = 30_000) -> AsyncIterator[Sending]:
    """A writer whose stamp is there, and two chunks of three, and which says that the last one is under way."""
    fields = {"transfer_transport": DEVICE, "transfer_piece_bytes": piece_bytes, "max_total_len": 1024}
    async with pair(has_devices=True, num_tokens=1024, **fields) as both:
        region = await both.prepare(num_tokens=NUM_TOKENS, lease_ms=lease_ms)
        transport, held = both.core(0).transfers.transport, both.core(1).transfers.receiver.get("t")
        try:
            async with transport.open(both.workers[1].address, region, "w") as writer:
                assert isinstance(writer, DeviceWriter)
                await writer.write(0, np.frombuffer(held.key.stamp(), np.uint8))
                sent = Sending(both, writer, held)
                await sent.place(0, CHUNK_TOKENS)
                await sent.place(CHUNK_TOKENS, 2 * CHUNK_TOKENS)
                await writer.ending()
                await until(lambda: held.is_ending)
                yield sent
        except MeshError as error:
            assert "over" in str(error) or "failed" in str(error)


async def test_what_has_come_is_scattered_ahead_of_the_last_word() -> None:
    async with sending() as sent:
        records, num_sent = sent.both.core(1).executor.records, 2 * CHUNK_TOKENS
        before = sent.read.copy()
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        assert (sent.read[: num_sent * TOKEN_BYTES] == KV[: num_sent * TOKEN_BYTES]).all()
        assert (sent.read[num_sent * TOKEN_BYTES :] == before[num_sent * TOKEN_BYTES :]).all()
        await asyncio.sleep(0.05)
        assert not committing.done() and not records.filled[list(TARGET)].any(), "nobody may read it yet"
        assert (records.generations[list(TARGET)] == 1).all()
        await sent.finish(num_sent)
        assert (await committing).state == worker_pb2.TRANSFER_STATE_SCATTERING
        await until(lambda: sent.held.reception.is_over)
        assert sent.num_scattered == 2 and (sent.read == KV).all() and records.filled[list(TARGET)].all()
        assert sent.held.reception.state is ReceiveState.VALIDATED and sent.both.core(1).executor.arriving.is_empty
        counts = sent.both.core(1).transfers.counts()
        assert counts.hand_over_bytes == 88 * TOKEN_BYTES
        assert GATHER_MS * 1000 <= counts.hand_over_us < 60_000_000


@pytest.mark.parametrize("how", ["by a scheduler that does not ask", "by the setting", "too little", "out of order"])
async def test_all_is_scattered_behind_the_last_word(how: str) -> None:
    """Out of order: as of a writer that does not say where its bytes begin."""
    async with sending(piece_bytes={"by the setting": 0, "too little": 1 << 13}.get(how, 1)) as sent:
        if how == "out of order":
            sent.held.num_in_order = STAMP_BYTES
        committing = sent.commit(takes_pieces=how != "by a scheduler that does not ask")
        await asyncio.sleep(0.1)
        assert not sent.num_scattered and not sent.both.core(1).executor.records.generations.any()
        await sent.finish(2 * CHUNK_TOKENS)
        assert (await committing).state == worker_pb2.TRANSFER_STATE_SCATTERING
        await until(lambda: sent.held.reception.is_over)
        assert sent.num_scattered == 1 and (sent.read == KV).all()


async def test_a_second_commit_of_a_transfer_is_refused_and_ends_nothing() -> None:
    async with sending() as sent:
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        again = [sent.commit(), sent.commit(takes_pieces=False, takes_scattering=False)]
        await asyncio.sleep(0.05)
        await sent.finish(2 * CHUNK_TOKENS)
        answers = [await committing, *[await one for one in again]]
        assert [isinstance(answer, grpc.aio.AioRpcError) for answer in answers] == [False, True, True]
        await until(lambda: sent.held.reception.is_over)
        assert sent.held.reception.state is ReceiveState.VALIDATED and (sent.read == KV).all()


async def test_words_that_name_no_place_are_not_counted_as_in_order() -> None:
    async with sending() as sent:
        assert sent.held.num_tokens_in_order() == 2 * CHUNK_TOKENS
        await sent.writer.placed(0, 10)
        await until(lambda: sent.held.num_written == sent.held.num_in_order + 10)
        assert sent.held.num_tokens_in_order() == 2 * CHUNK_TOKENS


@pytest.mark.parametrize(
    ("end", "failure"),
    [("abort", Failure.ABORTED), ("writer", Failure.BAD_WRITE), ("lease", Failure.LEASE_EXPIRED)],
)
async def test_pages_of_a_transfer_that_ends_between_two_pieces_are_free_behind_its_copies(
    end: str, failure: Failure
) -> None:
    async with sending(lease_ms=1500 if end == "lease" else 30_000) as sent:
        device, core = device_of(sent.both, 1), sent.both.core(1)
        device.lands.clear()
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        if end == "abort":
            core.transfers.abort("t")
        elif end == "writer":
            # A place that is none.
            await sent.writer.placed(sent.held.num_bytes + 1, 1)
        await until(lambda: sent.held.reception.failure is failure)
        await asyncio.sleep(0.1)
        assert not committing.done() and core.transfers.staging.num_bytes, "a copy runs, and reads the region"
        device.lands.set()
        answer = await committing
        assert answer.state == worker_pb2.TRANSFER_STATE_FAILED and answer.failure == failure
        records = core.executor.records
        assert core.executor.arriving.is_empty and core.executor.arriving.error is None
        assert not records.filled[list(TARGET)].any() and (records.generations[list(TARGET)] == 1).all()
        # They are another's now, and what comes late is copied nowhere.
        prompt, pages = IDS[:50], list(range(100, 150))
        await _plan(sent.both, admits=(admit(0, prompt),), grants=(grant(0, pages),), chunks=(chunk(0, 50),))
        await sent.both.clients[1].result()
        before = sent.read.copy()
        with pytest.raises(MeshError):
            await sent.finish(2 * CHUNK_TOKENS)
        assert sent.num_scattered == 1 and (sent.read == before).all()


async def test_memory_of_a_region_stays_while_a_piece_of_it_is_read() -> None:
    """Its writer has gone, and so has everybody who would wait for it."""
    async with sending() as sent:
        device, core = device_of(sent.both, 1), sent.both.core(1)
        device.lands.clear()
        call = sent.both.commit(TARGET, ids=IDS, takes_scattering=True, takes_pieces=True)
        running = asyncio.ensure_future(_ended(call))
        await until(lambda: sent.num_scattered == 1)
        call.cancel()
        await asyncio.gather(running, return_exceptions=True)
        core.transfers.abort("t", is_writer_gone=True)
        await asyncio.sleep(0.3)
        assert core.transfers.staging.num_bytes == sent.held.num_bytes
        device.lands.set()
        await until(lambda: not core.transfers.staging.num_bytes)
        assert core.executor.arriving.is_empty


async def test_the_next_epoch_begins_behind_a_piece_and_takes_no_more_of_it() -> None:
    async with sending() as sent:
        device, core = device_of(sent.both, 1), sent.both.core(1)
        device.lands.clear()
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        async with WorkerClient(sent.both.workers[1].address, "again") as client:
            holding = asyncio.ensure_future(client.hold(2))
            await asyncio.sleep(0.2)
            assert not holding.done(), "pages are written to"
            device.lands.set()
            await holding
            await committing
            prompt, pages = IDS[:50], list(range(100, 150))
            plan = {"admits": (admit(0, prompt),), "grants": (grant(0, pages),), "chunks": (chunk(0, 50),)}
            await client.plan(StepPlan(epoch=2, step_id=1, **plan))  # type: ignore[arg-type]
            await client.result()
            before = sent.read.copy()
            with pytest.raises(MeshError):
                await sent.finish(2 * CHUNK_TOKENS)
            assert sent.num_scattered == 1 and (sent.read == before).all()
            assert sent.held.reception.failure is Failure.EPOCH_ENDED and core.executor.arriving.is_empty


async def test_a_piece_that_cannot_be_launched_ends_its_transfer() -> None:
    async with sending() as sent:
        device, core = device_of(sent.both, 1), sent.both.core(1)

        def broken(*inputs: object) -> None:
            raise RuntimeError("no launch")

        device.scatter = broken  # type: ignore[assignment,method-assign]
        assert isinstance(await sent.commit(), grpc.aio.AioRpcError)
        assert sent.held.reception.failure is Failure.ABORTED
        assert not core.executor.records.filled[list(TARGET)].any() and core.executor.arriving.is_empty


async def test_a_stamp_of_another_region_is_seen_behind_all_pieces() -> None:
    async with sending() as sent:
        executor = sent.both.core(1).executor
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        sent.write(0, b"late")
        await sent.finish(2 * CHUNK_TOKENS)
        await committing
        await until(lambda: sent.held.reception.is_over)
        assert sent.held.reception.failure is Failure.STAMP and not executor.records.filled[list(TARGET)].any()
        # It may have been named by then.
        assert executor.arriving.error is not None
        assert executor.arriving.error.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED


async def test_a_chunk_is_gathered_in_pieces_where_it_moves_behind_the_prefill() -> None:
    fields = {"transfer_transport": DEVICE, "transfer_piece_bytes": 1, "max_total_len": 1024, "num_slots": 2}
    async with pair(has_devices=True, num_tokens=1024, **fields) as both:
        pages = list(range(NUM_TOKENS + 1))
        plan = {
            "admits": (admit(0, [*IDS, 5], max_total_len=1000),),
            "grants": (grant(0, pages),),
            "chunks": (chunk(0, NUM_TOKENS + 1),),
        }
        await both.run(0, **plan)
        region = await both.prepare(num_tokens=NUM_TOKENS)
        await both.start(region, range(NUM_TOKENS), [1] * NUM_TOKENS)
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        assert device_of(both, 0).num_gathered == 3
        assert (await both.commit(TARGET, ids=IDS)).state == worker_pb2.TRANSFER_STATE_VALIDATED
        theirs = both.core(0).executor.runner.read_kv(as_ints(range(NUM_TOKENS)))
        assert (both.core(1).executor.runner.read_kv(as_ints(TARGET)) == theirs).all()
        counts = both.core(1).transfers.counts()
        assert counts.hand_over_bytes == NUM_TOKENS * TOKEN_BYTES and counts.hand_over_us


@pytest.mark.parametrize(
    "start",
    [
        {"host": "x" * 4096},
        {"host": "another"},
        {"monotonic_ns": 1},
        {"monotonic_ns": (1 << 64) - 1},
        {"num_bytes": (1 << 64) - 1},
    ],
    ids=lambda start: next(iter(start)),
)
async def test_what_a_writer_says_of_its_time_is_bounded(start: dict[str, Any]) -> None:
    async with pair() as both:
        region = await both.prepare()
        held, call = both.core(1).transfers.receiver.get("t"), both.stub.WriteTransfer()
        said = {"host": host_name(), "monotonic_ns": time.monotonic_ns(), "num_bytes": 8, **start}
        message = worker_pb2.WriteTransferRequest(
            region=region,
            writer="w",
            num_written=region.num_bytes,
            last_word=worker_pb2.TRANSFER_LAST_WORD_DONE,
            gather_start=worker_pb2.GatherStart(**said),
        )
        await call.write(message)
        if len(said["host"]) > 1000:
            assert (await error_of(answer_of(call))).reason_name == "INVALID_ARGUMENT"
        else:
            await _ended(answer_of(call))
        assert held.gather_start is None


async def test_a_process_that_ends_waits_for_no_copy() -> None:
    """Its step thread may have ended, and its device be stuck."""
    async with sending() as sent:
        device = device_of(sent.both, 1)
        committing = sent.commit()
        await until(lambda: sent.num_scattered == 1)
        device.lands.clear()
        await sent.finish(2 * CHUNK_TOKENS)
        await committing
        [finishing] = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_finish"]  # type: ignore[union-attr]
        finishing.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait((finishing,))
        assert finishing.cancelled()
        device.lands.set()


@needs_nixl
async def test_all_may_have_come_ahead_of_the_last_word() -> None:
    """A writer that tells of its stamp by a word of its own: there is nothing left to copy behind that."""
    fields = {"transfer_transport": TransferTransport.NIXL, "transfer_piece_bytes": 1, "faults": ("writing@1:1000",)}
    async with pair(has_devices=True, **fields) as both:
        await prefill(both, 0, 1)
        region = await both.prepare()
        held = both.core(1).transfers.receiver.get("t")
        starting = asyncio.ensure_future(both.start(region, range(48), [1] * 48))
        await until(lambda: held.num_tokens_in_order() == 48)
        held.is_ending = True
        target = range(100, 148)
        committing = asyncio.ensure_future(
            _answer_or_error(both.commit(target, takes_scattering=True, takes_pieces=True))
        )
        await until(lambda: device_of(both, 1).num_scattered == 1)
        assert held.reception.state is ReceiveState.WRITING and not committing.done()
        await starting
        assert (await committing).state == worker_pb2.TRANSFER_STATE_SCATTERING
        await until(lambda: held.reception.is_over)
        assert held.reception.state is ReceiveState.VALIDATED and device_of(both, 1).num_scattered == 1
        theirs = both.core(0).executor.runner.read_kv(as_ints(range(48)))
        assert (both.core(1).executor.runner.read_kv(as_ints(target)) == theirs).all()
