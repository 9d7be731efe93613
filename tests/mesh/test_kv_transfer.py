"""KV transfers between two workers over the wire: what arrives is what was computed, or nothing is used of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from support.host_kv_device import workers_have_devices
from support.plans import admit, as_ints, chunk, grant
from support.runner_contract import MODEL
from support.running_daemon import Running, running
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.kv_transfer.lifecycle import Reception
from radixmesh.daemons.worker.kv_transfer.receiver import Region
from radixmesh.daemons.worker.kv_transfer.staging import RegionKey
from radixmesh.daemons.worker.kv_transfer.transport import RegionMemory
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

TIMEOUT_S = 60.0
KEY = RegionKey(transfer_id="t", incarnation=1, instance_id="w", epoch=1)
STAGING = 1 << 20
PROMPT = [3 + 7 * i % 90 for i in range(49)]
NUM_OUT = 8


@dataclass
class Pair:
    """Two workers and the stream of a scheduler to each, which hold epoch 1."""

    workers: list[Running[WorkerDaemon]]
    clients: list[WorkerClient]
    steps: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def stub(self) -> worker_pb2_grpc.WorkerServiceStub:
        return self.clients[1].stub

    async def run(self, number: int, **plan: object) -> list[int]:
        self.steps[number] += 1
        await self.clients[number].plan(StepPlan(epoch=1, step_id=self.steps[number], **plan))  # type: ignore[arg-type]
        return (await self.clients[number].result()).ids.tolist()

    def core(self, number: int):
        return self.workers[number].daemon.core

    async def prepare(
        self, transfer_id: str = "t", *, lease_ms: int = 30_000, num_tokens: int = 48, first_token: int = 0
    ):
        request = worker_pb2.PrepareTransferRequest(
            transfer_id=transfer_id,
            epoch=1,
            instance_id="d",
            num_tokens=num_tokens,
            first_token=first_token,
            lease_ms=lease_ms,
            kv=self.core(1).transfers.format,
        )
        return (await self.stub.PrepareTransfer(request)).region

    def start(self, region, pages, generations, after_step: int = 0):
        return self.clients[0].stub.StartTransfer(
            worker_pb2.StartTransferRequest(
                transfer_id=region.transfer_id,
                epoch=1,
                instance_id="p",
                source_pages=pack_ints(pages),
                source_generations=pack_ints(generations),
                num_tokens=region.num_tokens,
                region=region,
                address=self.workers[1].address,
                is_last=True,
                after_step=after_step,
            )
        )

    def commit(self, pages, *, transfer_id: str = "t", generation: int = 1, previous_page: int = -1, ids=None, **more):
        return self.stub.CommitTransfer(
            worker_pb2.CommitTransferRequest(
                transfer_id=transfer_id,
                epoch=1,
                instance_id="d",
                after_step=self.steps[1],
                pages=pack_ints(pages),
                generations=pack_ints([generation] * len(pages)),
                previous_page=previous_page,
                ids=pack_ints(PROMPT[:48] if ids is None else ids),
                **more,
            )
        )

    async def last_state(self, transfer_id: str = "t"):
        async with asyncio.timeout(TIMEOUT_S):
            async for answer in self.stub.WatchTransfer(worker_pb2.WatchTransferRequest(transfer_id=transfer_id)):
                last = answer
        return last


@asynccontextmanager
async def pair(
    backend: str = "simulated",
    sizes: tuple[int, int] = (1, 1),
    *,
    num_tokens: int = 256,
    has_devices: bool = False,
    **fields: object,
) -> AsyncIterator[Pair]:
    """num_tokens: of each worker's pages. has_devices: stand-ins for GPUs, between which the transport `device` carries
    KV."""
    values: dict[str, object] = {"backend": Backend.SIMULATED, "simulated_vocab_size": 500}
    if backend == "cpu":
        values = {"backend": Backend.CPU, "model": MODEL, "cpu_threads": 1}
    values |= {"num_slots": 4, "max_total_len": 96, "transfer_staging_bytes": STAGING, **fields}
    async with AsyncExitStack() as stack:
        if has_devices:
            stack.enter_context(workers_have_devices())
        workers, clients = [], []
        for name, size in zip("pd", sizes, strict=True):
            settings = WorkerSettings(page_size=size, num_pages=num_tokens // size, **values)  # type: ignore[arg-type]
            worker = await stack.enter_async_context(running(WorkerDaemon, settings, instance_id=f"worker-{name}"))
            client = await stack.enter_async_context(WorkerClient(worker.address, name))
            await client.hold(1)
            workers.append(worker)
            clients.append(client)
        yield Pair(workers, clients)


def pages_of(size: int, first: int, num_tokens: int) -> list[int]:
    return list(range(first, first + -(-num_tokens // size)))


async def prefill(both: Pair, number: int, size: int) -> int:
    """The first token of PROMPT."""
    pages = pages_of(size, 0, len(PROMPT) + NUM_OUT)
    (token,) = await both.run(
        number,
        admits=(admit(0, PROMPT, max_total_len=len(PROMPT) + NUM_OUT),),
        grants=(grant(0, pages),),
        chunks=(chunk(0, len(PROMPT)),),
    )
    return token


async def decode(both: Pair, number: int, num: int) -> list[int]:
    ids = []
    for i in range(num):
        ids += await both.run(number, has_forward=True, decode_set=as_ints([0]) if i == 0 else None)
    return ids


@pytest.mark.parametrize("sizes", [(1, 1), (1, 16), (16, 1), (16, 4)])
@pytest.mark.parametrize("backend", ["simulated", "cpu"])
async def test_decoding_goes_on_from_what_another_worker_computed(backend: str, sizes: tuple[int, int]) -> None:
    async with pair(backend, sizes) as both:
        source, size = sizes
        first = await prefill(both, 0, source)
        expected = await decode(both, 0, NUM_OUT - 1)
        region = await both.prepare()
        assert region.num_bytes == 64 + 48 * both.core(0).executor.runner.kv_token_bytes
        await both.start(region, pages_of(source, 0, 48), [1] * len(pages_of(source, 0, 48)))
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        target = pages_of(size, 3, 48)
        answer = await both.commit(target)
        assert (answer.state, answer.failure) == (worker_pb2.TRANSFER_STATE_VALIDATED, 0)
        # The prompt's last token is computed here; so is what the first token adds.
        request = admit(
            0,
            PROMPT,
            output_ids=as_ints([first]),
            cached_len=48,
            cached_pages=as_ints(target),
            cached_page_generations=as_ints([1] * len(target)),
            max_total_len=len(PROMPT) + NUM_OUT,
        )
        own = pages_of(size, 200 // size, 2 + NUM_OUT)
        ids = await both.run(1, admits=(request,), grants=(grant(0, own),), chunks=(chunk(0, 2),))
        ids += await decode(both, 1, NUM_OUT - 2)
        assert ids == expected
        records = both.core(1).executor.records
        assert records.ids[target].ravel().tolist() == PROMPT[:48] and records.previous_pages[target[0]] == -1
        assert both.core(0).transfers.staging.num_bytes == both.core(1).transfers.staging.num_bytes == 0
        assert (both.core(0).transfers.num_sent, both.core(1).transfers.num_received) == (1, 1)
        for number, stages in enumerate((("gather", "send"), ("receive", "scatter"))):
            value = both.workers[number].runtime.metrics.registry.get_sample_value
            for stage in stages:
                assert (value("radixmesh_kv_transfer_bytes_total", {"stage": stage}) or 0) >= region.num_bytes - 64, (
                    stage
                )
            counts = (await both.clients[number].stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest())).transfers
            assert (counts.num_sent, counts.num_received, counts.staging_bytes) == (1 - number, number, 0)


async def test_a_writer_that_comes_back_after_the_lease_changes_nothing_of_the_next_region() -> None:
    async with pair() as both:
        await prefill(both, 0, 1)
        region = await both.prepare(lease_ms=200)
        call = both.stub.WriteTransfer()
        await call.write(worker_pb2.WriteTransferRequest(region=region, writer="late", offset=32, data=b"\xee" * 64))
        last = await both.last_state()
        assert last.state == worker_pb2.TRANSFER_STATE_FAILED
        assert last.failure == worker_pb2.TRANSFER_FAILURE_LEASE_EXPIRED
        kv = both.core(1).executor.runner.kv
        before = kv.copy()
        again = await both.prepare("t")
        assert again.incarnation != region.incarnation
        error = await error_of(write_all(call, region, b"\xee" * region.num_bytes))
        assert error.reason_name == "TRANSFER_FAILED"
        error = await error_of(write_all(both.stub.WriteTransfer(), region, b"\xee" * region.num_bytes))
        assert error.reason_name == "TRANSFER_FAILED", "the region that it was told of is gone"
        (fresh,) = both.core(1).transfers.receiver.regions.values()
        assert fresh.memory is not None and not fresh.memory.any() and (kv == before).all()
        await both.start(again, pages_of(1, 0, 48), [1] * 48)
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        assert (await both.commit(range(100, 148))).state == worker_pb2.TRANSFER_STATE_VALIDATED
        changed = np.flatnonzero(kv != before)
        assert set(changed.tolist()) == set(range(100, 148))
        assert both.core(1).transfers.staging.num_bytes == 0


async def test_a_region_with_a_foreign_stamp_or_checksum_is_not_used() -> None:
    async with pair() as both:
        region = await both.prepare()
        foreign = RegionKey(transfer_id="u", incarnation=1, instance_id="worker-d", epoch=1).stamp()
        data = foreign + bytes(region.num_bytes - 64) + foreign
        await write_all(both.stub.WriteTransfer(), region, data)
        answer = await both.commit(range(48))
        assert answer.failure == worker_pb2.TRANSFER_FAILURE_STAMP
        assert not both.core(1).executor.records.filled[:48].any()
        assert (both.core(1).executor.records.generations[:48] == 1).all(), "as the scheduler counts them"
        region = await both.prepare("v")
        error = await error_of(write_all(both.stub.WriteTransfer(), region, data, checksum=1))
        assert error.metadata["failure"] == "checksum"
        assert both.core(1).transfers.staging.num_bytes == 0


async def test_a_writer_that_dies_or_writes_beyond_ends_the_transfer() -> None:
    async with pair() as both:
        region = await both.prepare("a")
        call = both.stub.WriteTransfer()
        await call.write(worker_pb2.WriteTransferRequest(region=region, writer="w", offset=0, data=b"x"))
        async for answer in both.stub.WatchTransfer(worker_pb2.WatchTransferRequest(transfer_id="a")):
            if answer.num_bytes:
                call.cancel()
            last = answer
        assert last.failure == worker_pb2.TRANSFER_FAILURE_WRITER_GONE
        region = await both.prepare("b")
        call = both.stub.WriteTransfer()
        await call.write(
            worker_pb2.WriteTransferRequest(region=region, writer="w", offset=region.num_bytes - 1, data=b"xy")
        )
        error = await error_of(answer_of(call))
        assert error.metadata["failure"] == "bad_write"
        region = await both.prepare("c")
        call = both.stub.WriteTransfer()
        await call.write(worker_pb2.WriteTransferRequest(region=region, writer="w", data=bytes((4 << 20) + 1)))
        assert (await error_of(answer_of(call))).reason_name == "TOO_LARGE"
        call = both.stub.WriteTransfer()
        await call.write(worker_pb2.WriteTransferRequest(offset=1))
        assert (await error_of(answer_of(call))).reason_name == "MISSING_FIELD"
        assert both.core(1).transfers.staging.num_bytes == 0


async def test_what_happens_while_a_watcher_is_told_is_not_lost() -> None:
    async with pair() as both:
        transfers = both.core(1).transfers
        region = await both.prepare()
        watching = transfers.watch("t")
        assert (await anext(watching)).state == worker_pb2.TRANSFER_STATE_PREPARED
        await write_all(both.stub.WriteTransfer(), region, bytes(region.num_bytes))
        async with asyncio.timeout(TIMEOUT_S):
            assert [answer.state async for answer in watching] == [worker_pb2.TRANSFER_STATE_WRITTEN]


async def test_a_change_counts_from_the_call_on() -> None:
    region = Region(KEY, RegionMemory(64), Reception(1.0, writes_are_seen=True), 0, 1)
    waiting = asyncio.ensure_future(region.change())
    region.notify()
    await asyncio.wait_for(waiting, TIMEOUT_S)


async def test_a_writer_that_repeats_itself_is_cut_off() -> None:
    async with pair() as both:
        region = await both.prepare()
        call = both.stub.WriteTransfer()
        half = bytes(region.num_bytes // 2 + 1)
        await call.write(worker_pb2.WriteTransferRequest(region=region, writer="w", data=half))
        await call.write(worker_pb2.WriteTransferRequest(data=half))
        assert (await error_of(answer_of(call))).metadata["failure"] == "bad_write"
        assert both.core(1).transfers.staging.num_bytes == 0


async def test_a_commit_behind_a_step_that_never_comes_gets_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixmesh.daemons.worker.kv_transfer.transfers._AFTER_STEP_S", 0.1)
    async with pair() as both:
        region = await both.prepare()
        await write_all(both.stub.WriteTransfer(), region, bytes(region.num_bytes))
        both.steps[1] = 7
        error = await error_of(both.commit(range(48)))
        assert error.reason_name == "TRANSFER_FAILED" and "step 7" in error.message


@pytest.mark.parametrize("ending", ["done", "aborted", "gone", "far"])
async def test_a_commit_may_come_ahead_of_the_last_word_once_that_is_near(ending: str) -> None:
    async with pair() as both:
        records, region = both.core(1).executor.records, await both.prepare()
        key = RegionKey(
            transfer_id="t", incarnation=region.incarnation, instance_id=region.instance_id, epoch=region.epoch
        )
        stamp = key.stamp()
        data, call = stamp + bytes(region.num_bytes - 64) + stamp, both.stub.WriteTransfer()
        is_near = ending != "far"
        await call.write(worker_pb2.WriteTransferRequest(region=region, writer="w", data=data[:-1], is_ending=is_near))
        async for answer in both.stub.WatchTransfer(worker_pb2.WatchTransferRequest(transfer_id="t")):
            if answer.num_bytes:
                assert answer.is_ending == is_near
                break
        committing = asyncio.ensure_future(_committed(both))
        if not is_near:
            assert (await committing).metadata["state"] == "writing"
            return
        await asyncio.sleep(0.2)
        assert not committing.done() and not records.generations.any(), "nothing is granted yet"
        if ending == "done":
            request = worker_pb2.WriteTransferRequest(
                offset=region.num_bytes - 1,
                data=data[-1:],
                last_word=worker_pb2.TRANSFER_LAST_WORD_DONE,
                checksum=zlib.crc32(data),
            )
            await call.write(request)
            await answer_of(call)
            assert (await committing).state == worker_pb2.TRANSFER_STATE_VALIDATED and records.filled[:48].all()
            return
        if ending == "aborted":
            await both.stub.AbortTransfer(worker_pb2.AbortTransferRequest(transfer_id="t"))
        else:
            call.cancel()
        assert (await committing).reason_name == "TRANSFER_FAILED"
        assert not records.generations.any(), "as the scheduler counts them"


async def _committed(both: Pair) -> worker_pb2.CommitTransferResponse | MeshError:
    try:
        return await both.commit(range(48))
    except grpc.aio.AioRpcError as error:
        return mesh_error_from_rpc(error)


async def test_kv_of_a_step_is_sent_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be asked for ahead of the step, which is waited for, and not for ever."""
    async with pair() as both:
        region = await both.prepare()
        starting = asyncio.ensure_future(both.start(region, range(48), [1] * 48, after_step=1))
        await asyncio.sleep(0.2)
        assert not starting.done()
        await prefill(both, 0, 1)
        await starting
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        monkeypatch.setattr("radixmesh.daemons.worker.kv_transfer.transfers._AFTER_STEP_S", 0.1)
        region = await both.prepare("u")
        error = await error_of(both.start(region, range(48), [1] * 48, after_step=both.steps[0] + 1))
        assert error.reason_name == "TRANSFER_FAILED" and f"step {both.steps[0] + 1}" in error.message


