"""KV that comes back from the host for requests that wait: they are admitted once it is there.

LOADING --all ranks say so--> LOADED --its requests are admitted, or nothing else can run--> gone

A load takes device pages as a grant does, and locks what it continues on the device and what it reads on the host.
Loaded pages are in the device's prefix cache like any others, locked for the requests that wait for them. A request
that waits too long is admitted as any other and computes what the device does not have. Nothing of a load outlives the
epoch: a new one finds the pages in the workers' records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as PySequence
from dataclasses import dataclass, field
from enum import Enum

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageMove
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Namespace, Probe
from radixmesh.daemons.scheduler.cache.radix_tree import num_equal
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.planning.timing.step_estimate import StepEstimate
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence

MAX_TURNS = 32
"""Requests that are parked for loads in one plan: each costs looking into two trees."""
MAX_LOADS = 64
"""Loads under way, or loaded and waited for, at a time."""
# Time of a loaded token as a share of a computed one before any was loaded, and the weight of the latest load.
_FIRST_COST, _WEIGHT = 0.25, 0.2
# A step of so many tokens is a prefill, whose time goes by its tokens.
_PREFILL_TOKENS = 1024


class LoadTurn(Enum):
    """Outcome of looking for the KV of a request on the host."""

    NOTHING = "nothing"
    """There is none, or it does not wait for it: it is admitted as any other."""
    PARKED = "parked"
    """It waits for a load; those behind it come first."""
    LATER = "later"
    """There is no room for its load now: it stays where it is."""


@dataclass(slots=True, eq=False, kw_only=True)
class KvLoad:
    """One load. ids: the whole prefix, int32. held: what of it the device has, locked; source: on the host, locked."""

    op_id: int
    rank: int
    namespace: Namespace
    ids: IntArray
    held: Match
    source: Match
    pages: IntArray
    begun_s: float
    is_loaded: bool = False
    sequences: list[Sequence] = field(default_factory=list)


class KvLoads:
    """Of one planner. num_tokens, wait_s: tokens loaded so far, and seconds that their loads took together. estimate:
    of steps, against which loads are measured."""

    def __init__(self, queue: WaitingQueue, *, timeout_s: float, estimate: StepEstimate) -> None:
        self._estimate = estimate
        self._us_per_token = 0.0
        self._queue = queue
        self._timeout_s = timeout_s
        self._loads: dict[int, KvLoad] = {}
        self._moves: list[PageMove] = []
        self._impatient: set[Sequence] = set()
        self._begun: list[tuple[float, int]] = []
        self._last_op = 0
        self._now = 0.0
        self._turns_left = MAX_TURNS
        self.num_tokens = self.num_loads = self.num_late = 0
        self.wait_s = 0.0

    @property
    def num_under_way(self) -> int:
        """Loads whose completion has not been told."""
        return sum(not load.is_loaded for load in self._loads.values())

    @property
    def cost(self) -> float:
        """Time that a request waits for a loaded token, as a share of the time to compute one; measured, at most 1."""
        compute_us = self._estimate.expect_us(_PREFILL_TOKENS) / _PREFILL_TOKENS
        if not self._us_per_token or not compute_us:
            return _FIRST_COST
        return min(1.0, self._us_per_token / compute_us)

    def num_parked(self) -> Counter[int]:
        """Requests that wait for loads which are under way, by data-parallel rank."""
        return Counter(load.rank for load in self._loads.values() if not load.is_loaded for _ in load.sequences)

    def need_plan(self, state: EpochState) -> bool:
        """True if saves or loads are to be sent, or only an answer can tell that a load has completed."""
        if not state.hosts:
            return False
        is_waiting = bool(self.num_under_way) and not state.in_flight
        return is_waiting or bool(self._moves) or any(host.has_saves for host in state.hosts)

    def take_moves(self) -> list[PageMove]:
        """Loads for the plan that is being made."""
        moves, self._moves = self._moves, []
        return moves

    def begin_epoch(self) -> None:
        """Locks and pages of the epoch before are void; who waited is back in the queue."""
        self._loads.clear()
        self._moves.clear()
        self._impatient.clear()
        self._last_op = 0

    def turn(self, state: EpochState, sequence: Sequence, probe: Probe, rank: int, *, has_pages: bool) -> LoadTurn:
        """Has a waiting request's KV loaded, if the host has more of it than the device; parks it until then.

        probe: of the device. has_pages: the request could be admitted by its pages.
        """
        pages = state.ranks[rank]
        host = pages.host
        if host is None or sequence in self._impatient:
            return LoadTurn.NOTHING
        size, namespace = state.group.page_size, pages.namespace_of(sequence)
        ids = sequence.token_ids()[: sequence.max_cached_len()]
        num_known = host.num_known(namespace, ids)
        if (num_known - probe.num_pages) * size < max(1, host.settings.load_min_tokens):
            return LoadTurn.NOTHING
        if not self._turns_left:
            return LoadTurn.LATER
        for load in self._loads.values():
            is_alike = not load.is_loaded and load.rank == rank and load.namespace == namespace
            if is_alike and _num_common(load.ids, ids) // size > probe.num_pages:
                self._turns_left -= 1
                return self._park(load, sequence)
        if not has_pages or len(self._loads) >= MAX_LOADS:
            return LoadTurn.LATER
        self._turns_left -= 1
        begun = self._begin(state, sequence, ids[: num_known * size], probe, rank)
        if begun is None and not state.table.running_on(rank) and self.let_go(state):
            begun = self._begin(state, sequence, ids[: num_known * size], pages.probe(sequence), rank)
        if begun is None:
            return LoadTurn.LATER if self._may_wait(state, rank) else LoadTurn.NOTHING
        return self._park(begun, sequence)

    def loaded(self, state: EpochState, op_ids: PySequence[int]) -> None:
        """All workers of a rank have completed these."""
        for op_id in op_ids:
            load = self._loads.get(op_id)
            if load is None or load.is_loaded:
                continue
            pages = state.ranks[load.rank]
            assert pages.host is not None
            pages.host.release(load.source)
            pages.host.counters.loaded += len(load.pages)
            load.held = pages.end_load(load.held, load.namespace, load.ids, load.pages)
            load.is_loaded = True
            self.num_loads += 1
            self.num_tokens += len(load.pages) * state.group.page_size
            self._begun.append((load.begun_s, len(load.pages) * state.group.page_size))
            for sequence in load.sequences:
                self._queue.unpark(sequence)

    def let_go(self, state: EpochState) -> bool:
        """Pages that were loaded for requests that still wait can be evicted: somebody needs room now. False: there are
        none such."""
        loaded = [load for load in self._loads.values() if load.is_loaded]
        for load in loaded:
            self._drop(state, load)
        return bool(loaded)

    def pass_time(self, state: EpochState, now: float) -> None:
        """Ends what takes too long, and lets go of what its requests have taken. Call before each plan."""
        self._now = now
        # The plan that follows on their results: what tells of results has no clock.
        for begun_s, num_tokens in self._begun:
            self.wait_s += now - begun_s
            latest_us = (now - begun_s) * 1e6 / num_tokens
            weight = _WEIGHT if self._us_per_token else 1.0
            self._us_per_token += weight * (latest_us - self._us_per_token)
        self._begun.clear()
        self._turns_left = MAX_TURNS
        if self._impatient:
            self._impatient = {s for s in self._impatient if s.lifecycle is Lifecycle.WAITING}
        for load in tuple(self._loads.values()):
            is_late = now - load.begun_s >= self._timeout_s
            waiting = [s for s in load.sequences if s.lifecycle is Lifecycle.WAITING]
            if load.is_loaded and (is_late or not waiting):
                self._drop(state, load)
            elif is_late and waiting:
                self.num_late += len(waiting)
                self._impatient.update(waiting)
                load.sequences.clear()
                for sequence in waiting:
                    self._queue.unpark(sequence)

    def _park(self, load: KvLoad, sequence: Sequence) -> LoadTurn:
        # A request that is probed alone is asked for in every plan, parked or not.
        if sequence not in load.sequences:
            load.sequences.append(sequence)
            self._queue.park(sequence)
        return LoadTurn.PARKED

    def _begin(self, state: EpochState, sequence: Sequence, ids: IntArray, probe: Probe, rank: int) -> KvLoad | None:
        """A new load of what the device lacks of a prefix; None: there are no pages for it."""
        pages, size = state.ranks[rank], state.group.page_size
        host, namespace = pages.host, pages.namespace_of(sequence)
        assert host is not None
        held = pages.match(sequence, probe)
        missing = len(ids) // size - len(held.pages)
        # The prefix that was found is locked now, and cannot be evicted for the rest.
        if missing > pages.num_available:
            pages.cache.unlock(held)
            return None
        # Locked first: what begin_load() evicts may be saved, and take host pages of others.
        source = host.hold(namespace, ids)
        targets = pages.begin_load(missing)
        self._last_op += 1
        load = KvLoad(
            op_id=self._last_op,
            rank=rank,
            namespace=namespace,
            ids=ids.copy(),
            held=held,
            source=source,
            pages=targets,
            begun_s=self._now,
        )
        self._loads[load.op_id] = load
        self._moves.append(
            PageMove(
                device_pages=targets,
                host_pages=source.pages[len(held.pages) :],
                previous_page=int(held.pages[-1]) if len(held.pages) else -1,
                op_id=load.op_id,
                rank=rank,
            )
        )
        return load

    def _may_wait(self, state: EpochState, rank: int) -> bool:
        """True if pages may come free without this request's doing."""
        return bool(state.table.running_on(rank) or self._loads or state.retracting)

    def _drop(self, state: EpochState, load: KvLoad) -> None:
        state.ranks[load.rank].cache.unlock(load.held)
        del self._loads[load.op_id]


def _num_common(first: IntArray, second: IntArray) -> int:
    """Tokens at the start in which both agree."""
    num = min(len(first), len(second))
    return num_equal(first[:num], second[:num])
