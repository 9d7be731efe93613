"""Trees of drafts: order, runs, cuts and the path that is accepted, against walks of the same tree by its parents."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafting import sample_of

from radixmesh.daemons.worker.cpu.growing_tree import GrowingTree, Ranked, ranked_rows
from radixmesh.daemons.worker.cpu.tree_rows import accepted_rows, attention_parts, drafts_before, moves_of
from radixmesh.daemons.worker.runner import Segment
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree, runs


@st.composite
def _grown(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ids and parents of drafts, siblings with different ids."""
    num = draw(st.integers(0, 14))
    parents = [draw(st.integers(0, row)) for row in range(num)]
    return list(range(10, 10 + num)), parents


def _paths(ids: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Ids from the root to each draft."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def _paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return _paths(tree.ids.tolist(), tree.parents[1:].tolist())


@given(_grown())
def test_rows_are_in_preorder_and_the_tree_is_the_same(grown: tuple[list[int], list[int]]) -> None:
    tree = DraftTree.grown(*grown)
    assert _paths_of(tree) == _paths(*grown)
    path = [0]
    for row, parent in enumerate(tree.parents.tolist()[1:], start=1):
        assert parent in path, "a row follows one that is on the path of the row before it"
        path = [*path[: path.index(parent) + 1], row]
    assert tree.is_chain == (grown[1] == list(range(len(grown[0]))))


@given(_grown())
def test_runs_cover_the_rows_each_behind_its_path(grown: tuple[list[int], list[int]]) -> None:
    parents = DraftTree.grown(*grown).parents
    found = runs(parents)
    assert [row for run in found for row in range(run.first, run.first + run.length)] == list(range(len(parents)))
    for run in found:
        path = run.path.tolist()
        assert path[-run.length :] == list(range(run.first, run.first + run.length))
        assert path[0] == 0 and [parents[row] for row in path[1:]] == path[:-1]


@given(_grown(), st.integers(0, 14), st.sets(st.integers(10, 24), max_size=3))
def test_a_cut_tree_keeps_the_paths_that_hold_nothing_of_what_went(
    grown: tuple[list[int], list[int]], most: int, outside: set[int]
) -> None:
    tree = DraftTree.grown(*grown)
    ids = np.array([1000 + token if token in outside else token for token in tree.ids.tolist()], np.int32)
    cut = DraftTree(ids, tree.parents).cut(most, 1000)
    kept = set(tree.ids[:most].tolist()) - outside
    assert _paths_of(cut) == {path for path in _paths_of(tree) if set(path) <= kept}


def _segment(tree: DraftTree, start: int, page_size: int) -> Segment:
    ids = np.concatenate(([9], tree.ids)).astype(np.int32)
    pages = np.arange(-(-(start + len(ids)) // page_size), dtype=np.int32) * 3
    return Segment(
        slot=0, ids=ids, start=start, pages=pages, sample=sample_of([9], []), max_tokens=len(ids), parents=tree.parents
    )


@given(_grown(), st.integers(0, 9), st.sampled_from([1, 4]), st.integers(0, 2**16))
def test_what_is_sampled_is_followed_and_its_kv_comes_to_its_positions(
    grown: tuple[list[int], list[int]], start: int, page_size: int, seed: int
) -> None:
    tree = DraftTree.grown(*grown)
    segment = _segment(tree, start, page_size)
    parts, before = attention_parts(segment, page_size), drafts_before(segment)
    written = np.concatenate([part.kv_slots[part.start :] for part in parts])
    assert len(set(written.tolist())) == len(segment.ids)
    positions = np.concatenate([np.arange(part.start, part.start + part.length) for part in parts])
    assert positions.tolist() == [start + len(drafts) for drafts in before]
    rng = random.Random(seed)
    children = [[1] for _ in segment.ids]
    for token, parent in zip(tree.ids.tolist(), tree.parents[1:].tolist(), strict=True):
        children[parent].append(token)
    sampled = [rng.choice(ids) for ids in children]
    is_stuck = [row > 0 and rng.random() < 0.1 for row in range(len(segment.ids))]
    path = accepted_rows(segment, sampled, is_stuck)
    assert before[path[-1]].tolist() == [sampled[row] for row in path[:-1]]
    following = [row for row in range(1, len(segment.ids)) if tree.parents[row] == path[-1]]
    assert not any(segment.ids[row] == sampled[path[-1]] and not is_stuck[row] for row in following), (
        "it goes no further"
    )
    # By token of the pool, the row whose KV it has.
    held = dict(zip(written.tolist(), range(len(segment.ids)), strict=True))
    moves = moves_of(segment, path, page_size)
    held |= dict(zip(moves.targets.tolist(), [held[of] for of in moves.sources.tolist()], strict=True))
    assert [held[int(written[depth])] for depth in range(len(path))] == path


def test_the_surest_drafts_are_taken_with_those_that_they_follow() -> None:
    def ranked(*pairs: tuple[int, float]) -> Ranked:
        return Ranked(np.array([i for i, _ in pairs]), np.log([p for _, p in pairs]))

    tree = GrowingTree(2)
    tree.grow([ranked((1, 0.6), (2, 0.3))])
    assert tree.ids(tree.frontier).tolist() == [1, 2]
    tree.grow([ranked((3, 0.5), (4, 0.4)), ranked((5, 0.9), (6, 0.1))])
    # 0.6 x 0.5 and 0.3 x 0.9 are the best of the second level.
    assert tree.ids(tree.frontier).tolist() == [3, 5]
    tree.grow([ranked((7, 0.2), (8, 0.1)), ranked((9, 1.0), (7, 0.0001))])
    assert _paths_of(tree.best(5)) == {(1,), (2,), (1, 3), (2, 5), (2, 5, 9)}
    assert _paths_of(tree.best(3)) == {(1,), (2,), (1, 3)}
    assert tree.best(0).ids.tolist() == []


def test_rows_are_ranked_as_they_are_sampled() -> None:
    rows = np.array([[0.0, 2.0, 1.0, -np.inf], [np.nan] * 4, [0.0, np.inf, 1.0, np.inf]], np.float32)
    first, broken, infinite = ranked_rows(rows, [sample_of([1], [])] * 3, 8)
    assert first.ids.tolist() == [1, 2, 0]
    assert np.exp(first.scores).sum() == pytest.approx(1.0)
    assert len(broken.ids) == len(infinite.ids) == 0
    assert ranked_rows(rows[:1], [sample_of([1], [])], 2)[0].ids.tolist() == [1, 2]
