"""Acceptance of drafts by row: a row by itself is what it is among others that are told the same."""

import numpy as np
import pytest

from radixmesh.daemons.worker.speculation.row_acceptance import RowAcceptance

K = 4


@pytest.mark.parametrize("seed", range(4))
def test_one_row_counts_as_two_that_are_told_the_same(seed):
    rng = np.random.default_rng(seed)
    alone, twins = RowAcceptance(8, K), RowAcceptance(8, K)
    for _ in range(400):
        slot = int(rng.integers(4))
        pair = np.array([slot, slot + 4])
        if rng.random() < 0.02:
            is_sampled = bool(rng.random() < 0.5)
            alone.admitted(slot, is_sampled=is_sampled)
            for twin in pair.tolist():
                twins.admitted(twin, is_sampled=is_sampled)
        alone.passed()
        twins.passed()
        if rng.random() < 0.7:
            # Rows without room yield nothing; of those that drafted nothing nothing is told.
            count, drafted = int(rng.integers(0, K + 2)), int(rng.integers(0, K + 1))
            alone.observe(pair[:1], np.array([count], np.int32), np.array([drafted], np.int32))
            twins.observe(pair, np.array([count] * 2, np.int32), np.array([drafted] * 2, np.int32))
        likely_2K = twins.by_position(pair)
        np.testing.assert_allclose(alone.by_position(pair[:1]), likely_2K[:1], rtol=1e-9)
        np.testing.assert_allclose(likely_2K[0], likely_2K[1], rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_rows_have_the_same_numbers_whichever_others_are_in_their_steps(seed):
    """Greedy and sampled rows together, each kind by itself, and with questions about others between all steps."""
    rng = np.random.default_rng(seed)
    together, asked_between, *apart = (RowAcceptance(12, K) for _ in range(4))
    # The first half is greedy.
    slots = np.arange(12, dtype=np.int32)
    for each in (together, asked_between, *apart):
        for slot in range(6, 12):
            each.admitted(slot, is_sampled=True)
    for number in range(300):
        if number % 20 == 0:
            chosen = [rng.permutation(half)[: rng.integers(2, 7)] for half in (slots[:6], slots[6:])]
            rows = np.concatenate(chosen)
        if rng.random() < 0.1:
            slot = int(rng.integers(12))
            for each in (together, asked_between, *apart):
                each.admitted(slot, is_sampled=slot >= 6)
        for each in (together, asked_between, *apart):
            each.passed()
        if rng.random() < 0.8:
            # Rows without room yield nothing.
            counts = rng.integers(0, K + 2, len(rows)).astype(np.int32)
            drafted = rng.integers(0, K + 1, len(rows)).astype(np.int32)
            together.observe(rows, counts, drafted)
            asked_between.observe(rows, counts, drafted)
            asked_between.by_position(slots[rng.permutation(12)[:3]])
            num = len(chosen[0])
            for each, part in zip(apart, (slice(num), slice(num, None)), strict=True):
                each.observe(rows[part], counts[part], drafted[part])
        likely_RK = together.by_position(rows)
        assert (asked_between.by_position(rows.copy()) == likely_RK).all()
        of_kinds = [each.by_position(part) for each, part in zip(apart, chosen, strict=True)]
        np.testing.assert_allclose(np.concatenate(of_kinds), likely_RK, rtol=1e-9)
