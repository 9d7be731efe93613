"""Calls to the workers for transfers, of one epoch: both sides' requests go on while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.group_stream import GroupStream, together
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.messages import kv_share_of
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.transfers.arrival import Arrival, ArrivalFailure
from radixmesh.daemons.scheduler.transfers.handovers import Handover
from radixmesh.daemons.scheduler.transfers.kv_parts import RankPart, rank_parts
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget, digest_of
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

_T = TypeVar("_T")

# Workers forget what nobody renews: a scheduler that lives does so every second, for all its transfers in one call.
_LEASE_MS = 10_000
_RENEW_S = 1.0
_TIMEOUT_S = 20.0
# A chunk is asked for with the plan that computes it, and waits for that step.
_GATHER_S = 60.0
_ROOM_POLL_S = 0.01
_VALID = (worker_pb2.TRANSFER_STATE_VALIDATED, worker_pb2.TRANSFER_STATE_SCATTERING)

Answer = Callable[[str, KvTarget | None, MeshError | None], None]
"""Tells a router of its reservation: transfer id, target, or why there is none."""


class TransferCalls:
    """changed: called when requests were unparked. addresses: of the workers by rank. clock: monotonic seconds."""

    def __init__(
        self,
        planner: Planner,
        stream: GroupStream,
        addresses: Callable[[], Sequence[str]],
        answers: dict[str, Answer],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._stream = stream
        self._addresses = addresses
        self._answers = answers
        self._changed = changed
        self._clock = clock
        self._tasks: set[asyncio.Task[object]] = set()
        self._sending: dict[str, asyncio.Task[bool]] = {}
        self._renewing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins what the planner wants. Call whenever something happened."""
        state = self._planner.state
        if state is None:
            return
        for arrival in self._planner.arrivals.take_wanted(state):
            self._spawn(self._receive(state, arrival))
            if self._renewing is None or self._renewing.done():
                self._renewing = self._spawn(self._renew())
        for arrival in self._planner.arrivals.take_failed():
            is_needed = arrival.failure != ArrivalFailure.CACHED
            self._tell(arrival.transfer_id, None, _not_kept() if is_needed else None)
            self._spawn(self.abort_arrival(arrival))
        handovers = self._planner.handovers
        given_up = handovers.take_given_up()
        for handover in handovers.take_wanted():
            before = self._sending.get(handover.target.transfer_id)
            sending = self._sending[handover.target.transfer_id] = self._spawn(self._send(handover, before))
            sending.add_done_callback(partial(self._sent, handover.target.transfer_id))
        for target in given_up:
            self._spawn(self._abort_sent(target, self._sending.get(target.transfer_id)))

    def cancel(self) -> None:
        """The epoch is over, and with it all of its transfers."""
        for task in tuple(self._tasks):
            task.cancel()
        for transfer_id in tuple(self._answers):
            self._tell(transfer_id, None, _not_kept())

    def _spawn(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, transfer_id: str, target: KvTarget | None, error: MeshError | None) -> None:
        answer = self._answers.pop(transfer_id, None)
        if answer is not None:
            answer(transfer_id, target, error)

    async def _receive(self, state: EpochState, arrival: Arrival) -> None:
        arrivals, ranks = self._planner.arrivals, self._stream.workers_of(arrival.rank)
        written: asyncio.Task[list[None]] | None = None
        try:
            shares = [kv_share_of(rank.transfer_kv) for rank in ranks]
            arrival.parts = parts = rank_parts(arrival.transfer_id, shares, arrival.writers)
            async with asyncio.timeout(_TIMEOUT_S):
                regions = await self._regions(ranks, arrival, parts)
            if regions is None:
                arrivals.refused(state, arrival)
                return
            if not arrivals.prepared(arrival):
                # Given up meanwhile: that abort may have come before the region.
                await self.abort_arrival(arrival)
                return
            self._changed()  # Others may have their turn.
            began = self._clock()
            arrivals.seconds["queue"] += began - arrival.since
            addresses = self._addresses()[self._number_of(arrival.rank, 0) :]
            target = KvTarget(
                transfer_id=arrival.transfer_id,
                regions=tuple(region.SerializeToString() for region in regions),
                addresses=tuple(addresses[part.receiver] for part in parts),
                first_token=arrival.first_token,
                num_tokens=arrival.num_tokens,
                tokens_digest=digest_of(arrival.cache_name, arrival.ids),
            )
            log.debug("kv_reserved", transfer=arrival.transfer_id)
            self._tell(arrival.transfer_id, target, None)
            writing = _Writing(len(parts))
            written = self._spawn(
                together([self._written(ranks[part.receiver], arrival, part, writing) for part in parts])
            )
            await asyncio.wait((written, ending := self._spawn(writing.wait())), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            arrivals.seconds["prefill"] += self._clock() - began
            # Of several ranks one might scatter, and another have lost its writer.
            is_early = len(ranks) == 1 and not written.done() and arrivals.has_room(state, arrival)
            if is_early and arrivals.written(state, arrival, is_awaited=True):
                log.debug("kv_arrival_ending", transfer=arrival.transfer_id)
                await self._commit(state, arrival, written)
                return
            await written
            log.debug("kv_arrival_written", transfer=arrival.transfer_id)
            # Pages come free with steps, of which nobody tells.
            while not arrivals.has_room(state, arrival):
                arrivals.waits_for_pages(arrival)
                await asyncio.sleep(_ROOM_POLL_S)
            if arrivals.written(state, arrival):
                await self._commit(state, arrival)
        except (MeshError, TimeoutError) as error:
            log.info("kv_did_not_arrive", transfer=arrival.transfer_id, error=str(error) or "timeout")
            if isinstance(error, MeshError):
                self._tell(arrival.transfer_id, None, error)
            arrivals.failed(state, arrival, _reason_of(error))
        finally:
            if written is not None:
                _dismiss(written)
            self._changed()

    async def _regions(
        self, ranks: Sequence[WorkerStream], arrival: Arrival, parts: Sequence[RankPart]
    ) -> list[worker_pb2.PrepareTransferResponse] | None:
        """Of all parts; None: not all of them have staging memory now. Raises MeshError."""
        try:
            return await together([self.prepare(ranks[part.receiver], arrival, part) for part in parts])
        except MeshError as error:
            if error.reason != ErrorReason.ERROR_REASON_OVERLOADED:
                raise
        if len(parts) > 1:
            # The same ids are prepared again: nothing of them may be left.
            await self.abort_arrival(arrival)
        return None

    async def prepare(self, rank: WorkerStream, arrival: Arrival, part: RankPart) -> worker_pb2.PrepareTransferResponse:
        request = worker_pb2.PrepareTransferRequest(
            transfer_id=part.transfer_id,
            epoch=rank.epoch,
            instance_id=rank.instance_id,
            num_tokens=arrival.num_tokens,
            first_token=arrival.first_token,
            lease_ms=_LEASE_MS,
            kv=part.kv(rank.transfer_kv),
        )
        prepared = await rank.transport.prepare_transfer(request)
        prepared.writer_rank = part.writer
        return prepared

    async def _written(self, rank: WorkerStream, arrival: Arrival, part: RankPart, writing: _Writing) -> None:
        """Returns when a rank has all of a part. writing: told when its last chunk is under way."""
        is_ending = False
        async for answer in rank.transport.watch_transfer(
            worker_pb2.WatchTransferRequest(transfer_id=part.transfer_id)
        ):
            self._planner.arrivals.progressed(arrival, self._clock())
            if answer.state == worker_pb2.TRANSFER_STATE_WRITTEN:
                return
            if answer.is_ending and not is_ending:
                is_ending = True
                writing.ends()
            if answer.failure:
                name = _name_of(answer.failure)
                raise _failed(f"the transfer failed: {name}", f"worker_{name}")
        raise _failed("the worker stopped watching the transfer")

    async def _commit(self, state: EpochState, arrival: Arrival, written: asyncio.Task[object] | None = None) -> None:
        """written: the end of a writer that the workers wait for; None: it has ended."""
        is_valid = are_pages_sound = False
        was_granted, failure, began = True, str(ArrivalFailure.COMMIT), self._clock()
        try:
            ranks = enumerate(self._stream.workers_of(arrival.rank))
            committing = self._spawn(together([_committed(rank, state, arrival, number) for number, rank in ranks]))
            if written is not None:
                # Whatever it ended with, the workers know, and answer.
                await asyncio.wait((written, committing), return_when=asyncio.FIRST_COMPLETED)
                arrival.is_awaited = False
            async with asyncio.timeout(_TIMEOUT_S):
                answers = await committing
            told = [a.failure for a in answers if a is not None and a.failure]
            failure = f"worker_{_name_of(told[0])}" if told else failure
            is_valid = all(a is not None and a.state in _VALID for a in answers)
            was_granted = any(a is not None for a in answers)
            # The transfer was given up, or was not what was sent: the pages are granted, and hold nothing.
            is_same = all(a is not None and a.failure != worker_pb2.TRANSFER_FAILURE_PAGES for a in answers)
            are_pages_sound = is_valid or is_same or not was_granted
        finally:
            log.debug("kv_committed", transfer=arrival.transfer_id, is_valid=is_valid)
            self._planner.arrivals.seconds["commit"] += self._clock() - began
            self._planner.arrivals.committed(
                state,
                arrival,
                is_valid=is_valid,
                are_pages_sound=are_pages_sound,
                was_granted=was_granted,
                failure=failure,
            )

    async def _renew(self) -> None:
        while live := self._planner.arrivals.live():
            parts = [(self._number_of(arrival.rank, part.receiver), part) for arrival in live for part in arrival.parts]
            try:
                await together(
                    [
                        rank.transport.renew_transfers(
                            worker_pb2.RenewTransfersRequest(
                                epoch=rank.epoch,
                                instance_id=rank.instance_id,
                                transfer_ids=[part.transfer_id for receiver, part in parts if receiver == number],
                                lease_ms=_LEASE_MS,
                            )
                        )
                        for number, rank in enumerate(self._stream.rank_streams)
                    ]
                )
            except MeshError as error:
                log.info("leases_not_renewed", error=str(error))
            await asyncio.sleep(_RENEW_S)

    @property
    def _tp_size(self) -> int:
        return self._stream.tp_size

    @property
    def _num_workers(self) -> int:
        return len(self._stream.rank_streams)

    def _number_of(self, rank: int, worker: int) -> int:
        """Among all workers, of one of a data-parallel rank."""
        return rank * self._tp_size + worker

    async def abort_arrival(self, arrival: Arrival) -> None:
        parts = arrival.parts
        await self._abort([(self._number_of(arrival.rank, part.receiver), part.transfer_id) for part in parts])

    async def _abort_sent(self, target: KvTarget, behind: asyncio.Task[bool] | None = None) -> None:
        """behind: a chunk that is on its way to the workers: ahead of it the abort would find nothing."""
        if behind is not None:
            await asyncio.wait((behind,))
        try:
            parts = _target_parts(target)
        except MeshError:
            return  # Nothing of it was ever begun.
        # On whichever data-parallel rank it was begun: the others do not know it.
        writers = [(writer, part) for part in parts for writer in range(part.writer, self._num_workers, self._tp_size)]
        await self._abort([(writer, part.region.transfer_id) for writer, part in writers])

    async def _abort(self, transfers: list[tuple[int, str]]) -> None:
        """By rank and id."""
        ranks = self._stream.rank_streams
        aborts = [
            ranks[rank].transport.abort_transfer(worker_pb2.AbortTransferRequest(transfer_id=transfer_id))
            for rank, transfer_id in transfers
            if rank < len(ranks)
        ]
        try:
            await together(aborts)
        except MeshError as error:
            log.info("transfers_not_aborted", transfers=[name for _, name in transfers], error=str(error))

    def _sent(self, transfer_id: str, task: asyncio.Task[bool]) -> None:
        if self._sending.get(transfer_id) is task:
            del self._sending[transfer_id]

    async def _send(self, handover: Handover, before: asyncio.Task[bool] | None) -> bool:
        """before: the chunk ahead of this one, which is gathered first. False: it was not sent."""
        target, ranks = handover.target, self._stream.workers_of(handover.rank)
        log.debug("kv_handover", transfer=target.transfer_id, first_token=handover.first_token)
        try:
            if before is not None and not await before:
                raise _failed("a chunk ahead of it was not sent")
            parts = _target_parts(target)
            if max(part.writer for part in parts) >= len(ranks):
                raise _failed(f"KV is wanted of more ranks than there are, {len(ranks)}: restart the router")
            async with asyncio.timeout(_GATHER_S):
                # An older worker would find no KV in pages that are being computed.
                while not all(rank.sends_behind_steps for rank in ranks) and _is_in_flight(handover):  # noqa: ASYNC110
                    await asyncio.sleep(_ROOM_POLL_S)
                await together(
                    [
                        ranks[part.writer].transport.start_transfer(start_of(ranks[part.writer], handover, part))
                        for part in parts
                    ]
                )
        except (MeshError, TimeoutError, ValueError) as error:
            log.info("kv_not_sent", transfer=target.transfer_id, error=str(error) or "timeout")
            if handover.first_token != target.first_token:
                await self._abort_sent(target)
            return False
        finally:
            self._planner.handovers.released(handover, self._planner.state)
            self._changed()
        return True


def _is_in_flight(handover: Handover) -> bool:
    """True if the result of the step that computes it has not come."""
    oldest = handover.state.in_flight.oldest
    return oldest is not None and oldest.plan.step_id <= handover.after_step


def _dismiss(task: asyncio.Task[list[None]]) -> None:
    """Nobody asks how it ends."""
    task.cancel()
    task.add_done_callback(lambda task: task.cancelled() or task.exception())


class _Writing:
    """Parts of a transfer whose last chunk is not under way yet."""

    def __init__(self, num_parts: int) -> None:
        self._num_left = num_parts
        self._are_ending = asyncio.Event()

    def ends(self) -> None:
        """That of one more part is."""
        self._num_left -= 1
        if not self._num_left:
            self._are_ending.set()

    async def wait(self) -> None:
        """Returns when those of all parts are."""
        await self._are_ending.wait()


async def _committed(
    rank: WorkerStream, state: EpochState, arrival: Arrival, number: int
) -> worker_pb2.CommitTransferResponse | None:
    """None: the worker has not touched the pages, since the transfer was over before (its lease ran out)."""
    assert arrival.held is not None
    held = arrival.held.pages
    transfer_id, *others = (part.transfer_id for part in arrival.parts if part.receiver == number)
    request = worker_pb2.CommitTransferRequest(
        transfer_id=transfer_id,
        other_transfer_ids=others,
        epoch=rank.epoch,
        instance_id=rank.instance_id,
        # Slots that were freed are released by the next plan, and what was evicted is saved by it.
        after_step=state.last_step_id + bool(state.releases or any(host.has_saves for host in state.hosts)),
        pages=pack_ints(arrival.pages),
        generations=pack_ints(state.ranks[arrival.rank].pool.generations[arrival.pages]),
        previous_page=int(held[-1]) if len(held) else -1,
        ids=pack_ints(arrival.ids[arrival.first_token :]),
        cache_namespace=arrival.cache_name,
        # A plan that names the pages runs behind the scatter, and none of its tokens leaves ahead of the checks.
        takes_scattering=True,
        takes_pieces=True,
    )
    try:
        return await rank.transport.commit_transfer(request)
    except MeshError as error:
        if error.reason != ErrorReason.ERROR_REASON_TRANSFER_FAILED:
            raise
        log.info("kv_not_committed", transfer=arrival.transfer_id, error=str(error))
        return None


class _TargetPart(NamedTuple):
    """A region of a target, and the rank of this group that writes it."""

    writer: int
    region: worker_pb2.TransferRegion
    address: str


def _target_parts(target: KvTarget) -> list[_TargetPart]:
    """Raises TRANSFER_FAILED for bytes that are no region. Of an older scheduler, rank i writes to rank i."""
    parts = []
    for number, (region, address) in enumerate(zip(target.regions, target.addresses, strict=True)):
        try:
            prepared = worker_pb2.PrepareTransferResponse.FromString(region)
        except Exception as error:
            raise _failed("a region of the target cannot be read: check the versions of both ends") from error
        writer = prepared.writer_rank if prepared.HasField("writer_rank") else number
        parts.append(_TargetPart(writer, prepared.region, address))
    return parts


def start_of(rank: WorkerStream, handover: Handover, part: _TargetPart) -> worker_pb2.StartTransferRequest:
    """Asks a rank for its part of a chunk."""
    return worker_pb2.StartTransferRequest(
        transfer_id=part.region.transfer_id,
        epoch=rank.epoch,
        instance_id=rank.instance_id,
        source_pages=pack_ints(handover.pages),
        source_generations=pack_ints(handover.generations),
        num_tokens=handover.num_tokens,
        first_token=handover.first_token,
        region=part.region,
        address=part.address,
        is_last=handover.is_last,
        after_step=handover.after_step,
    )


def _failed(message: str, failure: str = "") -> MeshError:
    details = {"failure": failure} if failure else {}
    return MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message, details)


def _reason_of(error: MeshError | TimeoutError) -> str:
    """As metrics name it."""
    if not isinstance(error, MeshError):
        return ArrivalFailure.TIMEOUT
    told = error.metadata.get("failure", "")
    return told if told.startswith("worker_") else ArrivalFailure.REFUSED


def _name_of(failure: worker_pb2.TransferFailure) -> str:
    return worker_pb2.TransferFailure.Name(failure).removeprefix("TRANSFER_FAILURE_").lower()


def _not_kept() -> MeshError:
    return _failed("the reservation could not be kept: prefill where the request decodes")
