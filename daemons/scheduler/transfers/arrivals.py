"""KV that prefills elsewhere will send: the decode side of transfers. Pure: time is an argument, calls are elsewhere.

QUEUED --room--> RESERVING --all ranks have a region--> RESERVED --all is written, or soon--> COMMITTING --> ARRIVED
   ^                 |                                     |                                     |  validated
   +--staging full---+                                     |                                     |
   |                 |                                     |                                     |
   +-----------------+-------------------------------------+-------------------------------------+--> FAILED

A reservation waits until there are pages for it beside all that is on its way, a slot soon, and staging memory: it is
answered then, and no prefill begins before. Those that wait have their turns in the order in which they came.

What has arrived is in the prefix cache, like anything else there, and locked until the request that it is for has taken
it. A request waits for its transfer alone until that is over or takes too long; then it is admitted as any other, and
computes what the cache does not have. With the KV comes a first token, by another way: the router brings it with an
attempt of its own, for which the attempt that waits is held back a little longer. Admitted ahead of it, that would run
for nothing, and steps that are queued for it would run first. Nothing of a transfer outlives the epoch.
"""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.cache.prefix_cache import Match
from radixmesh.daemons.scheduler.pages.integrity import quarantine
from radixmesh.daemons.scheduler.planning.admission.rank_placement import arrival_ranks
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.transfers.arrival import Arrival, ArrivalFailure, ArrivalRoom, ArrivalState

log = get_logger(__name__)

MAX_ARRIVALS = 1024
"""Transfers that one scheduler waits for at a time, those without room among them."""
MAX_LEASE_S = 60.0
PROGRESS_LEASE_S = 15.0
"""Nobody renews the lease of what is on its way: its own progress does."""
# The step that computed the last of the KV has sampled the first token: it comes some milliseconds behind.
_FIRST_TOKEN_S = 0.25
# Staging was full: who has the first turn asks again when a transfer is over, or after so long.
_ASK_AGAIN_S = 0.05
# Nothing runs, and a request that has its KV is not admitted: the pages that it keeps are what others wait for.
_STUCK_S = 1.0
_UNDER_WAY = (ArrivalState.RESERVING, ArrivalState.RESERVED, ArrivalState.COMMITTING)


