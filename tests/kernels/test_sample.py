"""Draws on the device against the CPU sampler, row by row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.penalties import adjust_logits
from radixmesh.daemons.worker.sampling.philox import Draw, gumbel_noise
from radixmesh.daemons.worker.sampling.sampler import candidates, sample_tokens
from radixmesh.kernels.sample import DrawScratch, draw
from radixmesh.kernels.sample_params import SampleParams

_NAN, _INF = float("nan"), float("inf")
_MAX_LEN = 40
_GREEDY = Sampling(temperature=0.0)
_NONE = np.empty(0, np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 1000, 2500])
def test_greedy_takes_the_lowest_of_the_highest(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    # Few distinct values: most rows have ties.
    logits = torch.randint(-4, 5, (5, vocab_size), device=device).to(dtype)
    logits[3] = -logits[3].abs()
    logits[4, ::2] = -0.0
    _check(logits, [_input(_GREEDY)] * 5)


@pytest.mark.parametrize("vocab_size", [9, 1021, 2500])
def test_temperature_alone(vocab_size: int, device: torch.device) -> None:
    generator = np.random.default_rng(vocab_size)
    inputs = [_random_input(generator, Sampling(temperature=t)) for t in (0.0, 0.3, 1.0, 1.7, 100.0, 1e-9)]
    _check(torch.randn(len(inputs), vocab_size, device=device) * 4, inputs)


@pytest.mark.parametrize("num_candidates", [16, 128])
@pytest.mark.parametrize("seed", range(3))
def test_filters(seed: int, num_candidates: int, device: torch.device) -> None:
    """With few candidates most cuts are bisected, with many most are among those."""
    generator = np.random.default_rng(seed)
    inputs = [_random_input(generator, _random_filters(generator)) for _ in range(4)]
    logits = torch.randn(len(inputs), 200, device=device) * 3
    # Rounded to few values, ties stand at the borders of the filters.
    logits = logits.mul(2).round().div(2) if seed % 2 else logits
    scratch = DrawScratch(len(inputs), logits.shape[1], device, has_penalties=True, num_candidates=num_candidates)
    _check(logits, inputs, scratch)
    assert not scratch.candidates.histogram_TB.any() and not scratch.candidates.counts_T.any()


@pytest.mark.parametrize("seed", range(4))
def test_penalties_biases_and_suppression(seed: int, device: torch.device) -> None:
    generator = np.random.default_rng(seed)
    vocab_size = 60
    inputs = [_random_input(generator, _random_penalties(generator, vocab_size), vocab_size) for _ in range(5)]
    inputs.append(replace(_random_input(generator, _GREEDY, vocab_size), suppressed_ids=_NONE))
    _check(torch.randn(len(inputs), vocab_size, device=device) * 2, inputs)


def test_broken_logits(device: torch.device) -> None:
    rows = [[_NAN, 1, 2, _NAN], [_NAN] * 4, [-_INF] * 4, [1, _INF, 0, _INF], [-_INF, 3, -_INF, 3], [0, 1, _INF, _NAN]]
    logits = torch.tensor(rows, device=device)
    filtered = Sampling(top_k=2, top_p=0.7, min_p=0.1)
    for sampling in (_GREEDY, Sampling(), Sampling(temperature=1e-300), filtered):
        lists = ([], [1], [0, 1, 2, 3, 9, -1]) if sampling.is_greedy else ([1],)
        for suppressed in lists:
            ids = np.array(suppressed, np.int32)
            sample = SampleInput(sampling=sampling, prompt_ids=_NONE, output_ids=_NONE, position=3, suppressed_ids=ids)
            _check(logits, [sample] * len(rows))


def test_ids_outside_the_vocabulary_have_no_effect(device: torch.device) -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((99, 50.0), (2, 0.5)))
    sample = SampleInput(
        sampling=sampling,
        prompt_ids=np.array([50, 1], np.int32),
        output_ids=np.array([99, 0], np.int32),
        position=4,
    )
    _check(torch.tensor([[1.0, 1.1, 0.4]], device=device), [sample])


def test_scratch_is_clean_for_the_next_draw(device: torch.device) -> None:
    generator = np.random.default_rng(1)
    sampling = Sampling(temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.0)
    inputs = [_random_input(generator, sampling, 50) for _ in range(3)]
    scratch = DrawScratch(3, 50, device, has_penalties=True)
    logits = torch.randn(3, 50, device=device)
    first = _drawn(logits, inputs, scratch)
    assert not scratch.counts_TV.any()
    assert first == _drawn(logits, inputs, scratch)


def test_a_draw_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    generator = np.random.default_rng(2)
    samplings = (Sampling(), Sampling(top_k=20), _GREEDY)
    inputs = [_random_input(generator, sampling) for sampling in samplings]
    logits = torch.randn(3, 1500, device=device)
    together = _drawn(logits, inputs)
    assert together == [_drawn(logits[row : row + 1], [inputs[row]])[0] for row in range(3)]


def _random_input(generator: np.random.Generator, sampling: Sampling, vocab_size: int = 50) -> SampleInput:
    prompt_len, output_len = generator.integers(1, 12), generator.integers(0, 12)
    return SampleInput(
        sampling=replace(sampling, seed=int(generator.integers(0, 2**64, dtype=np.uint64))),
        prompt_ids=generator.integers(0, vocab_size, prompt_len).astype(np.int32),
        output_ids=generator.integers(0, vocab_size // 4, output_len).astype(np.int32),
        position=int(prompt_len + output_len),
        suppressed_ids=generator.integers(0, vocab_size, generator.integers(0, 4)).astype(np.int32),
    )


def _random_filters(generator: np.random.Generator) -> Sampling:
    return Sampling(
        temperature=float(generator.choice([0.0, 0.2, 0.8, 1.0, 2.0])),
        top_k=int(generator.choice([0, 1, 3, 40, 10**6])),
        top_p=float(generator.choice([1e-9, 0.5, 0.9, 0.99, 1.0])),
        min_p=float(generator.choice([0.0, 0.05, 0.5, 1.0])),
    )


def _random_penalties(generator: np.random.Generator, vocab_size: int) -> Sampling:
    biased = generator.permutation(vocab_size)[: generator.integers(0, 5)].tolist()
    return Sampling(
        temperature=float(generator.choice([0.0, 0.7])),
        repetition_penalty=float(generator.choice([1.0, 0.8, 1.3])),
        frequency_penalty=float(generator.choice([0.0, 0.7, -0.3])),
        presence_penalty=float(generator.choice([0.0, 1.1])),
        logit_bias=tuple((token, float(generator.normal() * 3)) for token in biased),
        top_k=int(generator.choice([0, 10])),
    )


def _input(sampling: Sampling) -> SampleInput:
    return SampleInput(sampling=sampling, prompt_ids=_NONE, output_ids=_NONE, position=0)


def _check(logits_TV: torch.Tensor, inputs: list[SampleInput], scratch: DrawScratch | None = None) -> None:
    rows = logits_TV.float().cpu().numpy()
    expected = sample_tokens(rows, inputs)
    for row, sample, actual, token in zip(rows, inputs, _drawn(logits_TV, inputs, scratch), expected, strict=True):
        assert actual == token or _is_close_call(row, sample, actual, token), (sample, actual, token)


def _is_close_call(row: np.ndarray, sample: SampleInput, actual: int, expected: int) -> bool:
    """Whether both tokens are candidates whose sums differ by roundings: another library's logarithm may swap them."""
    if sample.sampling.is_greedy:
        return False
    adjusted = adjust_logits(row, sample.sampling, sample.prompt_ids, sample.output_ids, sample.suppressed_ids)
    ids, scores = candidates(adjusted, sample.sampling)
    sums = dict(zip(ids.tolist(), scores, strict=True))
    (noise,) = gumbel_noise([Draw(sample.sampling.seed or 0, sample.position, np.array([actual, expected]))])
    return actual in sums and abs(sums[actual] + noise[0] - sums[expected] - noise[1]) < 1e-9