async def test_pages_that_moved_on_are_neither_sent_nor_written() -> None:
    async with pair() as both:
        await prefill(both, 0, 1)
        for number, (pages, generations) in enumerate(
            (
                (range(48), [2] * 48),
                (range(48), [1] * 47),
                (range(200, 248), [0] * 48),
                ([0] * 48, [1] * 48),
                ([300] * 48, [1] * 48),
            )
        ):
            region = await both.prepare(f"refused-{number}")
            assert (await error_of(both.start(region, pages, generations))).reason_name in ("PAGE_CONFLICT",)
        assert both.core(0).transfers.staging.num_bytes == 0
        async with asyncio.timeout(TIMEOUT_S):
            while both.core(1).transfers.staging.num_bytes:
                await asyncio.sleep(0.01)  # It is told that nothing comes.
        region = await both.prepare()
        await prefill(both, 1, 1)
        await both.start(region, range(48), [1] * 48)
        assert (await both.last_state()).state == worker_pb2.TRANSFER_STATE_WRITTEN
        kv = both.core(1).executor.runner.kv
        before = kv.copy()
        assert (await both.commit(range(48))).failure == worker_pb2.TRANSFER_FAILURE_PAGES, "a slot holds them"
        assert (kv == before).all() and both.core(1).transfers.staging.num_bytes == 0


