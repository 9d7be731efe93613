"""A compact prefix tree over token ids: the structure alone. Locks, use and order of eviction are the cache's.

After RadixAttention's tree (Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.scheduler.cache.compact_edges import Edges
from radixmesh.daemons.scheduler.cache.observer import CacheObserver
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_nodes import NO_NODE, RadixNodes, array_of
from radixmesh.daemons.scheduler.cache.tree_content import TreeContent

_KEY_BITS = 32
_KEY_MASK = (1 << _KEY_BITS) - 1
# Edges are compared in blocks, the first small: most comparisons end early or are short.
_FIRST_BLOCK = 512
_MOST_BLOCK = 1 << 16
# Edges of up to so many tokens are first compared whole, as bytes.
_AS_BYTES = 4096


class RadixTree:
    """Edges of whole pages: siblings differ in their first page, in whichever token. One root per namespace.

    A node keeps its number and its end for life: a split puts a new node above it. So who remembers a node remembers a
    prefix, as long as that is not evicted. Nothing recurses.
    """

    def __init__(self, *, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.nodes = RadixNodes(num_pages=num_pages)
        self.observer: CacheObserver | None = None
        # One dictionary of atoms for all nodes: small, and nothing that the garbage collector follows.
        self._children: dict[int | bytes, int] = {}
        self._roots: dict[Namespace, int] = {}
        self._root_names: dict[int, Namespace] = {}

    @property
    def num_nodes(self) -> int:
        """Nodes with an edge."""
        return len(self._children)

    @property
    def namespaces(self) -> list[Namespace]:
        """Those that have something cached."""
        return list(self._roots)

    def find(self, namespace: Namespace, ids: IntArray, above: int = NO_NODE) -> tuple[list[int], int]:
        """Longest known prefix of `ids` (int32 [any length]) in whole pages; changes nothing.

        above: a node at whose end `ids` are known to be as in the tree; NO_NODE = begins at the top. Returns the nodes
        below it, from the top, and the prefix's number of pages, which may end within the last node's edge.
        """
        path: list[int] = []
        nodes, children, page_size = self.nodes, self._children, self.page_size
        node, num, most = above, 0, len(ids) // self.page_size
        if above != NO_NODE:
            num = nodes.end[above]
        else:
            root = self._roots.get(namespace)
            if root is None:
                return path, 0
            node = root
        data = b""
        while num < most:
            start = num * page_size
            child = children.get(self._key(node, ids, start))
            if child is None:
                break
            path.append(child)
            length, edge = nodes.num[child], nodes.ids[child]
            if length <= most - num and len(edge) <= _AS_BYTES:
                # Most edges are passed whole: comparing bytes costs a tenth of comparing arrays.
                data = data or ids.tobytes()
                if data.startswith(edge.tobytes(), 4 * start):
                    num += length
                    node = child
                    continue
            known = min(length, most - num) * page_size
            equal = num_equal(edge[:known], ids[start : start + known]) // page_size
            num += equal
            if equal < length:
                break
            node = child
        return path, num

    def cut(self, path: list[int], num: int) -> None:
        """Makes a path end after `num` pages, which must be within its last edge: splits that if need be."""
        if path:
            surplus = self.nodes.end[path[-1]] - num
            if surplus:
                path[-1] = self.split(path[-1], self.nodes.num[path[-1]] - surplus)

    def split(self, node: int, num_upper: int) -> int:
        """Puts a new node with the first `num_upper` pages of an edge above the rest of it; returns the new node."""
        nodes, size = self.nodes, self.page_size
        ids, pages, parent = nodes.ids[node], nodes.pages[node], nodes.parent[node]
        assert 0 < num_upper < len(pages), (num_upper, len(pages))
        upper = nodes.take()
        nodes.parent[upper] = parent
        nodes.end[upper] = nodes.end[node] - len(pages) + num_upper
        nodes.num_children[upper] = 1
        nodes.copy_usage(node, upper)
        nodes.set_edge(upper, ids[: num_upper * size], pages[:num_upper])
        nodes.set_edge(node, ids[num_upper * size :], pages[num_upper:])
        nodes.parent[node] = upper
        self._children[self._key(parent, ids, 0)] = upper
        self._children[self._key(upper, ids, num_upper * size)] = node
        if self.observer is not None:
            self.observer.on_split(node, upper, num_upper * size)
        return upper

    def append(self, namespace: Namespace, parent: int, ids: IntArray, pages: IntArray) -> int:
        """A new leaf below `parent` (NO_NODE = at the top), which must have no such child. Copies the arrays."""
        nodes = self.nodes
        above = self._root_of(namespace) if parent == NO_NODE else parent
        leaf = nodes.take()
        nodes.set_edge(leaf, np.array(ids, np.int32), np.array(pages, np.int32))
        nodes.parent[leaf] = above
        nodes.end[leaf] = nodes.end[above] + len(pages)
        nodes.num_children[above] += 1
        key = self._key(above, ids, 0)
        assert key not in self._children, (namespace, parent)
        self._children[key] = leaf
        if self.observer is not None:
            self.observer.on_insert(leaf, parent, nodes.ids[leaf], namespace)
        return leaf

    def trim(self, leaf: int, num: int) -> IntArray:
        """Takes the last `num` pages off a leaf's edge, fewer than it has; returns them."""
        nodes = self.nodes
        ids, pages = nodes.ids[leaf], nodes.pages[leaf]
        left = len(pages) - num
        assert 0 < left < len(pages) and not nodes.num_children[leaf], (leaf, num, len(pages))
        nodes.set_edge(leaf, ids[: left * self.page_size], pages[:left])
        nodes.end[leaf] -= num
        if self.observer is not None:
            self.observer.on_evict(leaf, left * self.page_size)
        return pages[left:]

    def remove(self, leaf: int) -> tuple[IntArray, int]:
        """Removes a leaf; returns its pages and the node above, NO_NODE where that is a root."""
        nodes = self.nodes
        pages, parent = nodes.pages[leaf], nodes.parent[leaf]
        assert len(pages) and not nodes.num_children[leaf], (leaf, len(pages))
        del self._children[self._key(parent, nodes.ids[leaf], 0)]
        nodes.num_children[parent] -= 1
        nodes.free(leaf)
        if self.observer is not None:
            self.observer.on_evict(leaf, 0)
        if nodes.num[parent]:
            return pages, parent
        if not nodes.num_children[parent]:
            # Namespaces come from clients: one without pages must not stay.
            del self._roots[self._root_names.pop(parent)]
            nodes.free(parent)
        return pages, NO_NODE

    def namespace_of(self, node: int) -> Namespace:
        """That of a node of the tree; O(depth)."""
        parents = self.nodes.parent
        while self.nodes.num[node]:
            node = parents[node]
        return self._root_names[node]

    def path_to(self, node: int) -> list[int]:
        """Nodes from `node` up to the top."""
        nodes, path = self.nodes, []
        while nodes.num[node]:
            path.append(node)
            node = nodes.parent[node]
        return path

    def pages_of(self, path: Sequence[int]) -> IntArray:
        """Pages of a path from the top, a new array int32."""
        pages = self.nodes.pages
        return np.concatenate([pages[node] for node in path]) if path else empty_ints()

    def load(self, edges: Edges, namespaces: Sequence[Namespace]) -> IntArray:
        """Fills an empty tree; returns the nodes of the edges, int32, consecutive."""
        assert not self._children, len(self._children)
        num, nodes, size = len(edges.parents), self.nodes, self.page_size
        used = np.unique(edges.namespace_indexes).tolist()
        roots = np.zeros(len(namespaces), np.int64)
        roots[used] = [self._root_of(namespaces[index]) for index in used]
        first = nodes.take_many(num)
        is_top = edges.parents < 0
        parents = np.where(is_top, roots[edges.namespace_indexes], edges.parents + first) if num else edges.parents
        total = first + num
        array_of(nodes.parent, total)[first:] = parents
        array_of(nodes.num, total)[first:] = np.diff(edges.starts)
        array_of(nodes.end, total)[first:] = edges.ends
        array_of(nodes.num_children, total)[:] += np.bincount(parents, minlength=total)[:total]
        starts = edges.starts.tolist()
        bounds = list(itertools.pairwise(starts))
        nodes.pages[first:] = [edges.pages[start:stop] for start, stop in bounds]
        nodes.ids[first:] = [edges.tokens[start * size : stop * size] for start, stop in bounds]
        self._children.update(zip(self._keys(parents, edges), range(first, total), strict=True))
        if self.observer is not None:
            self.replay(self.observer)
        return np.arange(first, total, dtype=np.int32)

    def replay(self, observer: CacheObserver) -> None:
        """Tells an observer of everything there is, as inserts, parents before children."""
        content = self.content()
        content.order()
        for item in content.nodes():
            observer.on_insert(*item)

    def content(self) -> TreeContent:
        """All nodes as they are now; copies columns, O(nodes) at memory speed."""
        return TreeContent(self.nodes, self._root_names)

    def _key(self, parent: int, ids: IntArray, start: int) -> int | bytes:
        """Key of the child of `parent` whose edge begins with the page of `ids` at `start`; exact, not a hash.

        Bytes, whose hash is salted, wherever a client could otherwise choose pages of equal hashes.
        """
        if self.page_size == 1:
            return parent << _KEY_BITS | (ids.item(start) & _KEY_MASK)
        return parent.to_bytes(4, "little") + ids[start : start + self.page_size].tobytes()

    def _keys(self, parents: np.ndarray[tuple[int, ...], np.dtype[np.int64]], edges: Edges) -> list[int | bytes]:
        """_key of many edges at once."""
        size, starts = self.page_size, edges.starts[:-1]
        if size == 1:
            keys = parents << _KEY_BITS | (edges.tokens[starts].astype(np.int64) & _KEY_MASK)
            return list(keys.tolist())
        rows = np.empty((len(parents), size + 1), "<i4")
        rows[:, 0] = parents
        rows[:, 1:] = edges.tokens.reshape(-1, size)[starts]
        data, width = rows.tobytes(), 4 * (size + 1)
        return [data[at : at + width] for at in range(0, len(data), width)]

    def _root_of(self, namespace: Namespace) -> int:
        root = self._roots.get(namespace)
        if root is None:
            root = self.nodes.take()
            self.nodes.parent[root] = NO_NODE
            self._roots[namespace] = root
            self._root_names[root] = namespace
        return root


def num_equal(first: IntArray, second: IntArray) -> int:
    """Number of leading items that are equal in two arrays of one length."""
    start, block, length = 0, _FIRST_BLOCK, len(first)
    while start < length:
        differs = first[start : start + block] != second[start : start + block]
        index = int(differs.argmax())
        if differs[index]:
            return start + index
        start += block
        block = min(16 * block, _MOST_BLOCK)
    return length
