"""KV that comes from the workers' store into host memory for requests that wait, before it is loaded to the device.

FETCHING --all workers have answered--> gone: what came is in the host cache, its requests are back in the queue

A fetch takes host pages as a save does, and locks what it continues on the host. Nobody knows for sure what the store
has: each request asks once, for all that the host lacks, and computes the rest. One that waits too long is admitted as
any other; the pages are the fetch's until the answer. Nothing of a fetch outlives the epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace, Probe
from radixmesh.daemons.scheduler.cache.radix_tree import num_equal
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.tiers.wait_cost import WaitCost

MAX_FETCHES = 8
"""Under way at a time on a data-parallel rank: a worker refuses more than twice as many."""


@dataclass(slots=True, eq=False, kw_only=True)
class KvFetch:
    """One fetch. ids: the whole prefix, int32, up to the last page that is wanted; held: what of it the host has,
    locked; pages: host pages for the rest, of the data-parallel rank `rank`."""

    rank: int
    namespace: Namespace
    cache_name: str
    ids: IntArray
    held: Match
    pages: IntArray
    begun_s: float
    is_late: bool = False
    sequences: list[Sequence] = field(default_factory=list)


class KvFetches:
    """Of one planner. min_tokens: fewer are computed; timeout_s: a request that waits longer computes its prompt.

    estimate: of steps, against which fetches are measured. num_fetched, num_tokens: pages that came, and their tokens.
    num_filled, num_empty: fetches that brought some, and none; wait_s: seconds that they took together. num_late:
    requests that waited too long.
    """

    def __init__(self, queue: WaitingQueue, *, min_tokens: int, timeout_s: float, estimate: StepEstimate) -> None:
        self._queue = queue
        self._min_tokens, self._timeout_s = min_tokens, timeout_s
        self._fetches: list[KvFetch] = []
        self._wanted: list[KvFetch] = []
        self._asked: set[Sequence] = set()
        self._begun: list[tuple[float, int]] = []
        self._cost = WaitCost(estimate)
        self._now = 0.0
        self.num_fetched = self.num_tokens = self.num_filled = self.num_empty = self.num_late = 0
        self.wait_s = 0.0

    def store_cost(self, load_cost: float) -> float:
        """Time that a request waits for a token from the store, as a share of the time to compute one; measured, at
        most 1. load_cost: of one from host memory, where it comes first."""
        return min(1.0, self._cost.share + load_cost)

    def __len__(self) -> int:
        return len(self._fetches)

    def begin_epoch(self) -> None:
        """Locks and pages of the epoch before are void; who waited is back in the queue."""
        self._fetches.clear()
        self._wanted.clear()
        self._asked.clear()

    def num_parked(self) -> Counter[int]:
        """Requests that wait for fetches, by data-parallel rank."""
        return Counter(fetch.rank for fetch in self._fetches for _ in fetch.sequences)

    def take_wanted(self) -> list[KvFetch]:
        """Fetches to be asked of the workers; each is told once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def is_parked(self, state: EpochState, sequence: Sequence, probe: Probe, rank: int) -> bool:
        """Has a waiting request's KV fetched to the host of a data-parallel rank, where the store may have more of it
        than device and host; parks it until then. probe: of the rank's device."""
        group, pages = state.group, state.ranks[rank]
        host = pages.host
        if host is None or not group.has_kv_store or sequence in self._asked:
            return False
        size, namespace = group.page_size, pages.namespace_of(sequence)
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        num_wanted, num_known = len(ids) // size, host.num_known(namespace, ids)
        if (num_wanted - max(num_known, probe.num_pages)) * size < self._min_tokens:
            return False
        of_rank = [fetch for fetch in self._fetches if fetch.rank == rank]
        for fetch in of_rank:
            if not fetch.is_late and fetch.namespace == namespace and _num_common(fetch.ids, ids) // size > num_known:
                # The rest of its own prompt is asked for when this is here.
                self._park(fetch, sequence)
                return True
        if len(of_rank) >= MAX_FETCHES:
            return False
        self._asked.add(sequence)
        held, taken = host.begin_fetch(namespace, ids, num_wanted)
        if not len(taken):
            host.release(held)
            return False
        end = (len(held.pages) + len(taken)) * size
        fetch = KvFetch(
            rank=rank,
            namespace=namespace,
            cache_name=sequence.cache_name,
            ids=ids[:end].copy(),
            held=held,
            pages=taken,
            begun_s=self._now,
        )
        self._fetches.append(fetch)
        self._wanted.append(fetch)
        self._park(fetch, sequence)
        return True

    def fetched(self, state: EpochState, fetch: KvFetch, num_pages: int, *, is_answer: bool = True) -> None:
        """All workers have the first pages of a fetch. is_answer: they lack the next one; False: something went wrong,
        and says nothing of what they have."""
        if fetch not in self._fetches:
            return  # Of an epoch before.
        self._fetches.remove(fetch)
        host = state.ranks[fetch.rank].host
        assert host is not None
        self.num_fetched += num_pages
        self.num_tokens += num_pages * state.group.page_size
        self.num_filled += num_pages > 0
        self.num_empty += not num_pages
        self._begun.append((fetch.begun_s, num_pages * state.group.page_size))
        num_there = len(fetch.held.pages) + num_pages
        if host.stored is not None and is_answer and num_there * state.group.page_size < len(fetch.ids):
            host.stored.forget(fetch.namespace, fetch.ids, num_there)
        self._note_missing(fetch, num_there, state.group.page_size)
        host.end_fetch(fetch.held, fetch.namespace, fetch.ids, fetch.pages, num_pages)
        self._unpark(fetch)

    def _note_missing(self, fetch: KvFetch, num_there: int, page_size: int) -> None:
        """The store lacks the next page: requests that would ask for it have their answer. Otherwise those that share a
        prefix would ask for it one after the other, while all of them wait."""
        if num_there * page_size < len(fetch.ids):
            for sequence in fetch.sequences:
                ids = sequence.token_ids()[: sequence.max_cached_len()]
                if _num_common(fetch.ids, ids) // page_size > num_there:
                    self._asked.add(sequence)

    def pass_time(self, now: float) -> None:
        """Ends waits that take too long. Call before each plan."""
        self._now = now
        # The plan that follows on their answers: what tells of those has no clock.
        for begun_s, num_tokens in self._begun:
            self.wait_s += now - begun_s
            if num_tokens:
                self._cost.observe(now - begun_s, num_tokens)
        self._begun.clear()
        if self._asked:
            self._asked = {s for s in self._asked if s.lifecycle is Lifecycle.WAITING}
        for fetch in self._fetches:
            if not fetch.is_late and now - fetch.begun_s >= self._timeout_s:
                fetch.is_late = True
                self.num_late += len(fetch.sequences)
                self._asked.update(fetch.sequences)
                self._unpark(fetch)

    def _park(self, fetch: KvFetch, sequence: Sequence) -> None:
        fetch.sequences.append(sequence)
        self._queue.park(sequence)

    def _unpark(self, fetch: KvFetch) -> None:
        for sequence in fetch.sequences:
            self._queue.unpark(sequence)
        fetch.sequences.clear()


def _num_common(first: IntArray, second: IntArray) -> int:
    num = min(len(first), len(second))
    return num_equal(first[:num], second[:num])
