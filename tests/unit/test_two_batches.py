"""Two half batches in turns: the order of their exchanges, and what an exception in one of them does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.daemons.worker.cpu.two_batches import TwoBatches, halves
from radixmesh.daemons.worker.runner import Segment


def _segments(lengths: list[int]) -> list[Segment]:
    none = np.zeros(0, np.int32)
    return [Segment(slot=i, ids=np.zeros(n, np.int32), start=0, pages=none) for i, n in enumerate(lengths)]


def test_halves_alternate_at_every_yield_point() -> None:
    seen: list[str] = []
    batches = TwoBatches()

    def half(name: str, points: int) -> Callable[[], str]:
        def run() -> str:
            for point in range(points):
                seen.append(f"{name}{point}")
                batches.pass_on()
            return name

        return run

    for _ in range(3):
        seen.clear()
        assert batches.run(half("a", 3), half("b", 3)) == ("a", "b")
        assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]
    # One that has fewer of them, or none, leaves the other to itself.
    assert batches.run(half("a", 0), half("b", 2)) == ("a", "b")
    assert batches.run(half("a", 4), half("b", 1)) == ("a", "b")
    batches.pass_on()
    assert not [thread for thread in threading.enumerate() if thread.name == "second-half"], "a step leaves no thread"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("point", [0, 1, 2])
def test_what_one_half_raises_ends_both(failing: int, point: int) -> None:
    batches, reached = TwoBatches(), [0, 0]

    def half(index: int) -> Callable[[], int]:
        def run() -> int:
            for number in range(3):
                if index == failing and number == point:
                    raise ValueError("broken")
                batches.pass_on()
                reached[index] += 1
            return index

        return run

    with pytest.raises(ValueError, match="broken"):
        batches.run(half(0), half(1))
    assert max(reached) <= point + 1
    assert batches.run(lambda: 1, lambda: 2) == (1, 2), "the next step runs"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), max_size=12))
def test_halves_hold_all_segments_in_their_order(lengths: list[int]) -> None:
    segments = _segments(lengths)
    first, second = halves(segments)
    assert [*first, *second] == segments
    rows = [sum(len(segment.ids) for segment in half) for half in (first, second)]
    assert abs(rows[0] - rows[1]) <= max(lengths, default=0)
