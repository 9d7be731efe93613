"""Content of a radix tree at one moment, read later while the tree changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from radixmesh.daemons.scheduler.cache.observer import NO_PARENT, ContentNode
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_nodes import RadixNodes, array_of


class TreeContent:
    """Copies of the columns that say what is in the tree. The edges' arrays are shared: they are never written to."""

    def __init__(self, nodes: RadixNodes, root_names: Mapping[int, Namespace]) -> None:
        total = nodes.num_numbers
        self._num_pages = array_of(nodes.num, total).copy()
        self._ends = array_of(nodes.end, total).copy()
        self._parents = array_of(nodes.parent, total).copy()
        self._ids = nodes.ids.copy()
        self._names = dict(root_names)
        self._order: list[int] | None = None

    def order(self) -> None:
        """See CacheContent: a parent ends before its children do."""
        live = np.flatnonzero(self._num_pages)
        self._order = live[np.argsort(self._ends[live], kind="stable")].tolist()

    def nodes(self) -> Iterator[ContentNode]:
        assert self._order is not None, "order() comes first"
        parents, num_pages, names = self._parents, self._num_pages, self._names
        for node in self._order:
            parent = int(parents[node])
            name = names[node] = names[parent]
            yield ContentNode(node, parent if num_pages[parent] else NO_PARENT, self._ids[node], name)
