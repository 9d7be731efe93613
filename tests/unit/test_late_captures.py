"""Graphs that ranks capture between steps, once they have met again: the choice is one of the steps alone."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from radixmesh.daemons.worker.cuda.step.late_captures import PADDED_STEPS, LateCaptures

SIZES = (1, 2, 4, 8, 16)


def test_the_first_graph_serves_all_steps() -> None:
    late = LateCaptures(SIZES)
    assert late.choose(2) == (16, True)
    assert {late.choose(size) for size in SIZES} == {(16, False)}


def test_a_size_that_comes_again_and_again_gets_a_graph_of_its_own() -> None:
    late = LateCaptures(SIZES)
    choices = [late.choose(4) for _ in range(PADDED_STEPS + 3)]
    assert choices == [(16, True), *[(16, False)] * PADDED_STEPS, (4, True), (4, False)]
    assert late.choose(2) == (4, False), "the next larger one, until it has come as often"
    assert late.choose(8) == (16, False)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_each_graph_is_captured_once_and_large_enough(seed: int) -> None:
    pick, late, other = random.Random(seed), LateCaptures(SIZES), LateCaptures(SIZES)
    captured: list[int] = []
    for _ in range(2_000):
        num_rows = pick.choice(SIZES[: pick.randint(1, len(SIZES))])
        rows, is_new = choice = late.choose(num_rows)
        assert choice == other.choose(num_rows), "ranks that see the same steps choose alike"
        assert rows >= num_rows and is_new == (rows not in captured)
        captured += [rows] * is_new
    assert captured[0] == SIZES[-1] and sorted(captured) == list(SIZES)
