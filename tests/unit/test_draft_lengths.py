"""The length of drafts follows what they yield and cost: a made-up device, whose time is counted."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from radixmesh.daemons.worker.speculation.adaptive import DraftLengths

PLAIN_NS = 4_000_000
K = 4


def _run(
    lengths: DraftLengths,
    num_rows: int,
    cost: float,
    acceptance: float,
    num_tokens: int,
    *,
    lag: int = 3,
    has_chunks: Callable[[int], bool] = lambda number: False,
) -> float:
    """Time for so many tokens a row, over that without drafts. Each draft is right with the probability `acceptance`
    if those before it are. has_chunks: of a step, by its number: its time is not told."""
    random = np.random.default_rng(num_rows)
    slots = np.arange(num_rows, dtype=np.int32)
    flying: deque[tuple[np.ndarray, int, int | None]] = deque()
    total_ns, yielded = 0, 0
    numbers = itertools.count()
    while yielded < num_tokens * num_rows:
        is_alone = not has_chunks(next(numbers))
        most = lengths.choose(slots, is_alone=is_alone)
        is_right = random.random((num_rows, K)) < acceptance
        counts = (1 + np.cumprod(is_right, axis=1).sum(axis=1) * (most > 0)).astype(np.int32)
        duration = int(PLAIN_NS * (cost if most else 1.0) * random.uniform(0.98, 1.02))
        flying.append((counts, most, duration if is_alone else None))
        total_ns, yielded = total_ns + duration, yielded + int(counts.sum())
        if len(flying) > lag:
            lengths.observe(slots, *flying.popleft())
    return total_ns / (yielded / num_rows * PLAIN_NS)


@pytest.mark.parametrize(("num_rows", "cost"), [(1, 1.1), (1, 1.3), (8, 1.2), (64, 1.9), (256, 3.6)])
def test_drafts_that_are_wrong_cost_less_than_a_fiftieth(num_rows: int, cost: float) -> None:
    lengths = DraftLengths(256, K)
    assert _run(lengths, num_rows, cost, 0.0, 600) < 1.02
    # Requests that begin later know what was usual.
    for slot in range(num_rows):
        lengths.admitted(slot)
    assert _run(lengths, num_rows, cost, 0.0, 600) < 1.02


@pytest.mark.parametrize(("num_rows", "cost", "speed_up"), [(1, 1.12, 2.3), (8, 1.2, 2.1), (64, 1.9, 1.35)])
def test_drafts_that_are_right_are_made(num_rows: int, cost: float, speed_up: float) -> None:
    """2.77 tokens a step at an acceptance of 0.7."""
    assert 1 / _run(DraftLengths(64, K), num_rows, cost, 0.7, 600) > speed_up


def test_drafts_are_off_where_the_batch_makes_them_dear_and_on_again_where_it_does_not() -> None:
    lengths = DraftLengths(256, K)
    assert _run(lengths, 1, 1.12, 0.7, 300) < 0.5
    assert _run(lengths, 256, 3.6, 0.7, 300) < 1.02
    assert _run(lengths, 1, 1.12, 0.7, 300) < 0.5


def test_a_text_that_begins_to_repeat_itself_is_drafted_soon() -> None:
    lengths = DraftLengths(4, K)
    _run(lengths, 1, 1.12, 0.0, 300)
    assert 1 / _run(lengths, 1, 1.12, 0.9, 200) > 2.5


def test_steps_with_chunks_lose_no_trial() -> None:
    """Their time tells nothing of drafts: a trial in one of them would be waited for ever after."""
    lengths = DraftLengths(4, K)
    assert 1 / _run(lengths, 1, 1.12, 0.7, 600, has_chunks=lambda number: number % 3 != 0) > 2
    # Their tokens still say what drafts yield.
    assert _run(lengths, 1, 1.12, 0.0, 600, has_chunks=lambda number: True) < 1.02


def test_a_new_request_begins_with_what_drafts_yielded_of_late() -> None:
    """Its first step drafts where drafts pay for all others, and does not where they are never right."""
    for acceptance, is_drafted in ((0.9, True), (0.0, False)):
        lengths = DraftLengths(64, K)
        _run(lengths, 8, 1.4, acceptance, 600)
        if is_drafted:  # A single step tells little.
            lengths.observe(np.arange(8, dtype=np.int32), np.ones(8, np.int32), K, None)
        fresh = np.arange(8, 16, dtype=np.int32)
        for slot in fresh:
            lengths.admitted(int(slot))
        chosen = [lengths.choose(fresh, is_alone=False) for _ in range(8)]
        assert chosen == [K * is_drafted] * 8, acceptance
