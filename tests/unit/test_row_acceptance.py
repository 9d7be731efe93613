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
