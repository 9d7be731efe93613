"""Tokens of the device's sampler beside the CPU sampler's, from the same inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.penalties import adjust_logits
from radixmesh.daemons.worker.sampling.philox import NoiseKey, gumbel_noise
from radixmesh.daemons.worker.sampling.sampler import candidates, sample_tokens
from radixmesh.kernels.sampling.sample import SampleScratch, SlotRows, TokenTarget, sample_rows
from radixmesh.kernels.sampling.sample_params import Needs, SampleParams

_MAX_LEN = 40


def check_sampled(logits_TV: torch.Tensor, inputs: Sequence[SampleInput], scratch: SampleScratch | None = None) -> None:
    """Each row's token is the CPU sampler's, or as good as it."""
    rows = logits_TV.float().cpu().numpy()
    expected = sample_tokens(rows, inputs)
    for row, sample, actual, token in zip(rows, inputs, sampled(logits_TV, inputs, scratch), expected, strict=True):
        assert actual == token or is_close_call(row, sample, actual, token), (sample, actual, token)


def is_close_call(row: np.ndarray, sample: SampleInput, actual: int, expected: int) -> bool:
    """True if both tokens are candidates whose sums differ by roundings: another logarithm may swap them."""
    if sample.sampling.is_greedy:
        return False
    adjusted = adjust_logits(row, sample.sampling, sample.prompt_ids, sample.output_ids, sample.suppressed_ids)
    ids, scores = candidates(adjusted, sample.sampling)
    sums = dict(zip(ids.tolist(), scores, strict=True))
    (noise,) = gumbel_noise([NoiseKey(sample.sampling.seed or 0, sample.position, np.array([actual, expected]))])
    return actual in sums and abs(sums[actual] + noise[0] - sums[expected] - noise[1]) < 1e-9


def sampled(logits_TV: torch.Tensor, inputs: Sequence[SampleInput], scratch: SampleScratch | None = None) -> list[int]:
    """The device's tokens. Without a scratch there is one with few candidates, which also bisects."""
    num_rows, vocab_size = logits_TV.shape
    device = logits_TV.device
    is_penalised = any(has_penalties(sample) for sample in inputs)
    scratch = scratch or SampleScratch(num_rows, vocab_size, device, has_penalties=is_penalised, num_candidates=32)
    # Rows in another order than their slots.
    slots = list(reversed(range(num_rows)))
    before = logits_TV.clone()
    params = params_of(inputs, slots, device)
    target = new_target(num_rows, num_rows, device, ring_index=1)
    rows = SlotRows(
        params,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([sample.position for sample in inputs], dtype=torch.int32, device=device),
    )
    needs = Needs.PENALTIES if is_penalised else Needs.NOTHING
    if any(not sample.sampling.is_greedy for sample in inputs):
        needs |= Needs.NOISE
    if any(s.sampling.top_k or s.sampling.top_p < 1 or s.sampling.min_p for s in inputs):
        needs |= Needs.FILTERS
    sample_rows(logits_TV, rows, scratch, target, needs)
    assert torch.equal(logits_TV.nan_to_num(), before.nan_to_num())
    assert (target.ring_RT[0] == -1).all()
    tokens = target.ring_RT[1].tolist()
    assert target.last_tokens_S[slots].tolist() == tokens
    if is_penalised:
        assert [int(params.tokens_SL[slot, s.position]) for slot, s in zip(slots, inputs, strict=True)] == tokens
    return tokens


def new_target(num_rows: int, num_slots: int, device: torch.device, *, ring_index: int) -> TokenTarget:
    """A ring of two rows, filled with -1, and the last tokens of as many slots and a dummy."""
    ring = torch.full((2, num_rows), -1, dtype=torch.int32, device=device)
    return TokenTarget(
        ring_RT=ring, ring_index_1=ring.new_full((1,), ring_index), last_tokens_S=ring.new_zeros(num_slots + 1)
    )


def has_penalties(sample: SampleInput) -> bool:
    s = sample.sampling
    is_changed = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty or s.logit_bias
    return bool(is_changed or len(sample.suppressed_ids))


def params_of(inputs: Sequence[SampleInput], slots: Sequence[int], device: torch.device) -> SampleParams:
    """The parameters of each input at its slot."""
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
