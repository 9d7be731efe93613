"""Sampling on the device against the CPU sampler, row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.device_samples import check_sampled, sampled

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.kernels.sampling import sample as sample_module
from radixmesh.kernels.sampling.sample import (
    MARGIN,
    SampleScratch,
    compile_sampling,
    gumbel_noise,
    near_total,
    score_factor,
)
from radixmesh.kernels.sampling.sample_params import SampleParams

_NAN, _INF = float("nan"), float("inf")
_GREEDY = Sampling(temperature=0.0)
_NONE = np.empty(0, np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [7, 1000, 2500])
def test_greedy_takes_the_lowest_of_the_highest(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    # Few distinct values: most rows have ties.
    logits = torch.randint(-4, 5, (5, vocab_size), device=device).to(dtype)
    logits[3] = -logits[3].abs()
    logits[4, ::2] = -0.0
    check_sampled(logits, [_input(_GREEDY)] * 5)


@pytest.mark.parametrize("vocab_size", [9, 1021, 2500])
def test_temperature_alone(vocab_size: int, device: torch.device) -> None:
    generator = np.random.default_rng(vocab_size)
    inputs = [_random_input(generator, Sampling(temperature=t)) for t in (0.0, 0.3, 1.0, 1.7, 100.0, 1e-9)]
    check_sampled(torch.randn(len(inputs), vocab_size, device=device) * 4, inputs)


@pytest.mark.parametrize("num_candidates", [16, 128])
@pytest.mark.parametrize("seed", range(3))
def test_filters(seed: int, num_candidates: int, device: torch.device) -> None:
    """With few candidates most cuts are bisected, with many most are among those."""
    generator = np.random.default_rng(seed)
    inputs = [_random_input(generator, _random_filters(generator)) for _ in range(4)]
    logits = torch.randn(len(inputs), 200, device=device) * 3
    # Rounded to few values, ties stand at the borders of the filters.
    logits = logits.mul(2).round().div(2) if seed % 2 else logits
    scratch = SampleScratch(len(inputs), logits.shape[1], device, has_penalties=True, num_candidates=num_candidates)
    check_sampled(logits, inputs, scratch)
    assert not scratch.candidates.histogram_TB.any() and not scratch.candidates.counts_T.any()


@pytest.mark.parametrize("seed", range(4))
def test_penalties_biases_and_suppression(seed: int, device: torch.device) -> None:
    generator = np.random.default_rng(seed)
    vocab_size = 60
    inputs = [_random_input(generator, _random_penalties(generator, vocab_size), vocab_size) for _ in range(5)]
    inputs.append(replace(_random_input(generator, _GREEDY, vocab_size), suppressed_ids=_NONE))
    check_sampled(torch.randn(len(inputs), vocab_size, device=device) * 2, inputs)


def test_broken_logits(device: torch.device) -> None:
    rows = [[_NAN, 1, 2, _NAN], [_NAN] * 4, [-_INF] * 4, [1, _INF, 0, _INF], [-_INF, 3, -_INF, 3], [0, 1, _INF, _NAN]]
    logits = torch.tensor(rows, device=device)
    filtered = Sampling(top_k=2, top_p=0.7, min_p=0.1)
    for sampling in (_GREEDY, Sampling(), Sampling(temperature=1e-300), filtered):
        lists = ([], [1], [0, 1, 2, 3, 9, -1]) if sampling.is_greedy else ([1],)
        for suppressed in lists:
            ids = np.array(suppressed, np.int32)
            sample = SampleInput(sampling=sampling, prompt_ids=_NONE, output_ids=_NONE, position=3, suppressed_ids=ids)
            check_sampled(logits, [sample] * len(rows))


def test_ids_outside_the_vocabulary_have_no_effect(device: torch.device) -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((99, 50.0), (2, 0.5)))
    sample = SampleInput(
        sampling=sampling,
        prompt_ids=np.array([50, 1], np.int32),
        output_ids=np.array([99, 0], np.int32),
        position=4,
    )
    check_sampled(torch.tensor([[1.0, 1.1, 0.4]], device=device), [sample])


def test_scratch_is_clean_for_the_next_draw(device: torch.device) -> None:
    generator = np.random.default_rng(1)
    sampling = Sampling(temperature=0.0, repetition_penalty=3.0, frequency_penalty=1.0)
    inputs = [_random_input(generator, sampling, 50) for _ in range(3)]
    scratch = SampleScratch(3, 50, device, has_penalties=True)
    logits = torch.randn(3, 50, device=device)
    first = sampled(logits, inputs, scratch)
    assert not scratch.counts_TV.any()
    assert first == sampled(logits, inputs, scratch)


def test_a_draw_does_not_depend_on_the_rows_beside_it(device: torch.device) -> None:
    generator = np.random.default_rng(2)
    samplings = (Sampling(), Sampling(top_k=20), _GREEDY)
    inputs = [_random_input(generator, sampling) for sampling in samplings]
    logits = torch.randn(3, 1500, device=device)
    together = sampled(logits, inputs)
    assert together == [sampled(logits[row : row + 1], [inputs[row]])[0] for row in range(3)]


def test_compiling_all_draws_changes_nothing(device: torch.device) -> None:
    params = SampleParams.allocate(2, max_total_len=8, max_biases=2, max_suppressed=2, device=device)
    before = [getattr(params, name).clone() for name in SampleParams.__slots__]
    compile_sampling(params, 30, torch.bfloat16)
    for name, array in zip(SampleParams.__slots__, before, strict=True):
        assert torch.equal(getattr(params, name), array), name


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


@triton.jit
def _totals_kernel(x_ptr, bits_ptr, near_ptr, exact_ptr, tops_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    highest, temperature = tl.load(tops_ptr).to(tl.float32), tl.load(tops_ptr + 1)
    x, bits = tl.load(x_ptr + index), tl.load(bits_ptr + index).to(tl.uint32, bitcast=True)
    tl.store(near_ptr + index, near_total(x, highest, highest > 1e38, score_factor(temperature), bits))
    tl.store(exact_ptr + index, (x.to(tl.float64) - highest.to(tl.float64)) / temperature + gumbel_noise(bits))


@pytest.mark.parametrize("temperature", [1.0, 0.02, 1e-9])
def test_a_total_by_float32_is_within_half_of_the_margin(temperature: float, device: torch.device) -> None:
    """For the least and the most bits, those about the border between the two forms of the noise, and any; for the
    highest logit itself too, which is what a low temperature picks whatever its noise."""
    ends = torch.arange(1024)
    border = (1 << 32) - (1 << 26) - 512 + torch.arange(1024)
    anywhere = torch.randint(1 << 32, (8192,), generator=torch.Generator().manual_seed(0))
    bits = torch.cat((ends, (1 << 32) - 1 - ends, border, anywhere))
    bits = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().to(device)
    for highest, x in ((4.0, torch.full((len(bits),), 4.0)), (30.0, 30.0 - torch.rand(len(bits)) * 40)):
        x = x.to(device)
        near, exact = torch.empty_like(x), torch.empty(len(bits), dtype=torch.float64, device=device)
        tops = torch.tensor([highest, temperature], dtype=torch.float64, device=device)
        _totals_kernel[(len(bits) // 1024,)](x, bits, near, exact, tops, BLOCK=1024)
        wanted = exact / math.log(2)
        counts = wanted > -100
        assert not counts.any() or float((near.double() - wanted)[counts].abs().max()) < MARGIN / 2
        # Totals that are lower stay so.
        assert bool((near[~counts] < -90).all())


@pytest.mark.parametrize("spread", [0.0, 1e-4, 3.0])
def test_totals_that_float32_cannot_tell_apart_are_computed_exactly(
    spread: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a margin of everything each row takes the exact way, and with none only ties do: all are the same ids."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3000, generator=generator) * spread
    inputs = [_input(Sampling(temperature=temperature, seed=seed)) for seed, temperature in enumerate([1.0, 0.1] * 3)]
    tokens = []
    for margin in (MARGIN, 1e9, 0.0):
        monkeypatch.setattr(sample_module, "MARGIN", margin)
        tokens.append(sampled(logits.to(device), inputs))
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_temperature_whose_inverse_is_no_float32_samples_the_highest(device: torch.device) -> None:
    logits = torch.zeros(3, 2500)
    # A bounded inverse would not part it from the others.
    logits[:, 1700] = 1e-40
    inputs = [_input(Sampling(temperature=1e-60, seed=seed)) for seed in range(3)]
    assert sampled(logits.to(device), inputs) == [1700] * 3
