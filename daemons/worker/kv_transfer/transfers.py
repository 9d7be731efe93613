"""KV transfers of one worker, as its schedulers and other workers ask for them. Lives on the event loop.

Pages are read and written on the step thread alone, between two steps; what travels lies in staging memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.commits import Start, TransferCommits
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece, TokenNumbers
from radixmesh.daemons.worker.kv_transfer.event_waits import EventWaits
from radixmesh.daemons.worker.kv_transfer.host_process import HostProcess, host_name
from radixmesh.daemons.worker.kv_transfer.kv_format import format_of, part_of
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, ReceiveState
from radixmesh.daemons.worker.kv_transfer.page_io import Gathering, begin_gather, gather, token_indexes
from radixmesh.daemons.worker.kv_transfer.receiver import MAX_RECEPTIONS, Region, TransferReceiver
from radixmesh.daemons.worker.kv_transfer.sender import MAX_SENDERS, KvSender
from radixmesh.daemons.worker.kv_transfer.staging import RegionKey, StagingPool, region_bytes
from radixmesh.daemons.worker.kv_transfer.transfer_figures import TransferFigures, trace
from radixmesh.daemons.worker.kv_transfer.transport import ByteArray, KvTransport, RegionMemory, to_the_end, until_done
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

T = TypeVar("T")

MAX_LEASE_MS = 60_000
_TICK_S = 0.1
_AFTER_STEP_S = 10.0
_POLL_S = 0.0005
_MOST_NAMED = 64
# Receivers that are being told at a time: one that is not there is given up after ten seconds.
_MOST_TOLD = 256


@dataclass(slots=True)
class _ChunkTimes:
    """Of a chunk whose pieces are gathered one after the other. began_s: it was computed, and its gather launched;
    None: not yet. ended_s: of the last piece that is there."""

    began_s: float | None = None
    ended_s: float = 0.0


class KvTransfers:
    """piece_bytes: of KV that moves behind the prefill, in one copy; 0: it is copied at once. run: runs a job on the
    step thread, behind all steps that were received, when these are over. start: runs one there behind them that does
    not wait for these (None: no runner has a device). check_holder: raises EPOCH_FENCED unless (epoch, instance id)
    hold the worker. received_step: the last step of the epoch that was received."""

    def __init__(
        self,
        instance_id: str,
        *,
        staging_bytes: int,
        piece_bytes: int = 0,
        transport: KvTransport | None,
        run: Callable[[Callable[[], object]], Awaitable[object]],
        start: Start | None = None,
        check_holder: Callable[[int, str], None],
        received_step: Callable[[], int],
        figures: TransferFigures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instance_id = instance_id
        self.transport = transport
        self._run = run
        self._start = start
        self._check_holder = check_holder
        self._received_step = received_step
        self._figures = figures or TransferFigures()
        self._clock = clock
        self.staging = StagingPool(staging_bytes)
        new_memory = RegionMemory if transport is None else transport.new_memory
        self.receiver = TransferReceiver(
            instance_id, self.staging, new_memory=new_memory, clock=clock, on_over=self._over
        )
        self._executor: StepExecutor | None = None
        self._digest = ""
        self.senders: dict[str, KvSender] = {}
        self._telling: set[asyncio.Task[None]] = set()
        """Words to receivers of transfers that failed here."""
        self._is_closed = False
        self._ticking: asyncio.Task[None] | None = None
        self._piece_bytes = piece_bytes
        self._steps, self._gathers = EventWaits("kv-steps"), EventWaits("kv-out")
        self.commits = TransferCommits(
            self.receiver,
            piece_bytes=piece_bytes,
            run=run,
            start=start,
            check_holder=check_holder,
            until_received=self._until_received,
            figures=self._figures,
            clock=clock,
        )
        self.num_sent = self.num_received = self.num_failed = 0

    def attach(self, executor: StepExecutor, weights_digest: str) -> None:
        """The model is loaded."""
        self._executor, self._digest = executor, weights_digest

    @property
    def format(self) -> worker_pb2.KvFormat | None:
        """KV that is sent and taken; None: there are no transfers here."""
        executor = self._executor
        if executor is None or self.transport is None or not executor.runner.kv_token_bytes or not self._digest:
            return None
        return format_of(executor.runner, self._digest, executor.runner.kv_share)

    def counts(self) -> worker_pb2.TransferCounts | None:
        """For operators; None: there are no transfers here."""
        if self.format is None:
            return None
        return worker_pb2.TransferCounts(
            num_sending=len(self.senders),
            num_receiving=len(self.receiver),
            staging_bytes=self.staging.num_bytes,
            quarantined_bytes=self.receiver.num_quarantined_bytes,
            num_sent=self.num_sent,
            num_received=self.num_received,
            num_failed=self.num_failed,
            quarantined=self.receiver.quarantined(_MOST_NAMED),
            hand_over_bytes=self.commits.num_bytes,
            hand_over_us=round(1e6 * self.commits.seconds),
        )

    def begin_epoch(self, epoch: int) -> None:
        """Somebody has claimed the worker: transfers of the epochs before end."""
        self.receiver.begin_epoch(epoch)
        for sender in tuple(self.senders.values()):
            if sender.epoch != epoch:
                sender.cancel()

    def prepare(self, request: worker_pb2.PrepareTransferRequest) -> worker_pb2.TransferRegion:
        """Reserves a region, or renews its lease. Raises as TransferReceiver.prepare(), EPOCH_FENCED or
        TRANSFER_FAILED."""
        self._require_offered()
        self._check_holder(request.epoch, request.instance_id)
        executor, part = self._offered(request.kv)
        region = self.receiver.prepare(
            request.transfer_id,
            request.epoch,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            token_bytes=executor.runner.kv_part_bytes(part),
            part=part,
            lease_s=_lease_s(request.lease_ms),
        )
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._tick())
        key = region.key
        answer = worker_pb2.TransferRegion(
            transfer_id=key.transfer_id,
            incarnation=key.incarnation,
            instance_id=key.instance_id,
            epoch=key.epoch,
            first_token=region.first_token,
            num_tokens=region.num_tokens,
            num_bytes=region.num_bytes,
            kv=request.kv,
        )
        if region.held is not None:
            region.held.describe(answer)
        return answer

    def renew(self, epoch: int, instance_id: str, transfer_ids: Iterable[str], lease_ms: int) -> int:
        """Renews leases; of how many. Raises EPOCH_FENCED or INVALID_ARGUMENT."""
        self._check_holder(epoch, instance_id)
        ids = list(transfer_ids)
        if len(ids) > MAX_RECEPTIONS:
            message = f"{len(ids)} transfer_ids: send at most {MAX_RECEPTIONS}"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_ids"})
        return self.receiver.renew(ids, epoch, _lease_s(lease_ms))

    async def start(self, request: worker_pb2.StartTransferRequest) -> None:
        """Gathers the next chunk of a transfer, which is sent behind those before; returns when the pages are the
        caller's again. A chunk that fails ends the transfer, at its receiver too.

        Raises EPOCH_FENCED, PAGE_CONFLICT, TRANSFER_FAILED, INVALID_ARGUMENT, OVERLOADED or UNSUPPORTED.
        """
        self._check_holder(request.epoch, request.instance_id)
        region = request.region
        try:
            executor, part = self._offered(region.kv)
            token_bytes, first_token = executor.runner.kv_part_bytes(part), request.first_token
            if not region.num_tokens or region_bytes(region.num_tokens, token_bytes) != region.num_bytes:
                message = (
                    f"{region.num_bytes} bytes are no region of {region.num_tokens} tokens: send it as it was prepared"
                )
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "region"})
            pages = unpack_ints(request.source_pages, "source_pages")
            generations = unpack_ints(request.source_generations, "source_generations")
            sender, is_new = self._sender_of(request)
        except MeshError:
            # No sender tells of it.
            self._give_up(region, request.address)
            raise
        trace("kv_gather_asked", region.transfer_id, first_token=first_token, tokens=request.num_tokens)
        size, times = executor.limits.page_size, _ChunkTimes()
        ready: asyncio.Future[None] | None = None
        numbers: TokenNumbers | None = None

        def job(memory: ByteArray) -> None:
            times.began_s = self._clock()
            with self._figures.timed("gather", len(memory)):
                skipped = first_token % size
                gather(executor, pages, generations, range(skipped, skipped + request.num_tokens), memory, part)

        async def until_ready() -> None:
            await self._until_received(request.after_step, request.epoch, request.instance_id)
            await self._until_next(executor, request.after_step)

        async def gathered(piece: range, memory: ByteArray | DevicePiece, tail: bytes) -> None:
            nonlocal ready, numbers
            if not isinstance(memory, DevicePiece):
                await self._until_received(request.after_step, request.epoch, request.instance_id)
                await to_the_end(self._run(lambda: job(memory)))
                return
            # Once for all pieces: their launches keep their order.
            ready = ready or asyncio.ensure_future(until_ready())
            await asyncio.shield(ready)
            # So are the numbers of its tokens, if the pages hold as many; begin_gather() refuses others.
            if numbers is None and len(pages) * size >= first_token % size + request.num_tokens:
                numbers = TokenNumbers(token_indexes(pages, first_token % size, request.num_tokens, size))
            of_tokens = None if numbers is None else numbers.part(piece.start, piece.stop)
            start, stop = (first_token % size + token for token in (piece.start, piece.stop))
            of_piece = slice(start // size, -(-stop // size))
            tokens = range(start % size, start % size + len(piece))
            seconds = await to_the_end(
                self._copied(
                    lambda: begin_gather(
                        executor,
                        pages[of_piece],
                        generations[of_piece],
                        tokens,
                        memory,
                        part,
                        after_step=request.after_step,
                        numbers=of_tokens,
                        tail=tail,
                    ),
                    memory.num_bytes - len(tail),
                    times,
                )
            )
            trace("kv_gathered", region.transfer_id, device_ms=round(1e3 * seconds, 3))

        def gather_start() -> worker_pb2.GatherStart | None:
            if times.began_s is None:
                return None
            num_bytes = request.num_tokens * token_bytes
            return worker_pb2.GatherStart(host=host_name(), monotonic_ns=int(1e9 * times.began_s), num_bytes=num_bytes)

        try:
            if request.is_last:
                sender.gather_start = gather_start
            await sender.add(first_token, request.num_tokens, token_bytes, is_last=request.is_last, gather=gathered)
        except BaseException:
            if is_new:
                sender.cancel()
                # Its copies may run for longer: it tells of its end behind them.
                if self.senders.get(region.transfer_id) is sender:
                    del self.senders[region.transfer_id]
            raise

    def _sender_of(self, request: worker_pb2.StartTransferRequest) -> tuple[KvSender, bool]:
        """The sender of a chunk, and whether it is the first one. Raises OVERLOADED or INVALID_ARGUMENT."""
        region, transport = request.region, self.transport
        assert transport is not None
        sender = self.senders.get(region.transfer_id)
        if sender is not None:
            if sender.region != region or sender.epoch != request.epoch:
                message = f"the transfer {region.transfer_id!r} is another one here: choose another id"
                raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "region"})
            return sender, False
        if len(self.senders) >= MAX_SENDERS:
            message = f"{MAX_SENDERS} transfers are being sent: retry when some are over"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        sender = self.senders[region.transfer_id] = KvSender(
            region,
            request.address,
            _key_of(region).stamp(),
            request.epoch,
            self._instance_id,
            self.staging,
            transport,
            self._sent,
            piece_bytes=self._piece_bytes,
        )
        return sender, True

    def abort(self, transfer_id: str, *, is_writer_gone: bool = False) -> None:
        """Ends a transfer, whichever end of it this is. is_writer_gone: as of TransferReceiver.abort(). Unknown ids are
        fine."""
        self.receiver.abort(transfer_id, is_writer_gone=is_writer_gone)
        if (sender := self.senders.get(transfer_id)) is not None:
            sender.cancel()

    def _sent(self, sender: KvSender, is_sent: bool, num_bytes: int, seconds: float) -> None:
        if self.senders.get(sender.region.transfer_id) is sender:
            del self.senders[sender.region.transfer_id]
        trace("kv_sender_over", sender.region.transfer_id, is_sent=is_sent)
        self.num_sent += is_sent
        self.num_failed += not is_sent
        if is_sent:
            self._figures.passed("send", num_bytes, seconds)
        else:
            self._figures.failed("not_sent")
            self._give_up(sender.region, sender.address)

    def _give_up(self, region: worker_pb2.TransferRegion, address: str) -> None:
        """Tells the receiver of a transfer that nothing more comes. It may know: the stream of a writer ends. But one
        that ends early may never have reached it, and a receiver that hears of no writer waits for one."""
        transport = self.transport
        if transport is None or self._is_closed:
            return
        if len(self._telling) >= _MOST_TOLD:
            log.info("kv_receiver_not_told", transfer=region.transfer_id, peer=address, error="too many at a time")
            return
        telling = asyncio.ensure_future(self._tell(transport, region, address))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self, transport: KvTransport, region: worker_pb2.TransferRegion, address: str) -> None:
        try:
            await transport.give_up(address, region, self._instance_id)
        except MeshError as error:
            log.info("kv_receiver_not_told", transfer=region.transfer_id, peer=address, error=str(error))

    async def commit(self, request: worker_pb2.CommitTransferRequest) -> worker_pb2.CommitTransferResponse:
        """Scatters regions that are written, or will be soon, into pages, behind a step. Raises EPOCH_FENCED,
        INVALID_ARGUMENT or TRANSFER_FAILED."""
        self._check_holder(request.epoch, request.instance_id)
        trace("kv_commit_asked", request.transfer_id)
        return await self.commits.commit(self._executor, request)

    async def _until_received(self, step: int, epoch: int, instance_id: str) -> None:
        """Returns when a step of the epoch was received, and so will be launched ahead of what is started now. Raises
        EPOCH_FENCED or TRANSFER_FAILED."""
        try:
            async with asyncio.timeout(_AFTER_STEP_S):
                while self._received_step() < step:
                    await asyncio.sleep(_POLL_S)
                    self._check_holder(epoch, instance_id)
        except TimeoutError as error:
            message = f"step {step} did not come within {_AFTER_STEP_S:g} s: prefill again"
            raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message) from error

    async def _until_next(self, executor: StepExecutor, step: int) -> None:
        """Returns when the steps ahead of one are over. Copies behind steps, and the threads that wait for them, have
        one order: of several prompts, one that is computed by a later step would hold up the others' last chunks."""
        ahead = await self._started(lambda: executor.event_of(step - 1))
        while not ahead.is_done:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    async def watch(self, transfer_id: str) -> AsyncIterator[worker_pb2.WatchTransferResponse]:
        """States of a transfer until it is written, or over. Raises TRANSFER_FAILED."""
        self._require_offered()
        region, told = self.receiver.get(transfer_id), None
        while True:
            reception = region.reception
            state = ReceiveState.WRITTEN if reception.state is ReceiveState.SCATTERING else reception.state
            if (state, region.num_written, region.is_ending) != told:
                told = state, region.num_written, region.is_ending
                yield worker_pb2.WatchTransferResponse(
                    state=int(state),  # type: ignore[arg-type]
                    failure=int(reception.failure),  # type: ignore[arg-type]
                    num_bytes=region.num_written,
                    is_ending=region.is_ending,
                )
                continue  # It may have changed while that was sent.
            if reception.is_over or state is ReceiveState.WRITTEN:
                return
            await region.change()

    def open(self, region: worker_pb2.TransferRegion, writer: str, process: HostProcess | None = None) -> Region:
        """Another worker begins to write; process: of a writer that asks for the memory itself. Raises
        TRANSFER_FAILED."""
        self._offered(region.kv)
        found = self.receiver.open(_key_of(region), region.num_bytes, writer, process)
        found.opened_s = self._clock()
        return found

    def written(self, region: Region) -> None:
        """Its writer has said that all is there."""
        trace("kv_written", region.key.transfer_id)
        self._figures.passed("receive", region.num_bytes, self._clock() - region.opened_s)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._is_closed = True
        for sender in tuple(self.senders.values()):
            sender.cancel()
        for telling in self._telling:
            telling.cancel()
        if self._ticking is not None:
            self._ticking.cancel()
        if self.transport is not None:
            self.transport.close()

    async def _copied(self, begin: Callable[[], Gathering], num_bytes: int, times: _ChunkTimes) -> float:
        """Launches a copy on the step thread; returns when it has run: its device time."""
        began = self._clock()
        copied, computed, check = await self._started(begin)
        copying = asyncio.ensure_future(self._gathers.until(copied.event))
        try:
            if not computed.is_done:
                await self._steps.until(computed)
                began = self._clock()
            times.began_s = began if times.began_s is None else times.began_s
            await self._started(check)
        finally:
            # Whatever became of the step, memory is written until the copy has run.
            await until_done((copying,))
        copying.result()
        now = self._clock()
        # The device copies one piece after the other.
        self._figures.passed("gather", num_bytes, now - max(began, times.ended_s))
        times.ended_s = now
        self._figures.passed("gather_on_device", num_bytes, seconds := copied.seconds())
        return seconds

    def _started(self, job: Callable[[], T]) -> asyncio.Future[T]:
        assert self._start is not None, "a runner with a device has a step thread"
        return self._start(job)

    def _require_offered(self) -> worker_pb2.KvFormat:
        """Raises UNSUPPORTED where there are no transfers."""
        if (kv := self.format) is not None:
            return kv
        message = "KV transfer: not offered by this worker"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "kv_transfer"})

    def _offered(self, kv: worker_pb2.KvFormat) -> tuple[StepExecutor, KvShare]:
        """Heads of KV that a transfer brings or takes. Raises UNSUPPORTED, or TRANSFER_FAILED for another format."""
        part = part_of(self._require_offered(), kv)
        assert self._executor is not None
        return self._executor, part

    def _over(self, region: Region) -> None:
        if region.reception.failure is Failure.NONE:
            self.num_received += 1
            return
        self.num_failed += 1
        failure = region.reception.failure.name.lower()
        self._figures.failed(failure)
        log.info("kv_not_received", transfer=region.key.transfer_id, failure=failure)

    async def _tick(self) -> None:
        while len(self.receiver):
            await asyncio.sleep(_TICK_S)
            self.receiver.tick()
        self._ticking = None


def _key_of(region: worker_pb2.TransferRegion) -> RegionKey:
    return RegionKey(
        transfer_id=region.transfer_id,
        incarnation=region.incarnation,
        instance_id=region.instance_id,
        epoch=region.epoch,
    )


def _lease_s(lease_ms: int) -> float:
    if not 0 < lease_ms <= MAX_LEASE_MS:
        message = f"lease_ms is {lease_ms}: choose 1 to {MAX_LEASE_MS}"
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "lease_ms", "max": str(MAX_LEASE_MS)}
        )
    return lease_ms / 1000
