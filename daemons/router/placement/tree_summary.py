"""A bounded picture of a replica's prefix tree: runs of tokens by position and size, without any id."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple


class Run(NamedTuple):
    """A node of the tree: num_tokens tokens from position `start`. parent: its number, 0 = at the top."""

    parent: int
    start: int
    num_tokens: int


class TreeNode(NamedTuple):
    """A run in the picture. parent: its index there, -1 = at the top. subtree_tokens: of it and all below it."""

    parent: int
    start: int
    num_tokens: int
    subtree_tokens: int
    number: int
    """The node's number in the cache: equal in two pictures where it is the same node."""


class TreeSummary(NamedTuple):
    """The largest subtrees, parents before children. num_nodes, num_tokens: of the whole cache."""

    nodes: list[TreeNode]
    num_nodes: int
    num_tokens: int


def largest_subtrees(runs: Mapping[int, Run], max_nodes: int) -> list[TreeNode]:
    """The nodes of `runs` with most tokens in and below them, parents before children; at most max_nodes.

    Runs whose parent is not among them are left out.
    """
    children: dict[int, list[int]] = {}
    for number, run in runs.items():
        children.setdefault(run.parent, []).append(number)
    below = _subtree_tokens(runs, children)
    nodes: list[TreeNode] = []
    # A parent's subtree is never smaller than its child's: the heap gives parents first.
    heap = [(-below[number], number, -1) for number in children.get(0, ())]
    heapq.heapify(heap)
    while heap and len(nodes) < max_nodes:
        _, number, parent = heapq.heappop(heap)
        run = runs[number]
        for child in children.get(number, ()):
            heapq.heappush(heap, (-below[child], child, len(nodes)))
        nodes.append(TreeNode(parent, run.start, run.num_tokens, below[number], number))
    return nodes


def _subtree_tokens(runs: Mapping[int, Run], children: Mapping[int, list[int]]) -> dict[int, int]:
    order: list[int] = []
    pending = list(children.get(0, ()))
    while pending:
        number = pending.pop()
        order.append(number)
        pending.extend(children.get(number, ()))
    below = {number: runs[number].num_tokens for number in order}
    for number in reversed(order):
        parent = runs[number].parent
        if parent:
            below[parent] += below[number]
    return below
