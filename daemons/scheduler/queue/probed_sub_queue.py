"""Orders that depend on what the cache holds: longest prefix match, and depth first by weight.

After SGLang's cache-aware scheduling (Zheng et al., 2024). The cache changes with every step, so the knowledge of a
sub-queue is always a little old: a plan probes a bounded number of sequences, the newest first, then all in turn, and
the one about to go once more. A queue of any length costs a step the same.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator

from radixmesh.daemons.scheduler.cache.prefix_cache import NOTHING_KNOWN, Probe
from radixmesh.daemons.scheduler.queue.sub_queue import PlanView, SubQueue
from radixmesh.daemons.scheduler.sequence import Sequence

# Of a plan's probes, those kept for whoever is about to go.
_KEPT_PROBES = 4


class ProbedSubQueue(SubQueue):
    """Keeps a probe of every member, brought up to date by and by; subclasses order by them."""

    def __init__(self) -> None:
        self._probes: dict[Sequence, Probe] = {}
        self._fresh: deque[Sequence] = deque()
        """Members that were never probed, and some that left."""
        self._turn: deque[Sequence] = deque()
        """All other members, and some that left: who was probed longest ago comes first."""
        self._refreshed_for = -1

    def push(self, sequence: Sequence) -> None:
        assert sequence not in self._probes, sequence.key
        self._probes[sequence] = NOTHING_KNOWN
        self._fresh.append(sequence)
        self._placed(sequence, NOTHING_KNOWN)

    def head(self, view: PlanView) -> Sequence | None:
        self._refresh(view)
        sequence = self._best()
        while sequence is not None and view.num_probes_left > 0 and not self._update(sequence, view):
            sequence = self._best()
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._unplaced(sequence, self._probes.pop(sequence))
        if len(self._turn) + len(self._fresh) > 64 + 2 * len(self._probes):
            self._fresh = deque(dict.fromkeys(r for r in self._fresh if r in self._probes))
            fresh = set(self._fresh)
            self._turn = deque(dict.fromkeys(r for r in self._turn if r in self._probes and r not in fresh))

    def __len__(self) -> int:
        return len(self._probes)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._probes)

    @abstractmethod
    def _placed(self, sequence: Sequence, probe: Probe) -> None:
        """A member has that probe from now on."""

    @abstractmethod
    def _unplaced(self, sequence: Sequence, probe: Probe) -> None:
        """A member had that probe until now."""

    @abstractmethod
    def _best(self) -> Sequence | None:
        """The next one by the probes known; None = no member."""

    def _refresh(self, view: PlanView) -> None:
        """Probes once a plan, at most all members once."""
        if self._refreshed_for == view.number:
            return
        self._refreshed_for = view.number
        for _ in range(len(self._fresh) + len(self._turn)):
            if view.num_probes_left <= _KEPT_PROBES:
                return
            sequence = (self._fresh or self._turn).popleft()
            if sequence in self._probes:
                self._turn.append(sequence)
                self._update(sequence, view)

    def _update(self, sequence: Sequence, view: PlanView) -> bool:
        """Probes a member; whether it stands as it did."""
        old, new = self._probes[sequence], view.probe(sequence)
        if new == old:
            return True
        self._unplaced(sequence, old)
        self._probes[sequence] = new
        self._placed(sequence, new)
        return False


class LongestPrefixSubQueue(ProbedSubQueue):
    """The sequence with most tokens in the cache goes first; of equals the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._num_placed = 0

    def _placed(self, sequence: Sequence, probe: Probe) -> None:
        self._num_placed += 1
        heapq.heappush(self._heap, (-probe.num_pages, sequence.arrival, self._num_placed, sequence))
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._probes):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _unplaced(self, sequence: Sequence, probe: Probe) -> None:
        """Its entry leaves when it reaches the head."""

    def _best(self) -> Sequence | None:
        heap = self._heap
        while heap and not self._is_valid(heap[0]):
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def _is_valid(self, entry: tuple[int, int, int, Sequence]) -> bool:
        probe = self._probes.get(entry[3])
        return probe is not None and probe.num_pages == -entry[0]


class DepthFirstSubQueue(ProbedSubQueue):
    """Walks the cache's tree depth first, at every branching into the part that most waiting requests belong to, and
    finishes a part before the next: requests that share much run close to each other, while it is cached."""

    def __init__(self) -> None:
        super().__init__()
        self._top = _Branch()
        self._current: tuple[int, ...] = ()

    def admitted(self, sequence: Sequence) -> None:
        self._current = self._probes[sequence].branch
        super().admitted(sequence)

    def _placed(self, sequence: Sequence, probe: Probe) -> None:
        at = self._top
        for node in probe.branch:
            at = at.enter(node)
        at.arrive(sequence)

    def _unplaced(self, sequence: Sequence, probe: Probe) -> None:
        path = [self._top]
        for node in probe.branch:
            path.append(path[-1].below[node])
        path[-1].depart(sequence)
        for above, node in zip(reversed(path[:-1]), reversed(probe.branch), strict=True):
            above.leave(node)

    def _best(self) -> Sequence | None:
        if not self._probes:
            return None
        at, current = self._top, iter(self._current)
        while at.below:
            node = next(current, None)
            if node is None or node not in at.below:
                node, current = at.heaviest(), iter(())
            at = at.below[node]
        return at.oldest()


class _Branch:
    """A node of the tree: how many members lie at or below it, and those that end here."""

    def __init__(self) -> None:
        self.weight = 0
        self.below: dict[int, _Branch] = {}
        self._heaviest: list[tuple[int, int]] = []
        self._members: set[Sequence] = set()
        self._oldest: list[tuple[int, int, Sequence]] = []

    def enter(self, node: int) -> _Branch:
        """One member more below a node."""
        branch = self.below.get(node)
        if branch is None:
            branch = self.below[node] = _Branch()
        branch.weight += 1
        heapq.heappush(self._heaviest, (-branch.weight, node))
        return branch

    def leave(self, node: int) -> None:
        """One member less below a node."""
        branch = self.below[node]
        branch.weight -= 1
        if not branch.weight:
            del self.below[node]
        if len(self._heaviest) > 64 and len(self._heaviest) > 4 * len(self.below):
            self._heaviest = [(-branch.weight, node) for node, branch in self.below.items()]
            heapq.heapify(self._heaviest)

    def heaviest(self) -> int:
        """The node with most members; there is one. Entries that are too heavy by now are put right at the front."""
        heap = self._heaviest
        while True:
            weight, node = heap[0]
            branch = self.below.get(node)
            if branch is None:
                heapq.heappop(heap)
            elif -weight == branch.weight:
                return node
            else:
                heapq.heapreplace(heap, (-branch.weight, node))

    def arrive(self, sequence: Sequence) -> None:
        self._members.add(sequence)
        heapq.heappush(self._oldest, (sequence.arrival, id(sequence), sequence))

    def depart(self, sequence: Sequence) -> None:
        self._members.discard(sequence)
        if len(self._oldest) > 64 + 2 * len(self._members):
            self._oldest = [(r.arrival, id(r), r) for r in self._members]
            heapq.heapify(self._oldest)

    def oldest(self) -> Sequence:
        """Of the members that end here; there is one."""
        while self._oldest[0][2] not in self._members:
            heapq.heappop(self._oldest)
        return self._oldest[0][2]
