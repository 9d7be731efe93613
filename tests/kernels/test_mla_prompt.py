"""Prompt chunks in the up-projected form of latent attention against the absorbed form, in float32 by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rounding import typical_chain_error

from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.mla_extend import mla_extend_reference
from radixmesh.kernels.attention.mla_prompt import chunk_tokens, is_projection_faster, mla_prompt

_SCALE = 0.3
_CONFIG = ExtendConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
_TINY = (4, 48, 32, 16, 24)
_V3 = (128, 512, 128, 64, 128)


@pytest.mark.parametrize(
    "chunks", [[(1, 1)], [(40, 40)], [(7, 50)], [(5, 5), (1, 33), (0, 9), (17, 20)], [(7, 30), (24, 24)]], ids=str
)
@pytest.mark.parametrize("page_size", [1, 4])
def test_chunks_match_the_absorbed_form(chunks: list[tuple[int, int]], page_size: int, device: torch.device) -> None:
    _check(chunks, page_size, torch.float32, device)


def test_heads_share_a_scratch_memory_that_has_no_room_for_all(device: torch.device) -> None:
    for scratch_bytes in (0, 3 * 25 * 56 * 4):
        _check([(5, 5), (17, 20)], 1, torch.float32, device, scratch_bytes=scratch_bytes)


def test_rows_before_the_chunks_are_left_as_they_are(device: torch.device) -> None:
    """They are the decodes of the step."""
    _check([(9, 20), (3, 3)], 4, torch.bfloat16, device, before=5, config=None)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_shared_prefix_is_projected_once(page_size: int, device: torch.device) -> None:
    config = ExtendConfig(block_m=64, block_n=64, num_warps=4, num_stages=1)
    _check([(20, 300), (5, 277), (9, 281)], page_size, torch.float32, device, shared=272, config=config)


def test_sequences_without_pages_are_read_anywhere() -> None:
    """Those of a warm-up."""
    tokens = chunk_tokens([np.zeros(0, np.int32)], np.array([7], np.int32), 4)
    assert tokens.index_U.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_long_chunks_are_projected_and_short_ones_behind_long_prefixes_are_not() -> None:
    """As measured: keys and values of a token pay when some hundred queries see it."""
    for chunks, num_tokens, is_faster in (
        ([(512, 512)] * 16, 16 * 512, True),
        ([(8192, 8192)], 8192, True),
        ([(64, 2112)] * 128, 128 * 2112, False),
        ([(128, 1152)] * 64, 64 * 1152, True),
        ([(128, 2176)] * 64, 4 * 2048 + 64 * 128, True),
        ([(2048, 60000)], 60000, True),
        ([(128, 128)] * 64, 8192, True),
        ([(16, 8192)] * 256, 256 * 8192, False),
    ):
        lens, kv_lens = np.array(chunks, np.int32).T
        assert is_projection_faster(lens, kv_lens, num_tokens) is is_faster, chunks[0]


@pytest.mark.gpu
def test_long_chunks_on_the_gpu(device: torch.device) -> None:
    for sizes in (_V3, (16, *_V3[1:])):
        _check([(100, 4000), (1, 1), (333, 333), (1000, 2000)], 16, torch.bfloat16, device, sizes=sizes, config=None)


def _check(
    chunks: list[tuple[int, int]],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    sizes: tuple[int, int, int, int, int] = _TINY,
    before: int = 2,
    config: ExtendConfig | None = _CONFIG,
    scratch_bytes: int = 1 << 30,
    shared: int = 0,
) -> None:
    """chunks: new tokens and all tokens of each, of which all begin with the same `shared` ones."""
    heads, rank, plain, rope, value = sizes
    lens = [length for _, length in chunks]
    per_row = max(-(-length // page_size) for length in lens)
    tables = torch.randperm(len(lens) * per_row, device=device).int().view(len(lens), per_row)
    tables[:, : shared // page_size] = tables[:1, : shared // page_size].clone()
    slots, kv_lens = torch.arange(len(lens), device=device).int().flip(0), torch.tensor(lens, device=device).int()
    row_starts = torch.tensor([before, *(new for new, _ in chunks)], device=device).cumsum(0).int()
    num_rows = int(row_starts[-1])
    latents = torch.randn(tables.numel() * page_size, rank + rope, device=device).to(dtype)
    expand = (torch.randn(heads, plain + value, rank, device=device) * rank**-0.5).to(dtype)
    q = torch.randn(num_rows, heads, plain + rope, device=device).to(dtype)
    out = torch.full((num_rows, heads, value), 7.0, device=device).to(dtype)
    tokens = chunk_tokens(tables[slots.long()].cpu().numpy(), np.array(lens, np.int32), page_size)
    assert len(tokens.index_U) == sum(lens) - (len(lens) - 1) * shared
    mla_prompt(
        q[..., :plain], q[..., plain:].clone(), latents, tokens.to(device), expand, row_starts, kv_lens, _SCALE, out,
        config, scratch_bytes,
    )  # fmt: skip
    absorbed = torch.einsum("thn,hnr->thr", q[..., :plain].float(), expand[:, :plain].float())
    absorbed = torch.cat((absorbed, q[..., plain:].float()), dim=2)
    reference = mla_extend_reference(
        absorbed, latents.float(), tables, slots, row_starts, kv_lens, page_size, _SCALE, rank
    )
    want = torch.einsum("thr,hvr->thv", reference, expand[:, plain:].float())
    assert bool((out[:before] == 7.0).all())
    got, want = out[before:].float(), want[before:]
    # Keys and values are rounded, weights of the softmax and the result; two float32 sums differ by a little.
    error = 2 * typical_chain_error(4, dtype) + 1e-5
    assert float((got - want).norm() / want.norm()) < error