class KvArrivals:
    """Of one planner. patience_s: a request waits so long for a transfer that makes no progress, and queue_s for one
    that has no room."""

    def __init__(self, queue: WaitingQueue, room: ArrivalRoom, *, patience_s: float, queue_s: float = 30.0) -> None:
        self._queue = queue
        self.room = room
        self._patience_s = patience_s
        self._queue_s = queue_s
        self._arrivals: dict[str, Arrival] = {}
        self._queued: list[Arrival] = []
        """Without room, in order."""
        self._failed: list[Arrival] = []
        self._is_staging_full = False
        """The workers refused one of them: they ask one after the other now, from `_ask_at` on."""
        self._ask_at = 0.0
        self._now = 0.0
        self._num_reserved = 0
        self.num_arrived = self.num_tokens = 0
        self.failures: Counter[str] = Counter()
        """Transfers that were reserved and brought nothing, by reason."""
        self.seconds = {"queue": 0.0, "prefill": 0.0, "commit": 0.0}
        """Of all transfers together, by stage: queue (for room), prefill (until all is written, or soon), commit."""

    @property
    def num_failed(self) -> int:
        """Of transfers that were wanted."""
        return self.failures.total() - self.failures[ArrivalFailure.CACHED]

    @property
    def num_queued(self) -> int:
        """Reservations without room."""
        return len(self._queued)

    def __contains__(self, transfer_id: str) -> bool:
        """True until the transfer is over and taken."""
        return transfer_id in self._arrivals

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin_epoch(self) -> None:
        """Locks and pages of the epoch before are void; who waited is back in the queue."""
        self.failures[ArrivalFailure.EPOCH] += len(self.live())
        self._arrivals.clear()
        self._queued.clear()
        self._failed.clear()
        self._is_staging_full = False

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
        namespaces = [pages.namespace_named(cache_name) for pages in state.ranks]
        cached = [pages.cache.probe(of, ids[:end]).num_pages for pages, of in zip(state.ranks, namespaces, strict=True)]
        if any(num * page_size >= end for num in cached):
            return None
        most = max(pages.pool.num_pages - pages.pool.num_quarantined for pages in state.ranks)
        if end // page_size > most:
            message = f"{end // page_size} pages are wanted, there are {most}: retry elsewhere"
            raise MeshError(ErrorReason.ERROR_REASON_NEVER_FITS, message, {"max": str(most)})
        self._num_reserved += 1
        arrival = Arrival(
            transfer_id=transfer_id,
            number=self._num_reserved,
            ids=ids[:end].copy(),
            cache_name=cache_name,
            namespace=namespaces[0],
            since=now,
            lease_until=now + min(lease_s, MAX_LEASE_S),
            heard_at=now,
            writers=writers,
        )
        self._now = now
        self._arrivals[transfer_id] = arrival
        self._queued.append(arrival)
        log.debug("kv_reservation_came", transfer=transfer_id)
        return arrival

    def renew(self, transfer_id: str, lease_s: float, now: float) -> None:
        """The lease only ever grows. Unknown ids are fine."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is not None:
            arrival.lease_until = max(arrival.lease_until, now + min(lease_s, MAX_LEASE_S))
            arrival.heard_at = now  # The router says so while the prefill lives.

    def cancel(self, state: EpochState, transfer_id: str) -> None:
        """Nothing will come, nor a first token behind it. Unknown ids are fine."""
        arrival = self._arrivals.get(transfer_id)
        if arrival is not None:
            self._first_token_over(arrival)
            self.failed(state, arrival, ArrivalFailure.CANCELLED)

    def take_wanted(self, state: EpochState) -> list[Arrival]:
        """Transfers that there is room for now, to be prepared with the workers; each is told once, and again once it
        was refused()."""
        wanted: list[Arrival] = []
        self._is_staging_full &= bool(self._queued)
        while self._queued and not (self._is_staging_full and (wanted or not self._may_ask())):
            arrival = self._queued[0]
            if not self._begin(state, arrival):
                break
            if arrival.state is ArrivalState.RESERVING:
                wanted.append(arrival)
        return wanted

    def refused(self, state: EpochState, arrival: Arrival) -> None:
        """The workers have no staging memory for it now: it waits for its turn again."""
        if arrival.state is not ArrivalState.RESERVING or not self._is_known(arrival):
            return
        self._let_go(state, arrival)
        arrival.state, arrival.parts = ArrivalState.QUEUED, ()
        self._queued.append(arrival)
        self._queued.sort(key=attrgetter("number"))
        self._is_staging_full, self._ask_at = True, self._now + _ASK_AGAIN_S

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
            log.debug("kv_request_came", transfer=arrival.transfer_id, attempt=sequence.submission.attempt)

    def may_pass(self, sequence: Sequence) -> bool:
        """True for a request that waits for no transfer (any more). Any other is parked."""
        arrival = self._arrivals.get(sequence.submission.transfer_id)
        if arrival is None or (arrival.is_over and not _awaits_first_token(arrival, sequence)):
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
            self._ask_at = self._now
        return arrival.state is ArrivalState.RESERVED

    def has_room(self, state: EpochState, arrival: Arrival) -> bool:
        """False while what is written waits for pages, as its request would: until it takes too long."""
        num = arrival.num_tokens // state.group.page_size
        return arrival.state is not ArrivalState.RESERVED or num <= state.ranks[arrival.rank].num_available

    def waits_for_pages(self, arrival: Arrival) -> None:
        """It is written, and has no pages yet: as long as a reservation may wait for them."""
        if arrival.waits_for_pages_since is None:
            arrival.waits_for_pages_since = self._now

    def written(self, state: EpochState, arrival: Arrival, *, is_awaited: bool = False) -> bool:
        """All is written, or soon (is_awaited): pages are taken for it. False: there are none, or nobody wants it any
        more."""
        if arrival.state is not ArrivalState.RESERVED:
            return False
        num, pages = arrival.num_tokens // state.group.page_size, state.ranks[arrival.rank]
        if num > pages.num_available:
            self.failed(state, arrival, ArrivalFailure.PAGES)
            return False
        arrival.state, arrival.is_awaited = ArrivalState.COMMITTING, is_awaited
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
        failure: str = ArrivalFailure.COMMIT,
    ) -> None:
        """The workers have scattered it, or not. was_granted: they have counted the grant of the pages.
        are_pages_sound: each of them, or none."""
        assert arrival.state is ArrivalState.COMMITTING, arrival.state
        if not self._is_known(arrival):
            return
        pages = state.ranks[arrival.rank]
        self._ask_at = self._now  # Staging is free.
        if is_valid:
            for sequence in arrival.expected:
                state.recent.admitted(sequence, arrival.rank)
            assert arrival.held is not None
            arrival.held = pages.end_load(arrival.held, arrival.namespace, arrival.ids, arrival.pages)
            arrival.state = ArrivalState.ARRIVED
            self.num_arrived += 1
            self.num_tokens += arrival.num_tokens
            arrival.heard_at = self._now
            arrival.first_token_until = self._now + _FIRST_TOKEN_S
            self._unpark(arrival)
            return
        if are_pages_sound:
            pages.drop_load(arrival.pages, was_granted=was_granted)
        else:
            # Granted here and perhaps not there: nobody counts on them until the next epoch has read the generations.
            quarantine(pages.pool, arrival.pages)
        arrival.state = ArrivalState.RESERVED
        self.failed(state, arrival, failure)

    def failed(self, state: EpochState, arrival: Arrival, failure: str) -> None:
        """Its request, if there is one, computes the prompt. A commit that runs is waited for: where it waits for the
        last word, the workers are to end it."""
        if arrival.state is ArrivalState.COMMITTING and arrival.is_awaited and self._is_known(arrival):
            arrival.is_awaited, arrival.failure = False, failure
            self._failed.append(arrival)
        if arrival.is_over or arrival.state is ArrivalState.COMMITTING or not self._is_known(arrival):
            return
        if arrival.state is ArrivalState.QUEUED:
            self._queued.remove(arrival)
        arrival.state = ArrivalState.FAILED
        arrival.failure = arrival.failure or failure
        self.failures[arrival.failure] += 1
        self._failed.append(arrival)
        self._drop(state, arrival)

    def give_up(self, state: EpochState) -> None:
        """A flush is wanted: admission waits for it, and it for the locks of transfers. Commits that run are waited
        for; the requests compute their prompts."""
        for arrival in tuple(self._arrivals.values()):
            if arrival.state is ArrivalState.ARRIVED:
                self._drop(state, arrival)
            else:
                self.failed(state, arrival, ArrivalFailure.FLUSH)

    def let_go(self, state: EpochState) -> bool:
        """A running request needs pages: unlocks those of the last transfer that arrived and was not taken, or else
        gives up the last one that has some locked. False: there are none."""
        of_rank = [
            arrival for arrival in self._arrivals.values() if arrival.held is not None and len(arrival.held.pages)
        ]
        for arrival in reversed(of_rank):
            if arrival.state is ArrivalState.ARRIVED:
                self._drop(state, arrival)
                return True
        for arrival in reversed(of_rank):
            if arrival.state is not ArrivalState.COMMITTING:
                self.failed(state, arrival, ArrivalFailure.PAGES)
                return True
        return False

    def admitted(self, sequence: Sequence) -> None:
        """A request took a slot."""
        if sequence.submission.transfer_id in self._arrivals:
            log.debug(
                "kv_request_admitted", transfer=sequence.submission.transfer_id, attempt=sequence.submission.attempt
            )

    def pass_time(self, state: EpochState, now: float) -> None:
        """Ends what takes too long, and lets go of what its request has taken. Call before each plan."""
        self._now = now
        for arrival in tuple(self._arrivals.values()):
            waiting = [s for s in arrival.sequences if s.lifecycle is Lifecycle.WAITING]
            is_left = bool(arrival.sequences) and not waiting
            is_left &= all(s.lifecycle is not Lifecycle.WAITING for s in arrival.expected)
            if arrival.state is ArrivalState.ARRIVED:
                if arrival.first_token_until is not None and now >= arrival.first_token_until:
                    self._first_token_over(arrival)
                # Admitted, their slots hold the lock; those that have not come in its lease will not.
                is_stuck = not state.table.running_on(arrival.rank) and now - arrival.heard_at >= _STUCK_S
                if (
                    is_left
                    or is_stuck
                    or now >= (arrival.lease_until if not waiting else arrival.heard_at + MAX_LEASE_S)
                ):
                    self._drop(state, arrival)
            elif arrival.state is not ArrivalState.COMMITTING or arrival.is_awaited:
                if is_left:
                    self.failed(state, arrival, ArrivalFailure.LEFT)
                elif (failure := self._lateness(arrival, bool(waiting), now)) is not None:
                    self.failed(state, arrival, failure)

    def _lateness(self, arrival: Arrival, is_awaited: bool, now: float) -> ArrivalFailure | None:
        """is_awaited: a request waits for it."""
        if arrival.waits_for_pages_since is not None:
            return ArrivalFailure.PAGES if now - arrival.waits_for_pages_since >= self._queue_s else None
        if now >= arrival.lease_until:
            return ArrivalFailure.LEASE
        if arrival.state is ArrivalState.QUEUED:
            return ArrivalFailure.QUEUE if now - arrival.since >= self._queue_s else None
        return ArrivalFailure.STALLED if is_awaited and now - arrival.heard_at >= self._patience_s else None

    def _may_ask(self) -> bool:
        return self._now >= self._ask_at and not any(
            arrival.state is ArrivalState.RESERVING for arrival in self._arrivals.values()
        )

    def _begin(self, state: EpochState, arrival: Arrival) -> bool:
        """Locks what a rank has of it, if there is room for the rest. False: there is none. One that needs none any
        more is over."""
        page_size = state.group.page_size
        found = [pages.cache.match(pages.namespace_named(arrival.cache_name), arrival.ids) for pages in state.ranks]
        wanted = [len(arrival.ids) // page_size - len(match.pages) for match in found]
        if min(wanted) == 0:
            self.failed(state, arrival, ArrivalFailure.CACHED)
            return True
        under_way = [a for a in self._arrivals.values() if a.state in _UNDER_WAY]
        order = [0]
        if len(wanted) > 1:
            cached = [len(match.pages) * page_size for match in found]
            order = arrival_ranks(state, len(arrival.ids), cached, Counter(a.rank for a in under_way))
        rank = next((rank for rank in order if self._lock(state, found[rank], wanted[rank], rank)), None)
        if rank is None:
            return False
        self._queued.remove(arrival)
        pages = state.ranks[rank]
        arrival.held, arrival.rank, arrival.heard_at = found[rank], rank, self._now
        arrival.first_token = len(found[rank].pages) * page_size
        arrival.namespace = pages.namespace_named(arrival.cache_name)
        arrival.state = ArrivalState.RESERVING
        return True

    def _lock(self, state: EpochState, match: Match, num_pages: int, rank: int) -> bool:
        """Locks what a rank has of a prompt; False: it has no room for the other pages, and nothing is locked."""
        of_rank = [a for a in self._arrivals.values() if a.rank == rank and a.state is not ArrivalState.QUEUED]
        if len(of_rank) >= self.room.num_requests(state, rank):
            return False
        # These take their pages when they are written.
        promised = sum(a.num_tokens for a in of_rank if a.state in (ArrivalState.RESERVING, ArrivalState.RESERVED))
        cache = state.ranks[rank].cache
        # Locked pages cannot be had for the rest.
        cache.lock(match)
        if num_pages + promised // state.group.page_size <= self.room.num_pages(state, rank):
            return True
        cache.unlock(match)
        return False

    def _is_known(self, arrival: Arrival) -> bool:
        """False for one of an epoch before, whose calls have just been cut off."""
        return self._arrivals.get(arrival.transfer_id) is arrival

    def _unpark(self, arrival: Arrival) -> None:
        for sequence in arrival.sequences:
            self._queue.unpark(sequence)

    def _first_token_over(self, arrival: Arrival) -> None:
        """None is waited for any more."""
        arrival.first_token_until = None
        if arrival.state is ArrivalState.ARRIVED:
            self._unpark(arrival)

    def _drop(self, state: EpochState, arrival: Arrival) -> None:
        self._unpark(arrival)
        self._let_go(state, arrival)
        self._ask_at = self._now
        del self._arrivals[arrival.transfer_id]

    def _let_go(self, state: EpochState, arrival: Arrival) -> None:
        held, arrival.held, arrival.first_token = arrival.held, None, 0
        if held is not None:
            state.ranks[arrival.rank].cache.unlock(held)


def _awaits_first_token(arrival: Arrival, sequence: Sequence) -> bool:
    """True for the attempt that another one with the prompt's first token will take the place of. Further outputs of a
    request sample their own."""
    is_first = not sequence.output and not sequence.submission.key.index
    return arrival.first_token_until is not None and is_first
