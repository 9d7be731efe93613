"""The contract of drafters, which every one of them passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.drafting import cpu_drafter, drafter_of, sample_of, target_folder

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.guided.guides import jump_forward
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.speculation.draft_tree import runs
from radixmesh.daemons.worker.speculation.drafter import (
    ByGrammar,
    Drafter,
    DraftRow,
    EachRow,
    NoDrafts,
    drafts_of,
)
from radixmesh.daemons.worker.speculation.registry import drafters

VOCAB_SIZE = 50
NETWORK_VOCAB_SIZE = 768
NUM_ROW_TOKENS = 64
"""Pages of a row, of a token each."""
SAMPLE = sample_of([1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2])


class _Forced:
    """A guide whose grammar forces ids."""

    def forced_ids(self, most: int) -> list[int]:
        return [7, 8, 9][:most]


def _forgetful() -> Drafter:
    known = {(tuple(SAMPLE.prompt_ids.tolist()), SAMPLE.sampling): [3, 1, 2, 3, 1, 2]}
    return drafter_of(known, seed=1, share=1.0)


def _network(algorithm: str, model: str, topk: int = 1) -> Drafter:
    num_tokens = NUM_ROW_TOKENS * len(_rows())
    runner = load_cpu_runner(
        target_folder(algorithm, model), num_pages=num_tokens, threads=1, max_total_len=NUM_ROW_TOKENS
    )
    assert isinstance(runner, CpuRunner)
    return cpu_drafter(algorithm, runner, model, max_drafts=9, topk=topk)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "standalone": lambda: _network("standalone", "tiny-llama"),
    "eagle3": lambda: _network("eagle3", "tiny-llama"),
    "mtp": lambda: _network("mtp", "tiny-deepseek"),
    "standalone trees": lambda: _network("standalone", "tiny-llama", 3),
    "eagle3 trees": lambda: _network("eagle3", "tiny-llama", 3),
    **{name: (lambda name=name: drafters().create(name)) for name in drafters().names},
    "none": NoDrafts,
    "forced": lambda: EachRow(jump_forward),
    "by_grammar": lambda: ByGrammar(EachRow(jump_forward), 2, drafters().create("ngram"), 3),
    "of_tests": _forgetful,
}


NETWORKS = ("standalone", "eagle3", "mtp", "standalone trees", "eagle3 trees")


def _rows() -> list[DraftRow]:
    samples: list[SampleInput] = [
        sample_of([4], []),
        SAMPLE,
        sample_of([6, 6, 6], [6]),
        sample_of([9, 8], [7, 6, 5], guide=_Forced()),
        sample_of(list(range(40)), []),
    ]
    known = [sample for sample in samples if sample is SAMPLE]
    wanted = [(sample, most) for sample in known for most in (1, 2, 6)]
    wanted += [(sample, most) for sample in samples if sample is not SAMPLE for most in (1, 4, 9)]
    return [
        DraftRow(
            sample=sample, most=most, slot=slot, pages=np.arange(NUM_ROW_TOKENS, dtype=np.int32) + slot * NUM_ROW_TOKENS
        )
        for slot, (sample, most) in enumerate(wanted)
    ]


def _usable(name: str) -> list[DraftRow]:
    rows = _rows()
    # That of tests knows one request.
    return [row for row in rows if row.sample is SAMPLE] if name == "of_tests" else rows


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_drafter_proposes_ids_within_the_bounds_of_each_row(name):
    rows = _usable(name)
    proposals = DRAFTERS[name]().propose(rows)
    assert len(proposals) == len(rows)
    for row, ids in zip(rows, proposals, strict=True):
        assert ids.dtype == np.int32 and ids.ndim == 1 and len(ids) <= row.most
        assert all(0 <= token < (NETWORK_VOCAB_SIZE if name in NETWORKS else VOCAB_SIZE) for token in ids.tolist())
        # A head has no row of its own for a first token.
        has_row = name in NETWORKS and row.sample.position > 1
        assert len(ids) == row.most or not has_row, "a network always has a guess"
    assert not len(DRAFTERS[name]().propose([]))


@pytest.mark.parametrize("name", sorted(set(DRAFTERS) - {"of_tests"}))
def test_a_proposal_depends_on_its_own_row_alone(name):
    """Another row's tokens may be another tenant's; and a proposal that looked at them would tell of them."""
    rows = _rows()
    together = DRAFTERS[name]().propose(rows)
    drafter = DRAFTERS[name]()
    for row, ids in reversed(list(zip(rows, together, strict=True))):
        assert drafter.propose([row])[0].tolist() == ids.tolist()


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_a_proposal_changes_nothing_that_it_was_given(name):
    rows = _usable(name)
    before = [(row.sample.prompt_ids.copy(), row.sample.output_ids.copy()) for row in rows]
    for ids in DRAFTERS[name]().propose(rows):
        ids[:] = 0
    for row, (prompt_ids, output_ids) in zip(rows, before, strict=True):
        np.testing.assert_array_equal(row.sample.prompt_ids, prompt_ids)
        np.testing.assert_array_equal(row.sample.output_ids, output_ids)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_trees_are_in_preorder_and_siblings_differ(name):
    """Within the bounds, the same whatever rows are beside them, and a chain where a drafter knows no more."""
    rows = _usable(name)
    trees = DRAFTERS[name]().propose_trees(rows)
    assert len(trees) == len(rows)
    alone = DRAFTERS[name]()
    for row, tree in zip(rows, trees, strict=True):
        assert tree.ids.dtype == tree.parents.dtype == np.int32
        assert len(tree.ids) <= row.most and len(tree.parents) == len(tree.ids) + 1
        assert "trees" in name or tree.is_chain
        followed = list(zip(tree.parents[1:].tolist(), tree.ids.tolist(), strict=True))
        assert len(set(followed)) == len(followed)
        for run in runs(tree.parents):
            assert run.path[-run.length :].tolist() == list(range(run.first, run.first + run.length))
        if name != "of_tests":
            (again,) = alone.propose_trees([row])
            assert (again.ids.tolist(), again.parents.tolist()) == (tree.ids.tolist(), tree.parents.tolist())
    if "trees" in name:
        assert any(len(tree.ids) == 9 and not tree.is_chain for tree in trees)


def test_rows_with_a_grammar_are_drafted_by_it_alone():
    drafter = DRAFTERS["by_grammar"]()
    guided = DraftRow(sample=sample_of([1, 2, 3], [1, 2], guide=_Forced()), most=9)
    free = DraftRow(sample=sample_of([1, 2, 3], [1, 2]), most=9)
    assert [ids.tolist() for ids in drafter.propose([free, guided, free])] == [[3, 1, 2], [7, 8], [3, 1, 2]]


def test_drafts_end_before_an_id_outside_the_vocabulary():
    """It has no embedding: a drafter with another vocabulary must not have a step read beyond the table."""
    drafter = EachRow(lambda sample, most: [3, 49, 50, 4, -1][:most])
    rows = [DraftRow(sample=SAMPLE, most=most) for most in (1, 2, 5)]
    assert [ids.tolist() for ids in drafts_of(drafter, rows, VOCAB_SIZE)] == [[3], [3, 49], [3, 49]]
