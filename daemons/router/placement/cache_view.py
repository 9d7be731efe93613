"""One replica's prefix cache as its scheduler reports it, kept in the common index.

Data-parallel ranks have a tree each, and the scheduler chooses the rank: for a router they are one cache, which holds
a prefix as long as one of them does. What lies in host memory, or in a store below that, is in an index of its own: it
has to be loaded, or fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from radixmesh.daemons.router.placement.prefix_index import PrefixIndex
from radixmesh.daemons.router.placement.prompt_keys import PromptKeys, block_ends
from radixmesh.daemons.router.placement.tree_summary import Run, TreeSummary, largest_subtrees

# Of a node beside its ids: the object, its numbers, its entry in the table. Measured with tracemalloc.
_NODE_BYTES = 400
_KEYS_A_SLICE = 4096


class ViewError(Exception):
    """Changes that do not fit what was reported before: only a new snapshot helps."""


class ViewTooLargeError(Exception):
    """The view needs more bytes than it may have."""


class Tier(IntEnum):
    """Memory that has a prefix, as `radixmesh.scheduler.v1.CacheTier`. STORE: probably."""

    DEVICE = 0
    HOST = 1
    STORE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Insert:
    """A new leaf. parent 0: at the top of its namespace. ids: i32 array, not empty. tier: of the top counts below."""

    node: int
    parent: int
    ids: bytes
    namespace: str
    weights_version: int
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The first num_upper tokens of node become node `upper`, which takes its place."""

    node: int
    upper: int
    num_upper: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """A leaf keeps its first num_left tokens."""

    node: int
    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChange:
    """One report, applied in this order. revision: of the cache after it; a snapshot's parts all carry the same one.
    store_id: of the store below, where others may share it; empty in all but the first report of a watch."""

    revision: int
    is_snapshot: bool = False
    is_reset: bool = False
    splits: Sequence[Split] = ()
    inserts: Sequence[Insert] = ()
    trims: Sequence[Trim] = ()
    evicted: Sequence[int] = ()
    store_id: str = ""


class _Node:
    """A run of tokens below its parent. before, after: sums of the prefixes that end at its start and at its end."""

    __slots__ = ("after", "before", "ids", "keys", "num_children", "parent", "start", "tier")

    def __init__(self, parent: int, start: int, ids: bytes, before: int, tier: _Tier) -> None:
        self.tier = tier
        self.parent = parent
        self.start = start
        self.ids = ids
        self.before = before
        self.after = before
        self.keys: tuple[int, ...] = ()
        self.num_children = 0


class _Tier:
    """One kind of memory: its index, and the prefixes that several trees of it hold, by how many more than one."""

    __slots__ = ("copies", "index")

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.copies: dict[int, int] = {}


