"""The leaves of a radix tree in order of eviction."""

from __future__ import annotations

import heapq

from radixmesh.daemons.scheduler.cache.eviction import EvictionPolicy
from radixmesh.daemons.scheduler.cache.radix_nodes import NO_NODE, RadixNodes

_NODE_BITS = 32
_NODE_MASK = (1 << _NODE_BITS) - 1


class LeafQueue:
    """Heap with about one entry a node, brought up to date only at its front.

    Invariant: every free leaf has an entry, of a score no higher than its own. Entries of nodes that are locked, gone
    or have children meanwhile are dropped when they come to the front; an old score is replaced then. A node that
    leaves the tree elsewhere leaves its entry, beside which the next node of its number may have a second one. An entry
    is one integer, score << 32 | node: nothing that the garbage collector follows. O(log leaves) an eviction, plus as
    much for every leaf that was used since it was queued.
    """

    def __init__(self, policy: EvictionPolicy, nodes: RadixNodes) -> None:
        self._policy = policy
        self._nodes = nodes
        self._heap: list[int] = []

    def offer(self, node: int) -> None:
        """Tells that the node may have become a free leaf."""
        nodes = self._nodes
        if nodes.is_free_leaf(node) and not nodes.is_queued[node]:
            nodes.is_queued[node] = 1
            heapq.heappush(self._heap, self._entry(node))

    def fill(self, leaves: list[int]) -> None:
        """Queues free leaves in an empty queue; O(len(leaves))."""
        assert not self._heap, len(self._heap)
        is_queued = self._nodes.is_queued
        for node in leaves:
            is_queued[node] = 1
        self._heap = [self._entry(node) for node in leaves]
        heapq.heapify(self._heap)

    def head(self) -> int:
        """The free leaf to evict first; NO_NODE = there is none."""
        heap, nodes = self._heap, self._nodes
        while heap:
            node = heap[0] & _NODE_MASK
            if not nodes.is_free_leaf(node):
                heapq.heappop(heap)
                nodes.is_queued[node] = 0
                continue
            entry = self._entry(node)
            if entry == heap[0]:
                return node
            heapq.heapreplace(heap, entry)
        return NO_NODE

    def pop(self) -> None:
        """Removes the entry of what head() just returned."""
        node = heapq.heappop(self._heap) & _NODE_MASK
        self._nodes.is_queued[node] = 0

    def _entry(self, node: int) -> int:
        return self._policy.score(self._nodes, node) << _NODE_BITS | node
