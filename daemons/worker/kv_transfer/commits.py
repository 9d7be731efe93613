"""Commits of transfers that this worker receives: their KV goes to pages as it comes. Lives on the event loop.

A commit that comes ahead of the writer's last word scatters what is there, piece by piece: the rest, which is little,
goes behind that word, and the stamps are looked at behind all of it. Pieces are for the transfer's own pages, whose
scheduler has no answer yet: nobody reads them, and nobody is granted them before the answer. That comes behind the last
copy, also where the transfer is given up between two pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece
from radixmesh.daemons.worker.kv_transfer.event_waits import EventWaits
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure, ReceiveState
from radixmesh.daemons.worker.kv_transfer.page_scatter import (
    ScatteredPieces,
    Target,
    WrittenPart,
    begin_scatter,
    may_scatter,
    scatter,
)
from radixmesh.daemons.worker.kv_transfer.receiver import Region, TransferReceiver
from radixmesh.daemons.worker.kv_transfer.staging import STAMP_BYTES
from radixmesh.daemons.worker.kv_transfer.transfer_figures import TransferFigures, trace
from radixmesh.daemons.worker.kv_transfer.transport import to_the_end
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.step_handle import StepHandle
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

T = TypeVar("T")


class Start(Protocol):
    """As StepQueue.start()."""

    def __call__(self, job: Callable[[], T], /) -> asyncio.Future[T]: ...


class TransferCommits:
    """run, start, check_holder: as of KvTransfers. until_received: returns when a step of an epoch was received, of an
    instance that holds it. piece_bytes: of KV that is worth a copy ahead of the last word; 0:
    all is copied behind it."""

    def __init__(
        self,
        receiver: TransferReceiver,
        *,
        piece_bytes: int,
        run: Callable[[Callable[[], object]], Awaitable[object]],
        start: Start | None,
        check_holder: Callable[[int, str], None],
        until_received: Callable[[int, int, str], Awaitable[None]],
        figures: TransferFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receiver = receiver
        self._piece_bytes = piece_bytes
        self._run = run
        self._start = start
        self._check_holder = check_holder
        self._until_received = until_received
        self._figures = figures
        self._clock = clock
        self._running: set[asyncio.Task[None]] = set()
        self._scatters = EventWaits("kv-in")
        self.between_pieces: Callable[[], Awaitable[None]] | None = None
        """Awaited behind each piece; for tests that lose daemons there."""
        self.before_scatter: Callable[[], Awaitable[None]] | None = None
        """Awaited when all is written."""
        self.num_bytes, self.seconds = 0, 0.0
        """Of KV that moved behind its prefill, from the launch of its gather to the end of the commit."""

    async def commit(
        self, executor: StepExecutor | None, request: worker_pb2.CommitTransferRequest
    ) -> worker_pb2.CommitTransferResponse:
        """Scatters regions that are written, or whose last chunk is under way, into pages. Raises EPOCH_FENCED,
        INVALID_ARGUMENT or TRANSFER_FAILED."""
        regions = [
            self._receiver.get(name) for name in dict.fromkeys((request.transfer_id, *request.other_transfer_ids))
        ]
        assert executor is not None, "a region was prepared"
        target = Target(
            pages=unpack_ints(request.pages, "pages"),
            generations=unpack_ints(request.generations, "generations"),
            previous_page=request.previous_page,
            ids=unpack_ints(request.ids, "ids"),
            namespace=request.cache_namespace,
        )
        num_tokens = {region.num_tokens for region in regions}
        if len(target.pages) != len(target.generations) or num_tokens != {len(target.ids)}:
            message = f"pages, generations and ids are not those of {regions[0].num_tokens} tokens"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "pages"})
        await self._until_received(request.after_step, request.epoch, request.instance_id)
        # Sent ahead, so that pages are there for it when all is written, and all that can be is looked at by then.
        may_be_named = request.takes_scattering and executor.host is None and executor.runner.kv_device is not None
        shares = [region.part for region in regions]
        may_be_named = may_be_named and await self._started(lambda: may_scatter(executor, target, shares))
        pieces, read = ScatteredPieces(executor, target, shares, request.epoch, request.after_step), set[Region]()
        try:
            if may_be_named and request.takes_pieces and self._piece_bytes:
                await self._scatter_ahead(request, regions, pieces, read)
            await self.until_written(request)
            if self.before_scatter is not None:
                await self.before_scatter()
            self._check_holder(request.epoch, request.instance_id)
            parts = self._written_parts(regions, request.epoch, read)
        except BaseException as error:
            failure = _failure_of(regions)
            if read:
                await to_the_end(self._give_up(read, pieces))
            is_over = isinstance(error, MeshError) and error.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED
            if not is_over or not pieces.is_granted:
                raise
            failed = worker_pb2.TRANSFER_STATE_FAILED
            return worker_pb2.CommitTransferResponse(state=failed, failure=int(failure or Failure.ABORTED))  # type: ignore[arg-type]
        trace("kv_scatter_begins", request.transfer_id)
        begun: asyncio.Future[StepHandle[tuple[Failure, float]]] | None = None
        if any(isinstance(part.memory, DevicePiece) for part in parts):
            # On the step thread it is ahead of all plans that are received from now on.
            begun = self._started(
                lambda: begin_scatter(
                    executor, target, parts, request.after_step, may_be_named=may_be_named, pieces=pieces
                )
            )
        finishing = asyncio.ensure_future(self._finish(executor, target, regions, parts, pieces, begun))
        self._running.add(finishing)
        finishing.add_done_callback(self._finished)
        if begun is not None and may_be_named:
            return worker_pb2.CommitTransferResponse(state=worker_pb2.TRANSFER_STATE_SCATTERING)
        # Cancelled, as when the scheduler dies, it waits all the same: staging would be another transfer's.
        await to_the_end(asyncio.wait((finishing,)))
        finishing.result()
        # One that was given up while it was read has a reason of its own.
        failure = _failure_of(regions)
        state = worker_pb2.TRANSFER_STATE_FAILED if failure else worker_pb2.TRANSFER_STATE_VALIDATED
        return worker_pb2.CommitTransferResponse(state=state, failure=int(failure))  # type: ignore[arg-type]

    async def until_written(self, request: worker_pb2.CommitTransferRequest) -> None:
        """Returns when regions whose last chunk is under way are written, or given up. Raises TRANSFER_FAILED for one
        that is not known."""
        for name in (request.transfer_id, *request.other_transfer_ids):
            region = self._receiver.get(name)
            while _is_on_its_way(region):
                await region.change()

    async def _scatter_ahead(
        self,
        request: worker_pb2.CommitTransferRequest,
        regions: Sequence[Region],
        pieces: ScatteredPieces,
        read: set[Region],
    ) -> None:
        """Copies what has come, as it comes. Returns when all regions are written, or one is over, or its pages cannot
        be written to: that is found again behind the last word. read: gets regions that are copied from."""
        while any(map(_is_on_its_way, regions)) and not any(region.reception.is_over for region in regions):
            changes = [region.change() for region in regions]
            for number, region in enumerate(regions):
                end, memory = region.num_tokens_in_order(), region.written
                token_bytes = (region.num_bytes - 2 * STAMP_BYTES) // region.num_tokens
                num_bytes = (end - pieces.num_tokens[number]) * token_bytes
                if num_bytes < self._piece_bytes or not isinstance(memory, DevicePiece):
                    continue
                # With nothing awaited in between: a claim that comes behind this waits for the copy.
                self._check_holder(request.epoch, request.instance_id)
                if region not in read and not region.reception.begin_piece():
                    continue
                read.add(region)
                trace("kv_piece_begins", region.key.transfer_id, bytes=num_bytes)
                if not await self._started(partial(pieces.copy, number, memory, end)):
                    return
                if self.between_pieces is not None:
                    await self.between_pieces()
            await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
            for change in changes:
                change.cancel()

    async def _give_up(self, read: set[Region], pieces: ScatteredPieces) -> None:
        """The transfer is over ahead of its last word. Returns when no copy to its pages runs any more."""
        try:
            await self._until_copied(pieces)
        finally:
            for region in read:
                self._receiver.scattered(region, Failure.ABORTED)

    async def _until_copied(self, pieces: ScatteredPieces) -> None:
        # On the step thread it is behind a launch that was not waited for.
        for copied in await self._started(lambda: tuple(pieces.copies)):
            await self._scatters.until(copied.event)
        await self._started(pieces.collect)

    async def _finish(
        self,
        executor: StepExecutor,
        target: Target,
        regions: Sequence[Region],
        parts: Sequence[WrittenPart],
        pieces: ScatteredPieces,
        begun: asyncio.Future[StepHandle[tuple[Failure, float]]] | None,
    ) -> None:
        """Waits for the scatter; then the regions are read no more. Cancelled, as when the process ends, it waits for
        nothing: the step thread may have ended."""
        outcome = Failure.PAGES
        try:
            try:
                outcome = await self._scattered(executor, target, regions[0].key.transfer_id, parts, pieces, begun)
            except Exception:
                # Copies that were launched ahead of the one that failed may run.
                if pieces.is_granted:
                    await self._until_copied(pieces)
                raise
            if outcome is Failure.NONE:
                self._handed_over(regions)
            elif pieces.is_granted:
                await self._until_copied(pieces)
        finally:
            for region in regions:
                self._receiver.scattered(region, outcome)

    async def _scattered(
        self,
        executor: StepExecutor,
        target: Target,
        transfer_id: str,
        parts: Sequence[WrittenPart],
        pieces: ScatteredPieces,
        begun: asyncio.Future[StepHandle[tuple[Failure, float]]] | None,
    ) -> Failure:
        """Outcome of the scatter, once it is over."""
        num_bytes, began = sum(part.num_bytes for part in parts), self._clock()
        if begun is None:
            outcome = await self._done(lambda: scatter(executor, target, parts))
            self._figures.passed("scatter", num_bytes, self._clock() - began)
            return outcome
        handle = await begun
        await self._scatters.until(handle.event)
        outcome, seconds = await self._started(handle.result)
        # Pieces that were copied ahead took the device's time alone.
        ahead_s = sum(copied.seconds() for copied in pieces.copies) if outcome is Failure.NONE else 0.0
        self._figures.passed("scatter_on_device", num_bytes, seconds)
        self._figures.passed("scatter", num_bytes, self._clock() - began + ahead_s)
        trace("kv_scattered", transfer_id, device_ms=round(1e3 * seconds, 3))
        return outcome

    def _handed_over(self, regions: Sequence[Region]) -> None:
        """Counts what moved behind the prefill, as far as its writers have said."""
        starts = [region.gather_start for region in regions if region.gather_start is not None]
        if not starts:
            return
        num_bytes = sum(start.num_bytes for start in starts)
        seconds = self._clock() - min(start.began_s for start in starts)
        self.num_bytes += num_bytes
        self.seconds += seconds
        self._figures.passed("hand_over", num_bytes, seconds)
        trace("kv_handed_over", regions[0].key.transfer_id, bytes=num_bytes, ms=round(1e3 * seconds, 3))

    def _written_parts(self, regions: Sequence[Region], epoch: int, read: set[Region]) -> list[WrittenPart]:
        """Begins to read them, or none of them. read: those that this commit reads already. Raises TRANSFER_FAILED."""
        for region in regions:
            is_written = region.reception.state is ReceiveState.WRITTEN
            is_free = region.reception.is_read == (region in read)
            if region.memory is None or region.key.epoch != epoch or not is_written or not is_free:
                name = region.reception.state.name.lower()
                message = f"the transfer is {name}, not written: prefill again"
                raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message, {"state": name})
        parts = []
        for region in regions:
            is_begun = region.reception.begin_scatter(has_pieces=region in read)
            memory = region.written
            assert is_begun and memory is not None, region.reception.state
            parts.append(WrittenPart(memory, region.key.stamp(), region.part))
        return parts

    async def _done(self, job: Callable[[], T]) -> T:
        """Runs a job on the step thread when the steps before it are over."""
        results: list[T] = []
        await self._run(lambda: results.append(job()))
        return results[0]

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        # The call may have been answered, or cancelled: nobody else asks.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("kv_scatter_failed", error=repr(error))

    def _started(self, job: Callable[[], T]) -> asyncio.Future[T]:
        assert self._start is not None, "a runner with a device has a step thread"
        return self._start(job)


def _is_on_its_way(region: Region) -> bool:
    return region.is_ending and region.reception.state is ReceiveState.WRITING


def _failure_of(regions: Sequence[Region]) -> Failure:
    """The first one's that has failed."""
    return next((region.reception.failure for region in regions if region.reception.failure), Failure.NONE)
