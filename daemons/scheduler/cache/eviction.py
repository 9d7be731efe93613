"""Eviction policies of the prefix cache: a policy scores the unlocked leaves, the lowest score is evicted first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from radixmesh.daemons.scheduler.cache.radix_nodes import RadixNodes

# Uses of a cache counted one by one stay below 2^_TICK_BITS for centuries.
_TICK_BITS = 56


class EvictionPolicy(ABC):
    """Order of eviction."""

    @abstractmethod
    def score(self, nodes: RadixNodes, node: int) -> int:
        """Lower goes earlier. Read from the node's usage columns alone; must never fall while the node lives.

        That a score only rises lets the queue look at a leaf again only when it comes to the front.
        """


class LeastRecentlyUsed(EvictionPolicy):
    def score(self, nodes: RadixNodes, node: int) -> int:
        return nodes.last_used[node]


class LeastFrequentlyUsed(EvictionPolicy):
    """Fewest matches first; of equals the one that was used longest ago."""

    def score(self, nodes: RadixNodes, node: int) -> int:
        return nodes.hits[node] << _TICK_BITS | nodes.last_used[node]


class FirstInFirstOut(EvictionPolicy):
    """Oldest first, used or not."""

    def score(self, nodes: RadixNodes, node: int) -> int:
        return nodes.created[node]


class LowestPriority(EvictionPolicy):
    """Lowest priority first, where a prefix has the highest of those it was inserted with; of equals as LRU."""

    def score(self, nodes: RadixNodes, node: int) -> int:
        return (nodes.priority[node] << _TICK_BITS) + nodes.last_used[node]


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "priority": LowestPriority,
}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """A policy by name. Raises ValueError naming the choices."""
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction policy {name!r} is unknown: choose one of {', '.join(sorted(EVICTION_POLICIES))}")
    return EVICTION_POLICIES[name]()