async def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    async with pair() as both:
        kv = both.core(1).transfers.format
        good = {"transfer_id": "t", "epoch": 1, "instance_id": "d", "num_tokens": 48, "lease_ms": 1000, "kv": kv}
        other = worker_pb2.KvFormat(weights_digest="x", kv_dtype="uint64", kv_layout="hash")
        for change, reason in (
            ({"epoch": 2}, "EPOCH_FENCED"),
            ({"instance_id": "x"}, "EPOCH_FENCED"),
            ({"num_tokens": 0}, "INVALID_ARGUMENT"),
            ({"lease_ms": 0}, "INVALID_ARGUMENT"),
            ({"lease_ms": 60_001}, "INVALID_ARGUMENT"),
            ({"transfer_id": "x" * 65}, "INVALID_ARGUMENT"),
            ({"transfer_id": ""}, "INVALID_ARGUMENT"),
            ({"num_tokens": STAGING}, "NEVER_FITS"),
            ({"kv": other}, "TRANSFER_FAILED"),
        ):
            request = worker_pb2.PrepareTransferRequest(**(good | change))
            assert (await error_of(both.stub.PrepareTransfer(request))).reason_name == reason, change
        await both.prepare("a", num_tokens=STAGING // 8 - 8)
        assert (await error_of(both.prepare("b"))).reason_name == "OVERLOADED"
        renewal = worker_pb2.RenewTransfersRequest(epoch=1, instance_id="d", transfer_ids=["a", "z"], lease_ms=1000)
        assert (await both.stub.RenewTransfers(renewal)).num_renewed == 1
        renewal.transfer_ids.extend(["x"] * 4096)
        assert (await error_of(both.stub.RenewTransfers(renewal))).reason_name == "INVALID_ARGUMENT"
        assert (await error_of(both.commit([], transfer_id="z"))).reason_name == "TRANSFER_FAILED"
        assert (await error_of(both.commit(range(48), transfer_id="a"))).reason_name == "INVALID_ARGUMENT"
        await both.stub.AbortTransfer(worker_pb2.AbortTransferRequest(transfer_id="a"))
        region = await both.prepare("c")
        assert (await error_of(both.commit(range(48), transfer_id="c"))).metadata["state"] == "prepared"
        async with WorkerClient(both.workers[1].address, "e") as next_one:
            await next_one.hold(2)
            assert both.core(1).transfers.staging.num_bytes == 0, "the epoch of the transfer is over"
            error = await error_of(write_all(both.stub.WriteTransfer(), region, b""))
            assert error.reason_name == "TRANSFER_FAILED"


async def test_a_receiver_that_is_gone_frees_the_send_buffer() -> None:
    async with pair() as both:
        await prefill(both, 0, 1)
        region = await both.prepare()
        region.incarnation += 1
        await both.start(region, range(48), [1] * 48)
        async with asyncio.timeout(TIMEOUT_S):
            while both.core(0).transfers.staging.num_bytes:
                await asyncio.sleep(0.01)
        assert both.core(0).transfers.num_failed == 1


async def test_a_worker_without_staging_takes_no_part() -> None:
    async with pair(transfer_staging_bytes=0) as both:
        assert both.core(1).transfers.format is None
        request = worker_pb2.PrepareTransferRequest(epoch=1, instance_id="d")
        assert (await error_of(both.stub.PrepareTransfer(request))).reason_name == "UNSUPPORTED"


async def write_all(call, region, data: bytes, checksum: int | None = None):
    # One message: gRPC has a status of its own, INTERNAL, for a call whose peer ended it while it was being written to.
    message = worker_pb2.WriteTransferRequest(
        region=region,
        writer="late",
        data=data,
        last_word=worker_pb2.TRANSFER_LAST_WORD_DONE,
        checksum=zlib.crc32(data) if checksum is None else checksum,
    )
    # A call that has ended takes nothing more: its status says why.
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await call.write(message)
    return await answer_of(call)


async def answer_of(call):
    async with asyncio.timeout(TIMEOUT_S):
        answer = await call.read()
        if answer is not grpc.aio.EOF:
            return answer
        code, details = await call.code(), await call.details()
        trailing = await call.trailing_metadata()
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing or grpc.aio.Metadata(), details)


async def error_of(call) -> MeshError:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return mesh_error_from_rpc(error)
    raise AssertionError(f"it was taken: {answer}")
