"""KV that prefills elsewhere will send: the decode side of transfers. Pure: time is an argument, calls are elsewhere.

RESERVING --all ranks have a region--> RESERVED --all is written--> COMMITTING --validated--> ARRIVED
    |                                     |                             |
    +-------------------------------------+-----------------------------+--> FAILED

What has arrived is in the prefix cache, like anything else there, and locked until the request that it is for has taken
it. A request waits for its transfer alone until that is over or takes too long; then it is admitted as any other, and
computes what the cache does not have. Nothing of a transfer outlives the epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace
from radixmesh.daemons.scheduler.pages.integrity import quarantine
from radixmesh.daemons.scheduler.planning.admission.rank_placement import arrival_ranks
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.transfers.kv_parts import RankPart

MAX_ARRIVALS = 1024
"""Transfers that one scheduler waits for at a time."""
MAX_LEASE_S = 60.0
PROGRESS_LEASE_S = 15.0
"""Nobody renews the lease of what is on its way: its own progress does."""


class ArrivalState(Enum):
    RESERVING = "reserving"
    RESERVED = "reserved"
    COMMITTING = "committing"
    ARRIVED = "arrived"
    FAILED = "failed"


_OVER = (ArrivalState.ARRIVED, ArrivalState.FAILED)


@dataclass(slots=True, eq=False, kw_only=True)
class Arrival:
    """One transfer. ids: tokens up to the last one that comes, int32; [0, first_token) are cached here, and locked, on
    the data-parallel rank `rank`, to which the rest comes.

    heard_at: when it last made progress. pages: what the KV is being scattered into.
    """

    transfer_id: str
    ids: IntArray
    rank: int = 0
    first_token: int
    cache_name: str
    namespace: Namespace
    lease_until: float
    heard_at: float
    held: Match
    writers: tuple[KvShare, ...] = ()
    """KV heads of the sending group's ranks; none: as ours."""
    parts: tuple[RankPart, ...] = ()
    """By which the workers know it, once it is being prepared."""
    state: ArrivalState = ArrivalState.RESERVING
    pages: IntArray = field(default_factory=empty_ints)
    sequences: list[Sequence] = field(default_factory=list)
    """Requests that wait for it: outputs of one request share its KV."""
    expected: list[Sequence] = field(default_factory=list)
    """Requests that named it, whether they have come to wait or not. A later attempt takes an earlier one's place."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) - self.first_token

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


class KvArrivals:
    """Of one planner. patience_s: a request waits so long for a transfer that makes no progress."""

    def __init__(self, queue: WaitingQueue, *, patience_s: float) -> None:
        self._queue = queue
        self._patience_s = patience_s
        self._arrivals: dict[str, Arrival] = {}
        self._wanted: list[Arrival] = []
        self._failed: list[Arrival] = []
        self._now = 0.0
        self.num_arrived = self.num_failed = self.num_tokens = 0

    def __contains__(self, transfer_id: str) -> bool:
        """True until the transfer is over and taken."""
        return transfer_id in self._arrivals

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin_epoch(self) -> None:
        """Locks and pages of the epoch before are void; who waited is back in the queue."""
        self.num_failed += sum(not arrival.is_over for arrival in self._arrivals.values())
        self._arrivals.clear()
        self._wanted.clear()
        self._failed.clear()

    def reserve(
        self,
        state: EpochState,
        transfer_id: str,
        ids: IntArray,
        cache_name: str,
        lease_s: float,
        granule: int,
        now: float,
        writers: tuple[KvShare, ...] = (),
    ) -> Arrival | None:
        """A new transfer of what the cache lacks of a prompt; None: it lacks nothing that is worth one.

        writers: KV heads of the sending group's ranks; none: as ours.

        granule: the prefill side has tokens up to a multiple of it. Raises INVALID_ARGUMENT, OVERLOADED, NEVER_FITS.
        """
        if transfer_id in self._arrivals:
            message = f"the transfer {transfer_id!r} is reserved already: choose another id"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "transfer_id"})
        if len(self._arrivals) >= MAX_ARRIVALS:
            message = f"{MAX_ARRIVALS} transfers are on their way here: prefill where the request decodes"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        page_size = state.group.page_size
        end = len(ids) // granule * granule // page_size * page_size
        matches = [pages.cache.match(pages.namespace_named(cache_name), ids[:end]) for pages in state.ranks]
        if any(len(match.pages) * page_size >= end for match in matches):
            return None
        order = [0]
        if len(matches) > 1:
            arriving = Counter(arrival.rank for arrival in self._arrivals.values())
            order = arrival_ranks(state, len(ids), [len(match.pages) * page_size for match in matches], arriving)
        wanted = [end // page_size - len(match.pages) for match in matches]
        rank = next((rank for rank in order if wanted[rank] <= state.ranks[rank].num_available), None)
        if rank is None:
            most = max(pages.num_available for pages in state.ranks)
            message = f"{min(wanted)} pages are wanted, {most} could be had: retry elsewhere, or later"
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "100"})
        pages, match = state.ranks[rank], matches[rank]
        pages.cache.lock(match)
        arrival = Arrival(
            transfer_id=transfer_id,
            ids=ids[:end].copy(),
            rank=rank,
            first_token=len(match.pages) * page_size,
            cache_name=cache_name,
            namespace=pages.namespace_named(cache_name),
            lease_until=now + min(lease_s, MAX_LEASE_S),
            heard_at=now,
            held=match,
            writers=writers,
        )
        self._arrivals[transfer_id] = arrival
        self._wanted.append(arrival)
        return arrival

    def renew(self, transfer_id: str, lease_s: float, now: float) -> None:
        """The lease only ever grows. Unknown ids are fine."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is not None:
            arrival.lease_until = max(arrival.lease_until, now + min(lease_s, MAX_LEASE_S))
            arrival.heard_at = now  # The router says so while the prefill lives.

    def cancel(self, state: EpochState, transfer_id: str) -> None:
        """Nothing will come. Unknown ids are fine."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is not None:
            self.failed(state, arrival)

    def take_wanted(self) -> list[Arrival]:
        """Transfers to be prepared with the workers; each is told once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_failed(self) -> list[Arrival]:
        """Transfers that failed here, which the workers are to end; each is told once."""
        failed, self._failed = self._failed, []
        return failed

    def live(self) -> list[Arrival]:
        """Transfers whose leases the workers are to renew."""
        return [arrival for arrival in self._arrivals.values() if not arrival.is_over]

    def expect(self, sequence: Sequence) -> None:
        """A request that names a transfer is in the queue: it is not left while that lives."""
        arrival = self._arrivals.get(sequence.submission.transfer_id)
        if arrival is not None:
            arrival.expected = [s for s in arrival.expected if s.lifecycle is Lifecycle.WAITING]
            arrival.expected.append(sequence)

    def may_pass(self, sequence: Sequence) -> bool:
        """True for a request that waits for no transfer (any more). Any other is parked."""
        arrival = self._arrivals.get(sequence.submission.transfer_id)
        if arrival is None or arrival.is_over:
            return True
        if not arrival.sequences:
            arrival.heard_at = self._now  # Their patience begins.
        if sequence not in arrival.sequences:
            arrival.sequences.append(sequence)
        self._queue.park(sequence)
        return False

    def progressed(self, arrival: Arrival, now: float) -> None:
        """Something was written. Each byte counts once: what keeps on coming may take as long as it takes."""
        arrival.heard_at = now
        arrival.lease_until = max(arrival.lease_until, now + PROGRESS_LEASE_S)

    def prepared(self, arrival: Arrival) -> bool:
        """All ranks have a region; False: nobody wants it any more."""
        if arrival.state is ArrivalState.RESERVING:
            arrival.state = ArrivalState.RESERVED
        return arrival.state is ArrivalState.RESERVED

    def has_room(self, state: EpochState, arrival: Arrival) -> bool:
        """False while what is written waits for pages, as its request would: until it takes too long."""
        num = arrival.num_tokens // state.group.page_size
        return arrival.state is not ArrivalState.RESERVED or num <= state.ranks[arrival.rank].num_available

    def written(self, state: EpochState, arrival: Arrival) -> bool:
        """All is written: pages are taken for it. False: there are none, or nobody wants it any more."""
        if arrival.state is not ArrivalState.RESERVED:
            return False
        num, pages = arrival.num_tokens // state.group.page_size, state.ranks[arrival.rank]
        if num > pages.num_available:
            self.failed(state, arrival)
            return False
        arrival.state = ArrivalState.COMMITTING
        arrival.pages = pages.begin_load(num)
        return True

    def committed(
        self,
        state: EpochState,
        arrival: Arrival,
        *,
        is_valid: bool,
        are_pages_sound: bool = True,
        was_granted: bool = True,
    ) -> None:
        """The workers have scattered it, or not. was_granted: they have counted the grant of the pages.
        are_pages_sound: each of them, or none."""
        assert arrival.state is ArrivalState.COMMITTING, arrival.state
        if not self._is_known(arrival):
            return
        pages = state.ranks[arrival.rank]
        if is_valid:
            for sequence in arrival.expected:
                state.recent.admitted(sequence, arrival.rank)
            arrival.held = pages.end_load(arrival.held, arrival.namespace, arrival.ids, arrival.pages)
            arrival.state = ArrivalState.ARRIVED
            self.num_arrived += 1
            self.num_tokens += arrival.num_tokens
            self._unpark(arrival)
            return
        if are_pages_sound:
            pages.drop_load(arrival.pages, was_granted=was_granted)
        else:
            # Granted here and perhaps not there: nobody counts on them until the next epoch has read the generations.
            quarantine(pages.pool, arrival.pages)
        arrival.state = ArrivalState.RESERVED
        self.failed(state, arrival)

    def failed(self, state: EpochState, arrival: Arrival) -> None:
        """Its request, if there is one, computes the prompt. A commit that runs is waited for."""
        if arrival.is_over or arrival.state is ArrivalState.COMMITTING or not self._is_known(arrival):
            return
        arrival.state = ArrivalState.FAILED
        self.num_failed += 1
        self._failed.append(arrival)
        self._unpark(arrival)
        self._drop(state, arrival)

    def give_up(self, state: EpochState) -> None:
        """A flush is wanted: admission waits for it, and it for the locks of transfers. Commits that run are waited
        for; the requests compute their prompts."""
        for arrival in tuple(self._arrivals.values()):
            if arrival.state is ArrivalState.ARRIVED:
                self._drop(state, arrival)
            else:
                self.failed(state, arrival)

    def pass_time(self, state: EpochState, now: float) -> None:
        """Ends what takes too long, and lets go of what its request has taken. Call before each plan."""
        self._now = now
        for arrival in tuple(self._arrivals.values()):
            waiting = [s for s in arrival.sequences if s.lifecycle is Lifecycle.WAITING]
            is_left = bool(arrival.sequences) and not waiting
            is_left &= all(s.lifecycle is not Lifecycle.WAITING for s in arrival.expected)
            if arrival.state is ArrivalState.ARRIVED:
                # Admitted, their slots hold the lock; those that have not come in its lease will not.
                if is_left or now >= arrival.lease_until:
                    self._drop(state, arrival)
            elif arrival.state is not ArrivalState.COMMITTING:
                is_late = bool(waiting) and now - arrival.heard_at >= self._patience_s
                if is_late or is_left or now >= arrival.lease_until:
                    self.failed(state, arrival)

    def _is_known(self, arrival: Arrival) -> bool:
        """False for one of an epoch before, whose calls have just been cut off."""
        return self._arrivals.get(arrival.transfer_id) is arrival

    def _unpark(self, arrival: Arrival) -> None:
        for sequence in arrival.sequences:
            self._queue.unpark(sequence)

    def _drop(self, state: EpochState, arrival: Arrival) -> None:
        state.ranks[arrival.rank].cache.unlock(arrival.held)
        del self._arrivals[arrival.transfer_id]
