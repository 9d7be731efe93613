"""Pictures of prefix trees: bounded, and the largest subtrees whatever the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.placement.cache_view import CacheChange, CacheView, Insert
from radixmesh.daemons.router.placement.prefix_index import PrefixIndex
from radixmesh.daemons.router.placement.prompt_keys import PromptKeys
from radixmesh.daemons.router.placement.tree_summary import Run, largest_subtrees

# A node's parent among those before it (0: at the top), and its tokens.
TREES = st.lists(st.tuples(st.integers(0, 2**16), st.integers(1, 50)), max_size=60)


def make_runs(picks: list[tuple[int, int]]) -> dict[int, Run]:
    runs: dict[int, Run] = {}
    for number, (pick, num_tokens) in enumerate(picks, 1):
        parent = pick % number
        start = runs[parent].start + runs[parent].num_tokens if parent else 0
        runs[number] = Run(parent, start, num_tokens)
    return runs


@given(TREES, st.integers(1, 80))
def test_the_largest_subtrees_with_their_parents_first(picks: list[tuple[int, int]], max_nodes: int) -> None:
    runs = make_runs(picks)

    def below(number: int) -> int:
        children = (child for child, run in runs.items() if run.parent == number)
        return runs[number].num_tokens + sum(below(child) for child in children)

    nodes = largest_subtrees(runs, max_nodes)
    assert len(nodes) == min(max_nodes, len(runs))
    for index, node in enumerate(nodes):
        assert node.parent < index and node.subtree_tokens == below(node.number)
        assert runs[node.number].parent == (nodes[node.parent].number if node.parent >= 0 else 0)
    sizes = sorted((below(number) for number in runs), reverse=True)
    assert [node.subtree_tokens for node in nodes] == sizes[: len(nodes)]


def test_a_large_cache_costs_no_more_than_its_bound() -> None:
    view = CacheView(0, PrefixIndex(), PromptKeys(1), max_bytes=1 << 30)
    # A chain longer than what is looked at, and many leaves beside it.
    chain = [Insert(node=i, parent=i - 1, ids=bytes(8), namespace="", weights_version=1) for i in range(1, 3001)]
    leaves = [Insert(node=i, parent=0, ids=bytes(12), namespace="", weights_version=1) for i in range(4000, 9000)]
    view.apply(CacheChange(revision=1, inserts=[*chain, *leaves]))
    summary = view.summary(max_nodes=50, max_visited=1000)
    assert (len(summary.nodes), summary.num_nodes, summary.num_tokens) == (50, 8000, 3000 * 2 + 5000 * 3)
    assert summary.nodes[0].subtree_tokens == 1000 * 2
    # Leaves alone are looked at here: of a chain, its lower end would hang in the air.
    view.apply(CacheChange(revision=2, evicted=[*range(3000, 0, -1)]))
    assert len(view.summary(max_nodes=50, max_visited=1000).nodes) == 50
