"""KV that comes back from the host for requests that wait: they are admitted once it is there.

QUEUED --its turn--> LOADING --all ranks say so--> LOADED --its requests are admitted, or nothing else can run--> gone
QUEUED --nobody waits for it any more--> gone

A load takes device pages as a grant does, and locks what it continues on the device and what it reads on the host.
Workers copy in the order of plans, one load after the other. So they have a few at a time, and the others are queued
here: the shortest goes first, for requests together wait least so, unless a longer one has waited long.
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
from radixmesh.daemons.scheduler.tiers.wait_cost import WaitCost

MAX_TURNS = 32
"""Requests that are parked for loads in one plan: each costs looking into two trees."""
MAX_LOADS = 64
"""Loads queued, under way, or loaded and waited for, at a time."""
WINDOW_LOADS = 2
"""Loads that a rank's workers have at least, of those there are: the bus is not to wait until the scheduler hears of
one."""
_OVERTAKING_S = 20e-6
"""A load is overtaken by one that is begun so much later, for each token that it has more: a few times what a bus takes
for a token."""


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
    """One load. ids: the whole prefix, int32. held: what of it the device has, locked; source: on the host, locked.
    num_tokens: that are loaded. op_id: 0 as long as it is queued."""

    rank: int
    namespace: Namespace
    ids: IntArray
    held: Match
    source: Match
    pages: IntArray
    num_tokens: int
    begun_s: float
    op_id: int = 0
    is_loaded: bool = False
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def is_under_way(self) -> bool:
        """Workers have it."""
        return self.op_id > 0 and not self.is_loaded

    @property
    def turn_s(self) -> float:
        """Loads begin in the order of these times."""
        return self.begun_s + _OVERTAKING_S * self.num_tokens


class KvLoads:
    """Of one planner. num_tokens, wait_s: tokens loaded so far, and seconds that their loads took together. estimate:
    of steps, against which loads are measured."""

    def __init__(
        self, queue: WaitingQueue, *, timeout_s: float, estimate: StepEstimate, window_tokens: int = 32768
    ) -> None:
        """Arguments as of TierSettings."""
        self._cost, self._window_tokens = WaitCost(estimate), window_tokens
        self._queue = queue
        self._timeout_s = timeout_s
        self._loads: list[KvLoad] = []
        self._impatient: set[Sequence] = set()
        self._begun: list[tuple[float, int]] = []
        self._last_op = 0
        self._now = 0.0
        self._turns_left = MAX_TURNS
        self.num_tokens = self.num_loads = self.num_late = 0
        self.wait_s = 0.0

    @property
    def num_under_way(self) -> int:
        """Loads whose completion has not been told, queued ones among them."""
        return sum(not load.is_loaded for load in self._loads)

    @property
    def cost(self) -> float:
        """Time that a request waits for a loaded token, as a share of the time to compute one; measured, at most 1."""
        return self._cost.share

    def num_parked(self) -> Counter[int]:
        """Requests that wait for loads which are under way, by data-parallel rank."""
        return Counter(load.rank for load in self._loads if not load.is_loaded for _ in load.sequences)

    def need_plan(self, state: EpochState) -> bool:
        """True if saves or loads are to be sent, or only an answer can tell that a load has completed."""
        if not state.hosts:
            return False
        is_waiting = bool(self.num_under_way) and not state.in_flight
        return is_waiting or self._next() is not None or any(host.has_saves for host in state.hosts)

    def take_moves(self) -> list[PageMove]:
        """Loads for the plan that is being made."""
        moves = []
        while (load := self._next()) is not None:
            self._last_op += 1
            load.op_id = self._last_op
            held = load.held.pages
            moves.append(
                PageMove(
                    device_pages=load.pages,
                    host_pages=load.source.pages[len(held) :],
                    previous_page=int(held[-1]) if len(held) else -1,
                    op_id=load.op_id,
                    rank=load.rank,
                )
            )
        return moves

    def begin_epoch(self) -> None:
        """Locks and pages of the epoch before are void; who waited is back in the queue."""
        self._loads.clear()
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
        for load in self._loads:
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
        by_op = {load.op_id: load for load in self._loads if load.is_under_way}
        for op_id in op_ids:
            load = by_op.pop(op_id, None)
            if load is None:
                continue
            pages = state.ranks[load.rank]
            assert pages.host is not None
            pages.host.release(load.source)
            pages.host.counters.loaded += len(load.pages)
            load.held = pages.end_load(load.held, load.namespace, load.ids, load.pages)
            load.is_loaded = True
            self.num_loads += 1
            self.num_tokens += load.num_tokens
            self._begun.append((load.begun_s, load.num_tokens))
            for sequence in load.sequences:
                self._queue.unpark(sequence)

    def let_go(self, state: EpochState) -> bool:
        """Pages that were loaded for requests that still wait can be evicted: somebody needs room now. False: there are
        none such."""
        loaded = [load for load in self._loads if load.is_loaded]
        for load in loaded:
            self._drop(state, load)
        return bool(loaded)

    def pass_time(self, state: EpochState, now: float) -> None:
        """Ends what takes too long, and lets go of what its requests have taken. Call before each plan."""
        self._now = now
        # The plan that follows on their results: what tells of results has no clock.
        for begun_s, num_tokens in self._begun:
            self.wait_s += now - begun_s
            self._cost.observe(now - begun_s, num_tokens)
        self._begun.clear()
        self._turns_left = MAX_TURNS
        if self._impatient:
            self._impatient = {s for s in self._impatient if s.lifecycle is Lifecycle.WAITING}
        for load in tuple(self._loads):
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
                waiting = []
            if not load.op_id and not waiting:
                self._cancel(state, load)

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
        load = KvLoad(
            rank=rank,
            namespace=namespace,
            ids=ids.copy(),
            held=held,
            source=source,
            pages=targets,
            num_tokens=missing * size,
            begun_s=self._now,
        )
        self._loads.append(load)
        return load

    def _next(self) -> KvLoad | None:
        """The queued load whose turn it is; None: there is none, or workers have enough."""
        num_loads, num_tokens = Counter[int](), Counter[int]()
        for load in self._loads:
            if load.is_under_way:
                num_loads[load.rank] += 1
                num_tokens[load.rank] += load.num_tokens
        queued = (
            load
            for load in self._loads
            if not load.op_id and (num_loads[load.rank] < WINDOW_LOADS or num_tokens[load.rank] < self._window_tokens)
        )
        return min(queued, key=lambda load: load.turn_s, default=None)

    def _may_wait(self, state: EpochState, rank: int) -> bool:
        """True if pages may come free without this request's doing."""
        return bool(state.table.running_on(rank) or self._loads or state.retracting)

    def _cancel(self, state: EpochState, load: KvLoad) -> None:
        """Nobody waits for a queued load any more."""
        pages = state.ranks[load.rank]
        assert pages.host is not None and not load.op_id
        pages.host.release(load.source)
        pages.drop_load(load.pages, was_granted=False)
        self._drop(state, load)

    def _drop(self, state: EpochState, load: KvLoad) -> None:
        state.ranks[load.rank].cache.unlock(load.held)
        self._loads.remove(load)


def _num_common(first: IntArray, second: IntArray) -> int:
    """Tokens at the start in which both agree."""
    num = min(len(first), len(second))
    return num_equal(first[:num], second[:num])
