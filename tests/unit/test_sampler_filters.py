"""Penalties and filters against the logits processors of transformers; ties decided by the lower id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.sampling.filters import kept_ids
from radixmesh.daemons.worker.sampling.penalties import adjust_logits
from radixmesh.daemons.worker.sampling.sampler import candidates

_VOCAB = 97
_NONE = np.empty(0, np.int32)


def _logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(_VOCAB) * 4).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.7, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 20, _VOCAB, 10 * _VOCAB]),
    top_p=st.sampled_from([0.01, 0.37, 0.8, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.21, 1.0]),
)
def test_kept_ids_equal_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = _logits(seed)
    ids, _ = candidates(row, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    scores = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(row)[None].double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    assert ids.tolist() == torch.isfinite(scores[0]).nonzero().flatten().tolist()


@given(st.integers(0, 2**32), st.sampled_from([0.5, 1.1, 2.0]), st.lists(st.integers(0, _VOCAB - 1), max_size=30))
@settings(deadline=None)
def test_repetition_penalty_equals_that_of_transformers(seed: int, penalty: float, ids: list[int]) -> None:
    row = _logits(seed)
    half = len(ids) // 2
    ours = adjust_logits(
        row,
        Sampling(repetition_penalty=penalty),
        np.array(ids[:half], np.int32),
        np.array(ids[half:], np.int32),
        _NONE,
    )
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([ids], dtype=torch.long), torch.from_numpy(row)[None]
    )
    assert np.array_equal(ours, theirs[0].numpy())


def test_frequency_and_presence_count_the_output_only() -> None:
    row = np.zeros(8, np.float32)
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    adjusted = adjust_logits(row, sampling, np.array([1, 1, 2], np.int32), np.array([3, 3, 3, 4], np.int32), _NONE)
    assert adjusted.tolist() == [0, 0, 0, -1.75, -0.75, 0, 0, 0]


def test_bias_comes_after_penalties_and_suppression_after_bias() -> None:
    row = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((0, 1.0), (1, 1.0), (2, 100.0)))
    adjusted = adjust_logits(row, sampling, np.array([0, 1], np.int32), _NONE, np.array([2], np.int32))
    assert adjusted.tolist() == [2.0, -3.0, -np.inf, 0.0]


def test_adjusting_leaves_the_row_alone_and_ignores_ids_outside_it() -> None:
    row = np.ones(4, np.float32)
    ids = np.array([-1, 4, 2], np.int32)
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=1.0, logit_bias=((9, 5.0),))
    adjusted = adjust_logits(row, sampling, ids, ids, np.array([7], np.int32))
    assert adjusted.tolist() == [1, 1, -0.5, 1]
    assert row.tolist() == [1, 1, 1, 1]


def test_equal_scores_are_cut_by_the_lower_id() -> None:
    scores = np.array([-1.0, 0.0, -1.0, 0.0, -1.0])
    assert kept_ids(scores, top_k=1, top_p=1.0, min_p=0.0).tolist() == [1]
    assert kept_ids(scores, top_k=3, top_p=1.0, min_p=0.0).tolist() == [0, 1, 3]
    assert kept_ids(np.zeros(4), top_k=0, top_p=0.5, min_p=0.0).tolist() == [0, 1]
    assert kept_ids(np.zeros(4), top_k=0, top_p=0.51, min_p=0.0).tolist() == [0, 1, 2]


@given(
    st.lists(st.sampled_from([0.0, -0.5, -1.0, -3.0, -np.inf]), min_size=1, max_size=30),
    st.integers(0, 30),
    st.floats(1e-9, 1.0),
    st.floats(0.0, 1.0),
)
def test_filters_equal_their_definition_on_ties(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    scores = np.array([0.0, *values])
    ranked = sorted((i for i in range(len(scores)) if scores[i] > -np.inf), key=lambda i: (-scores[i], i))
    ranked = ranked[:top_k] if top_k else ranked
    total = sum(np.exp(scores[i]) for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if kept and top_p < 1.0 and mass >= top_p * total * (1 - 1e-12):
            break
        kept.append(i)
        mass += np.exp(scores[i])
    kept = [i for i in kept if np.exp(scores[i]) >= min_p]
    # A hair's breadth from the edge of top-p either answer is the rounding's.
    if top_p == 1.0 or abs(mass - top_p * total) > 1e-9:
        assert kept_ids(scores, top_k=top_k, top_p=top_p, min_p=min_p).tolist() == sorted(kept)


@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    ids, scores = candidates(_logits(1), Sampling(temperature=temperature))
    assert len(ids) >= 1
    assert np.isfinite(scores).all()
