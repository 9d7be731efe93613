"""The sampler as a whole: distribution, greedy, purity, broken logits, logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.logprobs import log_softmax, token_logprobs
from radixmesh.daemons.worker.sampling.sampler import sample_tokens

_NONE = np.empty(0, np.int32)
_NAN, _INF = np.nan, np.inf


def _sample(logits: object, sampling: Sampling, position: int = 0, suppressed: tuple[int, ...] = ()) -> int:
    (token,) = sample_tokens(np.asarray(logits, np.float32)[None], [_input(sampling, position, suppressed)])
    return token


def _input(sampling: Sampling, position: int = 0, suppressed: tuple[int, ...] = ()) -> SampleInput:
    return SampleInput(
        sampling=sampling,
        prompt_ids=_NONE,
        output_ids=_NONE,
        position=position,
        suppressed_ids=np.array(suppressed, np.int32),
    )


@pytest.mark.parametrize("varied", ["position", "seed"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.8, min_p=0.05)]
)
def test_draws_follow_the_distribution(varied: str, sampling: Sampling) -> None:
    logits = np.array([1.0, 0.3, -0.7, 2.1, 0.0, 1.4, -1.5, 0.9, 0.2, -0.1, 1.1, -2.0], np.float32)
    num_draws = 8000
    sampled = [
        _sample(logits, _with_seed(sampling, 5 if varied == "position" else i), i if varied == "position" else 11)
        for i in range(num_draws)
    ]
    probabilities = _reference(logits, sampling)
    counts = np.bincount(sampled, minlength=len(logits))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities[probabilities > 0] * num_draws
    chi_square = float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())
    # The 1 - 1e-4 quantile by Wilson and Hilferty; the samples are fixed, so this cannot flicker.
    freedom = len(expected) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_draws_at_neighbouring_positions_are_independent() -> None:
    logits = np.zeros(4, np.float32)
    sampled = np.array([_sample(logits, Sampling(seed=3), i) for i in range(8000)])
    pairs = np.bincount(sampled[:-1] * 4 + sampled[1:], minlength=16)
    chi_square = float(((pairs - 7999 / 16) ** 2 / (7999 / 16)).sum())
    assert chi_square < 44.3  # 15 degrees of freedom, 1 - 1e-4


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=50))
def test_greedy_takes_the_lowest_of_equal_maxima(values: list[float]) -> None:
    row = np.array(values, np.float32)
    assert _sample(row, Sampling(temperature=0.0, top_p=0.1, top_k=1)) == int(np.flatnonzero(row == row.max())[0])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_draw_is_a_pure_function_and_modifies_nothing(seed: int, position: int) -> None:
    row = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    before = row.copy()
    sampling = Sampling(seed=seed, top_p=0.9, repetition_penalty=1.2)
    assert _sample(row, sampling, position) == _sample(row, sampling, position)
    assert np.array_equal(row, before)


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(deadline=None)
@given(st.lists(st.tuples(_SAMPLINGS, st.integers(0, 2**20)), min_size=1, max_size=12), st.integers(0, 2**32))
def test_a_row_does_not_depend_on_the_other_rows(requests: list[tuple[Sampling, int]], seed: int) -> None:
    rows = (np.random.default_rng(seed).standard_normal((len(requests), 50)) * 2).astype(np.float32)
    rows[seed % len(requests), seed % 50] = _NAN
    inputs = [_input(sampling, position) for sampling, position in requests]
    alone = [sample_tokens(rows[i : i + 1], [sample])[0] for i, sample in enumerate(inputs)]
    assert sample_tokens(rows, inputs) == alone
    assert sample_tokens(rows[::-1], inputs[::-1]) == alone[::-1]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sets(st.integers(0, 49), max_size=40))
def test_removing_losers_keeps_the_winner(seed: int, removed: set[int]) -> None:
    row = np.random.default_rng(1).standard_normal(50).astype(np.float32)
    winner = _sample(row, Sampling(seed=seed))
    assert _sample(row, Sampling(seed=seed), suppressed=tuple(removed - {winner})) == winner


def test_suppressed_ids_are_never_sampled() -> None:
    row = np.array([9.0, 1.0, 1.0], np.float32)
    assert {_sample(row, Sampling(seed=s), suppressed=(0,)) for s in range(50)} == {1, 2}
    assert _sample(row, Sampling(temperature=0.0), suppressed=(0, 1)) == 2


@pytest.mark.parametrize(
    ("row", "suppressed", "allowed"),
    [
        ([_NAN, 1.0, 0.0], (), {1, 2}),
        ([0.0, _INF, _INF, _NAN], (), {1, 2}),
        ([-_INF, -_INF, -3.0], (), {2}),
        ([-_INF, -_INF, _NAN], (), {0}),
        ([-_INF, -_INF, _NAN], (0,), {1}),
        ([1.0, 2.0, _NAN], (0, 1), {2}),
        ([1.0, 2.0], (0, 1), {0}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_a_defined_token(
    row: list[float], suppressed: tuple[int, ...], allowed: set[int], temperature: float
) -> None:
    sampled = {_sample(row, Sampling(temperature=temperature, seed=s), suppressed=suppressed) for s in range(40)}
    assert sampled == (allowed if temperature else {min(sampled)})
    assert sampled <= allowed


def test_log_softmax_equals_that_of_torch() -> None:
    row = (np.random.default_rng(2).standard_normal(5000) * 8).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(row).double(), 0).numpy()
    # The difference to the largest logit and the result are rounded, and exp is off by some units.
    most = (2 * np.abs(expected).max() + 16) * np.finfo(np.float32).eps / 2
    assert np.abs(log_softmax(row) - expected).max() <= most


def test_log_softmax_of_broken_rows() -> None:
    assert log_softmax(np.array([_NAN, 0.0, 0.0], np.float32)).tolist() == pytest.approx(
        [-_INF, -np.log(2), -np.log(2)]
    )
    assert log_softmax(np.array([_INF, 0.0], np.float32)).tolist() == [0.0, -_INF]
    assert log_softmax(np.array([-_INF, _NAN], np.float32)).tolist() == [-_INF, -_INF]


def test_top_logprobs_are_ordered_by_logprob_then_id() -> None:
    rows = np.array([[0.0, 1.0, 0.0, 1.0, -1.0], [3.0, 3.0, 3.0, 3.0, 3.0]], np.float32)
    logprobs = token_logprobs(rows, [4, 2], 3)
    assert logprobs.top_ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert logprobs.own[1] == pytest.approx(-np.log(5))
    assert np.array_equal(logprobs.top[0], log_softmax(rows[0])[[1, 3, 0]])
    assert token_logprobs(rows, [0, 0], 0).top_ids.shape == (2, 0)
    assert token_logprobs(rows, [0, 0], 64).num_top == 5


def _with_seed(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, seed=seed
    )


def _reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) / sampling.temperature)
    order = np.argsort(-weights)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        shares = weights[order] / weights.sum()
        weights[order[np.cumsum(shares) - shares >= sampling.top_p]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()