def _drawn(logits_TV: torch.Tensor, inputs: list[SampleInput], scratch: DrawScratch | None = None) -> list[int]:
    num_rows, vocab_size = logits_TV.shape
    device = logits_TV.device
    has_penalties = any(_has_penalties(sample) for sample in inputs)
    scratch = scratch or DrawScratch(num_rows, vocab_size, device, has_penalties=has_penalties, num_candidates=32)
    # Rows in another order than their slots.
    slots = list(reversed(range(num_rows)))
    before = logits_TV.clone()
    tokens = draw(
        logits_TV,
        _params(inputs, slots, device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([sample.position for sample in inputs], dtype=torch.int32, device=device),
        scratch,
        has_sampled=any(not sample.sampling.is_greedy for sample in inputs),
        has_filters=any(s.sampling.top_k or s.sampling.top_p < 1 or s.sampling.min_p for s in inputs),
        has_penalties=has_penalties,
    )
    assert torch.equal(logits_TV.nan_to_num(), before.nan_to_num())
    return tokens.tolist()


def _has_penalties(sample: SampleInput) -> bool:
    s = sample.sampling
    is_penalised = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty or s.logit_bias
    return bool(is_penalised or len(sample.suppressed_ids))


def _params(inputs: list[SampleInput], slots: list[int], device: torch.device) -> SampleParams:
    params = SampleParams.allocate(
        len(inputs), max_total_len=_MAX_LEN, max_biases=8, max_suppressed=8, device=torch.device("cpu")
    )
    for slot, sample in zip(slots, inputs, strict=True):
        s = sample.sampling
        params.temperature_S[slot] = s.temperature
        params.seed_S[slot] = int(np.uint64(s.seed or 0).astype(np.int64))
        params.top_k_S[slot], params.top_p_S[slot], params.min_p_S[slot] = s.top_k, s.top_p, s.min_p
        params.repetition_S[slot] = s.repetition_penalty
        params.frequency_S[slot], params.presence_S[slot] = s.frequency_penalty, s.presence_penalty
        params.prompt_len_S[slot] = sample.position - len(sample.output_ids)
        ids = np.concatenate((sample.prompt_ids, sample.output_ids))
        params.tokens_SL[slot] = 0
        first = int(params.prompt_len_S[slot]) - len(sample.prompt_ids)
        params.tokens_SL[slot, :first] = -1
        params.tokens_SL[slot, first : first + len(ids)] = torch.from_numpy(ids)
        params.num_biases_S[slot] = len(s.logit_bias)
        for index, (token, bias) in enumerate(s.logit_bias):
            params.bias_ids_SB[slot, index], params.bias_values_SB[slot, index] = token, bias
        params.num_suppressed_S[slot] = len(sample.suppressed_ids)
        params.suppressed_ids_SU[slot, : len(sample.suppressed_ids)] = torch.from_numpy(sample.suppressed_ids)
        params.min_tokens_S[slot] = 1000 if len(sample.suppressed_ids) else 0
    return SampleParams(**{name: getattr(params, name).to(device) for name in SampleParams.__slots__})
