"""Drafts as a scheduler counts them, and what it refuses of a worker."""

from __future__ import annotations

import numpy as np
import pytest

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.results.draft_counts import DraftCounts, check_drafts
from radixmesh.daemons.scheduler.results.in_flight import PlannedStep, Rows
from radixmesh.daemons.scheduler.results.joined_results import joined


def _result(counts: list[int], drafted: list[int], accepted: list[int]) -> StepResult:
    ids = np.zeros(max(0, sum(counts)), np.int32)
    columns = (np.array(column, np.int32) for column in (counts, drafted, accepted))
    return StepResult(epoch=1, step_id=3, ids=ids, **dict(zip(("counts", "drafted", "accepted"), columns, strict=True)))


def test_drafts_are_counted_by_position():
    counts = DraftCounts()
    counts.add(_result([1, 3, 5, 1], [0, 2, 4, 1], [0, 2, 4, 0]))
    counts.add(_result([1, 2], [], []))
    counts.add(_result([2], [3], [1]))
    assert counts.drafted_by_position[:6].tolist() == [4, 3, 2, 1, 0, 0]
    assert counts.accepted_by_position[:6].tolist() == [3, 2, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("counts", "drafted", "accepted"),
    [
        ([1], [5], [0]),  # More than a row has room for.
        ([1], [2**31 - 1], [0]),
        ([3], [1], [2]),  # More accepted than drafted.
        ([2], [4], [2]),  # More accepted than yielded: a row's last token is sampled.
        ([0], [4], [1]),
        ([2], [], [1]),
    ],
)
def test_drafts_that_no_row_can_have_end_the_stream(counts, drafted, accepted):
    with pytest.raises(MeshError, match="drafts that its rows cannot have"):
        check_drafts(_result(counts, drafted, accepted), 5)


def test_drafts_of_rows_pass():
    check_drafts(_result([5, 1, 0, 2], [4, 4, 4, 0], [4, 0, 0, 0]), 5)
    check_drafts(_result([1, 1], [], []), 1)


def test_drafts_of_ranks_stand_beside_the_counts_of_all_rows():
    """A rank that drafts nothing sends no numbers."""
    rows = Rows(np.array([0, 1, 4, 2, 5], np.int32), np.ones(5, np.int32))
    plan = StepPlan(epoch=1, step_id=3, decode_set=np.array([0, 1, 4], np.int32))
    step = PlannedStep(plan=plan, rows=rows, num_decodes=3, chunks=(), num_tokens=5, sent_s=0.0)
    both = joined([_result([2, 3, 1], [4, 3, 0], [1, 2, 0]), _result([1, 1], [], [])], step, 4)
    assert both.counts.tolist() == [2, 3, 1, 1, 1]
    assert both.drafted.tolist() == [4, 3, 0, 0, 0] and both.accepted.tolist() == [1, 2, 0, 0, 0]
    check_drafts(both, 5)
