"""Events of a prefix cache for its observers: enough to rebuild the exact set of cached prefixes elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace

NO_PARENT = -1
"""Parent of a node at the top of its namespace."""


class CacheObserver(Protocol):
    """Follows a tree of nodes, each a run of tokens below its parent; the cached prefixes are the paths from the top.

    A mirror is four rules. Insert: a new leaf. Split: a new node takes over the upper tokens, the parent and the place
    among its siblings of one that is there, which keeps its id, its lower tokens and its children: the prefixes stay as
    they are. Evict: a leaf keeps its first `num_left` tokens; without any it is gone. Reset: nothing is left. Node ids
    are used again once their node is gone. Calls come on the cache's thread, in order, after the change: be quick.
    """

    def on_insert(self, node: int, parent: int, ids: IntArray, namespace: Namespace) -> None:
        """A new leaf `node` holds `ids` (int32 [n], n >= 1 whole pages; read only) below `parent` or NO_PARENT."""

    def on_split(self, node: int, upper: int, num_upper: int) -> None:
        """The first `num_upper` tokens of `node` are now those of the new node `upper`, its parent."""

    def on_evict(self, node: int, num_left: int) -> None:
        """The leaf `node` lost its tokens from `num_left` on; 0 = it is gone."""

    def on_reset(self) -> None:
        """All nodes are gone."""


class ContentNode(NamedTuple):
    """A node as on_insert would tell of it."""

    node: int
    parent: int
    ids: IntArray
    namespace: Namespace


class CacheContent(Protocol):
    """All nodes of a cache at one moment; what the cache does later does not show."""

    def order(self) -> None:
        """Sorts; O(n log n) in arrays alone, fit for another thread. Call once, before nodes()."""

    def nodes(self) -> Iterator[ContentNode]:
        """Nodes, parents before children."""