class CacheView:
    """Nodes by id. Changes are applied as they are reported; the index holds the prefixes that end a block, lower those
    of trees in host memory and in a store (an index that is not there: the one before it)."""

    def __init__(
        self,
        replica: int,
        index: PrefixIndex,
        keys: PromptKeys,
        *,
        max_bytes: int,
        lower: Sequence[PrefixIndex] = (),
    ) -> None:
        self._replica = replica
        indexes = (index, *lower)
        self._tiers = tuple(_Tier(indexes[min(tier, len(lower))]) for tier in Tier)
        self._keys = keys
        self.max_bytes = self.max_store_bytes = max_bytes
        self._nodes: dict[int, _Node] = {}
        self._discarded: list[_Node] = []
        self.num_tokens = 0
        self.num_bytes = self.num_store_bytes = 0
        """Of all, and of what lies in a store."""
        self.weights_version = 0
        """The latest one reported; prefixes of others serve no new request."""

    def apply(self, change: CacheChange) -> None:
        """Raises ViewError for what does not fit, ViewTooLargeError; the view is to be cleared after either."""
        if change.is_reset:
            self.clear()
            for _ in self.clear_index():
                pass
        for split in change.splits:
            self._split(split)
        for insert in change.inserts:
            self._insert(insert)
        for trim in change.trims:
            self._trim(trim)
        for node in change.evicted:
            self._evict(node)

    def clear(self) -> None:
        """All nodes are gone; clear_index() takes their prefixes from the index, which may take long."""
        self._discarded.extend(self._nodes.values())
        self._nodes.clear()
        for tier in self._tiers:
            tier.copies.clear()
        self.num_tokens = self.num_bytes = self.num_store_bytes = 0

    def summary(self, *, max_nodes: int, max_visited: int) -> TreeSummary:
        """The largest subtrees among about max_visited nodes: takes the same time however large the cache is."""
        runs: dict[int, Run] = {}
        for number in self._nodes:
            if len(runs) >= max_visited:
                break
            path: list[tuple[int, Run]] = []
            while number and number not in runs and len(path) < max_visited:
                node = self._nodes[number]
                path.append((number, Run(node.parent, node.start, len(node.ids) // 4)))
                number = node.parent
            # A chain that was cut hangs in the air: largest_subtrees() leaves it out.
            runs.update(reversed(path))
        return TreeSummary(largest_subtrees(runs, max_nodes), len(self._nodes), self.num_tokens)

    def clear_index(self) -> Iterator[None]:
        """Takes discarded prefixes from the index, some thousand at each step. Finish it before the next change."""
        for tier in self._tiers:
            pending = (key for node in self._discarded if node.tier is tier for key in node.keys)
            while batch := list(islice(pending, _KEYS_A_SLICE)):
                tier.index.remove(self._replica, batch)
                yield
        self._discarded.clear()

    def _insert(self, insert: Insert) -> None:
        if insert.node in self._nodes or insert.node < 1 or not insert.ids or len(insert.ids) % 4:
            raise ViewError(f"node {insert.node} is inserted twice, or has no ids")
        if insert.parent:
            parent = self._node(insert.parent)
            start, before, tier = parent.start + len(parent.ids) // 4, parent.after, parent.tier
            parent.num_children += 1
        else:
            start, before = 0, self._keys.root(insert.namespace, insert.weights_version)
            tier = self._tiers[insert.tier]
        self.weights_version = max(self.weights_version, insert.weights_version)
        node = _Node(insert.parent, start, insert.ids, before, tier)
        self._hash(node)
        for key in tier.index.add(self._replica, node.keys):
            tier.copies[key] = tier.copies.get(key, 0) + 1
        self._nodes[insert.node] = node
        self._count(tier, len(insert.ids), 1)

    def _split(self, split: Split) -> None:
        node = self._node(split.node)
        cut = 4 * split.num_upper
        if split.upper in self._nodes or split.upper < 1 or not 0 < cut < len(node.ids):
            raise ViewError(f"node {split.node} cannot be split at {split.num_upper}")
        upper = _Node(node.parent, node.start, node.ids[:cut], node.before, node.tier)
        self._hash(upper)
        upper.num_children = 1
        node.parent, node.start, node.ids, node.before = (
            split.upper,
            node.start + split.num_upper,
            node.ids[cut:],
            upper.after,
        )
        # The same tuple of keys, divided: the index does not change.
        node.keys = node.keys[len(upper.keys) :]
        self._nodes[split.upper] = upper
        self._count(node.tier, 0, 1)

    def _trim(self, trim: Trim) -> None:
        node = self._node(trim.node)
        if node.num_children or not 0 < 4 * trim.num_left < len(node.ids):
            raise ViewError(f"node {trim.node} cannot be trimmed to {trim.num_left}")
        before = node.keys
        self._count(node.tier, 4 * trim.num_left - len(node.ids), 0)
        node.ids = node.ids[: 4 * trim.num_left]
        self._hash(node)
        self._remove(node.tier, before[len(node.keys) :])

    def _evict(self, number: int) -> None:
        node = self._node(number)
        if node.num_children:
            raise ViewError(f"node {number} is evicted before its children")
        if node.parent:
            self._nodes[node.parent].num_children -= 1
        del self._nodes[number]
        self._remove(node.tier, node.keys)
        self._count(node.tier, -len(node.ids), -1)

    def _remove(self, tier: _Tier, keys: Sequence[int]) -> None:
        """One tree holds these prefixes no more; others may."""
        copies = tier.copies
        if copies:
            last = [key for key in keys if key not in copies]
            for key in keys:
                if key in copies:
                    copies[key] -= 1
                    if not copies[key]:
                        del copies[key]
            keys = last
        tier.index.remove(self._replica, keys)

    def _hash(self, node: _Node) -> None:
        sums = self._keys.sums(node.ids, node.start, node.before)
        node.after = int(sums[-1])
        node.keys = tuple(sums[block_ends(node.start, len(sums))].tolist())

    def _node(self, number: int) -> _Node:
        node = self._nodes.get(number)
        if node is None:
            raise ViewError(f"there is no node {number}")
        return node

    def _count(self, tier: _Tier, id_bytes: int, nodes: int) -> None:
        self.num_tokens += id_bytes // 4
        # A key costs about 100 bytes in the index, for each block of 32 tokens: as much as 3.2 bytes a token.
        num_bytes = id_bytes + id_bytes * 4 // 5 + nodes * _NODE_BYTES
        self.num_bytes += num_bytes
        if tier is self._tiers[Tier.STORE]:
            self.num_store_bytes += num_bytes
            if self.num_store_bytes > self.max_store_bytes:
                message = f"prefixes in a store need {self.num_store_bytes} bytes, more than {self.max_store_bytes}"
                raise ViewTooLargeError(message)
        if self.num_bytes > self.max_bytes:
            raise ViewTooLargeError(f"{self.num_tokens} tokens need {self.num_bytes} bytes, more than {self.max_bytes}")
