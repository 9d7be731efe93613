"""Page records of a worker as its scheduler puts them together: all pages in order, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from radixmesh.daemons.runtime.arrays import empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.scheduler.messages import snapshot_of


def part(first_page: int, num_pages: int) -> PageRecords:
    zeros = np.zeros(num_pages, np.int32)
    return PageRecords(
        first_page=first_page,
        generations=zeros,
        filled=zeros,
        previous_pages=zeros - 1,
        previous_generations=zeros,
        namespace_indexes=zeros,
        weights_versions=zeros,
        ids=empty_ints(),
    )


def test_ranges_that_follow_each_other_are_one_snapshot() -> None:
    # Further messages carry names alone.
    snapshot = snapshot_of([part(0, 3), part(3, 2), part(5, 0)], ("",), ((), {}), 5)
    assert len(snapshot.records.filled) == 5


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 3)],
        [(0, 3), (4, 1)],
        [(3, 2), (0, 3)],
        # As of another tier, from a worker that knows more of them than this scheduler.
        [(0, 3), (3, 2), (0, 4)],
        [(0, 3), (3, 4)],
    ],
)
def test_other_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(MeshError) as refused:
        snapshot_of([part(*each) for each in ranges], ("",), ((), {}), 5)
    assert refused.value.reason_name == "PROTOCOL_VIOLATION"
