"""Shapes of steps that verify drafts: few are captured, and each step finds one with room for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.worker.cuda.step.step_graphs import default_graph_rows, tuned_rows
from radixmesh.daemons.worker.cuda.step.verify_shapes import (
    DraftLayout,
    StepShape,
    VerifyShapes,
    first_positions,
    ragged_sizes,
)
from radixmesh.daemons.worker.speculation.adaptive import RowLengths


@pytest.mark.parametrize("layout", list(DraftLayout))
@given(max_slots=st.integers(1, 300), max_drafts=st.integers(1, 9), data=st.data())
def test_each_step_finds_the_smallest_shape_with_room_for_it(layout, max_slots, max_drafts, data):
    shapes = VerifyShapes(default_graph_rows(max_slots), max_drafts, layout, has_plain=True)
    num_rows = data.draw(st.integers(1, max_slots))
    plain = shapes.of(num_rows, None)
    assert plain in shapes.captured and plain.num_positions == 1 and plain.num_rows == plain.size >= num_rows
    sizes = shapes.sizes(num_rows)
    assert [size.num_drafts for size in sizes] == sorted({size.num_drafts for size in sizes})
    assert len({size.key for size in sizes}) == len(sizes) and sizes[-1].num_drafts == num_rows * max_drafts
    for size in sizes:
        by_row = np.full(num_rows, size.num_drafts // num_rows, np.int32)
        by_row[: size.num_drafts % num_rows] += 1
        shape = shapes.of(num_rows, RowLengths(by_row, size))
        assert shape in shapes.captured and shape.num_rows >= num_rows
        assert by_row.max() < shape.num_positions <= 1 + max_drafts
        assert num_rows + size.num_drafts <= shape.size <= shape.num_rows * shape.num_positions
        if layout is DraftLayout.RAGGED:
            assert shape.size == size.key, "what a size costs is that of one captured step"


@given(num_slots=st.sampled_from([1, 8, 64, 256, 1024]), max_drafts=st.integers(1, 8))
def test_ragged_steps_are_few_and_have_kernels_that_are_tuned_in_any_case(num_slots, max_drafts):
    graph_rows = default_graph_rows(num_slots)
    ragged = VerifyShapes(graph_rows, max_drafts, DraftLayout.RAGGED, has_plain=True)
    whole = VerifyShapes(graph_rows, max_drafts, DraftLayout.WHOLE, has_plain=True)
    assert len(ragged.captured) <= len(whole.captured) + 8
    assert {*ragged_sizes(graph_rows, max_drafts)} <= {*tuned_rows(graph_rows, max_drafts)}


def test_what_is_not_captured_has_no_padding():
    for layout in DraftLayout:
        shapes = VerifyShapes((), 4, layout, has_plain=True)
        assert not shapes.captured
        assert shapes.of(3, None) == StepShape(3, 1, 3)
        assert shapes.of(3, RowLengths.even(3, 4)) == StepShape(3, 5, 15)
    by_row = RowLengths.even(3, 1)._replace(by_row=np.array([0, 4, 1], np.int32))
    assert VerifyShapes((), 4, DraftLayout.RAGGED, has_plain=True).of(3, by_row) == StepShape(3, 5, 8)


@given(data=st.data(), num_positions=st.integers(2, 6), num_rows=st.integers(1, 9))
def test_rows_of_a_ragged_step_lie_one_behind_the_other_to_its_end(data, num_positions, num_rows):
    by_row = np.array(data.draw(st.lists(st.integers(0, num_positions - 1), max_size=num_rows)), np.int32)
    used = len(by_row) + int(by_row.sum())
    size = data.draw(st.integers(max(1, used), num_rows * num_positions))
    firsts = first_positions(StepShape(num_rows, num_positions, size), len(by_row), by_row)
    sizes = np.diff(np.append(firsts, size))
    assert firsts[0] == 0 and (sizes >= 0).all() and (sizes <= num_positions).all()
    assert (sizes[: len(by_row)] >= by_row + 1).all()
