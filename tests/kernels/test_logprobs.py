"""Logprobs on the device against those of the CPU: values within a rounding, alternatives in the same order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixmesh.daemons.runtime.sampling import MAX_TOP_LOGPROBS
from radixmesh.daemons.worker.sampling.logprobs import token_logprobs as on_the_cpu
from radixmesh.kernels.sampling.logprobs import LogprobScratch, token_logprobs

_INF, _NAN = float("inf"), float("nan")


def _check(logits_TV: torch.Tensor, num_top: list[int], tokens: list[int]) -> None:
    """Row t is in slot T - 1 - t and asks for `num_top[t]` alternatives, -1: for no logprobs."""
    device, num_rows = logits_TV.device, len(logits_TV)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    scratch = LogprobScratch(num_rows, MAX_TOP_LOGPROBS, device)
    ring = torch.full((3, num_rows + 1, 1 + 2 * MAX_TOP_LOGPROBS), -7, dtype=torch.int32, device=device)
    tokens_RT = ints([[-1] * num_rows, tokens, [-1] * num_rows])  # type: ignore[list-item]
    slots, num_top_S = ints(list(range(num_rows))[::-1]), ints([*num_top[::-1], -1])
    token_logprobs(logits_TV, slots, num_top_S, tokens_RT, ints([1]), scratch, ring)
    got = ring.cpu().numpy()
    assert (got[[0, 2]] == -7).all() and (got[1, num_rows] == -7).all()
    for row, count in enumerate(num_top):
        if count < 0:
            assert (got[1, row] == -7).all()
            continue
        want = on_the_cpu(logits_TV[row : row + 1].float().cpu().numpy(), [tokens[row]], count)
        assert (got[1, row, 1 + 2 * count :] == -7).all()
        assert got[1, row, 1 : 1 + count].tolist() == want.top_ids[0].tolist()
        floats = got[1, row].view(np.float32)
        np.testing.assert_allclose(floats[:1], want.own, atol=2e-5, rtol=1e-6)
        np.testing.assert_allclose(floats[1 + count : 1 + 2 * count], want.top[0], atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(70, torch.float32), (1024, torch.bfloat16), (2500, torch.float32)])
def test_any_mix_of_rows(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(6, vocab_size, generator=generator) * 5).to(dtype).to(device)
    _check(logits, [5, -1, 0, MAX_TOP_LOGPROBS, 1, -1], [3, 4, vocab_size - 1, 0, 69, 1])


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    """Few distinct values: alternatives end in the middle of a tie that spans several blocks."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 3, (3, 2200), generator=generator).float().to(device)
    logits[1, ::2] = -0.0
    logits[2] = 1.5
    _check(logits, [20, 7, 33], [5, 6, 7])


def test_rising_values_of_which_every_one_is_better_than_those_before(device: torch.device) -> None:
    logits = torch.arange(1500, device=device).float()[None] / 100
    _check(torch.cat([logits, -logits]), [9, 9], [0, 1499])


def test_broken_logits(device: torch.device) -> None:
    rows = [[_NAN, 1, 2, _NAN], [_NAN] * 4, [-_INF] * 4, [1, _INF, 0, _INF], [-_INF, 3, -_INF, 3], [0, 1, _INF, _NAN]]
    _check(torch.tensor(rows, device=device), [4] * len(rows), [0, 1, 2, 3, 0, 3])


def test_large_values_do_not_overflow(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 1100, generator=generator).to(device) * 3e4
    _check(logits, [3, 3], [1, 2])
