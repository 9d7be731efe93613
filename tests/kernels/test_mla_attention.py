"""Attention over latents (MLA, absorbed) against its definition, under Triton's interpreter and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.triton_interpreter import DEVICE

from radixmesh.kernels.attention.decode_attention import plan_decode
from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.mla_decode import (
    SM90_CONFIG,
    mla_decode,
    mla_decode_reference,
    mla_decode_workspace,
    mla_head_blocks,
    mla_shared_decode,
    mla_shared_workspace,
)
from radixmesh.kernels.attention.mla_extend import mla_extend, mla_extend_reference
from radixmesh.kernels.attention.mla_merge import mla_decode_expanded, mla_few_rows_workspace
from radixmesh.kernels.attention.prefix_groups import PrefixGroup
from radixmesh.kernels.attention.shared_prefix_attention import plan_shared_decode
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.hopper import has_wgmma
from radixmesh.kernels.mla_rows import head_gemm_reference

_SCALE = 0.3
_SMALL = SplitConfig(heads=1, block_n=16, num_warps=4, num_stages=3, programs_per_sm=1, min_tiles=1)
_SM90 = replace(SM90_CONFIG, min_tiles=1)
_EXTEND = ExtendConfig(block_m=16, block_n=16, num_warps=4, num_stages=3)


def _pool(lengths, rank, rope, page_size, dtype):
    pool = PagedPool.random(lengths, 1, rank + rope, page_size, dtype)
    return pool, pool.keys.squeeze(1)


def _queries(num_rows, heads, size, dtype):
    return torch.randn(num_rows, heads, size, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def _tolerance(q, latents, rank, lengths):
    return attention_kernel_tolerance(q, latents, latents[:, :rank], scale=_SCALE, num_keys=max(lengths))


def _check(lengths, *, heads=4, rank=32, rope=16, page_size=1, dtype=torch.float32, config=_SMALL, calls=1):
    pool, latents = _pool(lengths, rank, rope, page_size, dtype)
    q = _queries(len(lengths), heads, rank + rope, dtype)
    workspace = mla_decode_workspace(len(lengths) + 3, heads, rank, DEVICE, dtype, config)
    plan_decode(pool.lengths, workspace)
    inputs = (q, latents, pool.page_tables, pool.slots, pool.lengths, page_size, _SCALE)
    want = mla_decode_reference(*inputs, rank)
    for _ in range(calls):
        got = mla_decode(*inputs, workspace)
        torch.testing.assert_close(got.float(), want.float(), **_tolerance(q, latents, rank, lengths))
    assert workspace.parts.arrivals.count_nonzero() == 0


@pytest.mark.parametrize("lengths", [[1], [130], [1, 17, 0, 64, 33], [0, 0]], ids=str)
def test_rows_of_any_length_match_the_definition(lengths):
    _check(lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_in_the_default_configuration(dtype):
    _check([5, 300], dtype=dtype, config=None)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    _check([33, 15, 16], page_size=page_size)


@pytest.mark.parametrize("heads, rank, rope", [(16, 48, 8), (3, 24, 20), (128, 16, 16), (80, 16, 8)])
def test_heads_and_sizes(heads, rank, rope):
    """Padded ranks and RoPE dims; more heads than a program takes."""
    _check([40, 3, 21], heads=heads, rank=rank, rope=rope)


def test_the_sizes_of_published_models():
    _check([70, 9], heads=16, rank=512, rope=64, dtype=torch.bfloat16, config=None)


def test_heads_are_cut_into_equal_blocks_of_at_most_64():
    assert [mla_head_blocks(heads) for heads in (1, 16, 64, 80, 96, 128)] == [1, 1, 1, 2, 2, 2]


def test_a_share_may_be_cut_anywhere_and_the_workspace_serves_again():
    for programs in (1, 2, 5):
        _check([100, 1, 47], config=replace(_SMALL, programs_per_sm=programs), calls=2)


def test_a_row_has_the_same_bits_in_any_batch():
    """Shares of several programs, whose ends would cut the long rows elsewhere in each batch."""
    lengths, rank = [100, 5, 0, 47, 160, 1], 16
    pool, latents = _pool(lengths, rank, 16, 1, torch.float32)
    q = _queries(len(lengths), 4, 32, torch.float32)
    workspace = mla_decode_workspace(8, 4, rank, DEVICE, torch.float32, _SMALL, is_batch_invariant=True)

    def attend(rows):
        lens, slots = pool.lengths[rows].contiguous(), pool.slots[rows].contiguous()
        plan_decode(lens, workspace)
        inputs = (q[rows].contiguous(), latents, pool.page_tables, slots, lens, 1, _SCALE)
        got = mla_decode(*inputs, workspace)
        want = mla_decode_reference(*inputs, rank)
        torch.testing.assert_close(got, want, **_tolerance(q, latents, rank, lengths))
        return got

    together = attend(list(range(6)))
    for rows in ([0], [5, 4], [3, 0, 4]):
        assert torch.equal(attend(rows), together[rows])


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_groups_and_rows_alone(page_size):
    lengths, rank = [70, 66, 41, 0, 65, 90, 3], 32
    pool, latents = _pool(lengths, rank, 8, page_size, torch.float32)
    q = _queries(len(lengths), 4, rank + 8, torch.float32)
    workspace = mla_shared_workspace(len(lengths) + 1, 4, rank, DEVICE, torch.float32, _SMALL, _SMALL)
    assert workspace is not None and workspace.rows_per_group == 16
    inputs = (q, latents, pool.page_tables, pool.slots, pool.lengths, page_size, _SCALE)
    for groups in ([([0, 4, 1], 64), ([5, 2], 32)], [], [([5, 0], 48)]):
        for rows, length in groups:
            slots = pool.slots[torch.tensor(rows, device=DEVICE)].long()
            pages = length // page_size
            pool.page_tables[slots, :pages] = pool.page_tables[slots[0], :pages].clone()
        workspace.set_groups([PrefixGroup(np.array(rows), length) for rows, length in groups], pool.slots.tolist())
        plan_shared_decode(pool.lengths, workspace)
        got = mla_shared_decode(*inputs, workspace)
        want = mla_decode_reference(*inputs, rank)
        torch.testing.assert_close(got, want, **_tolerance(q, latents, rank, lengths))


def test_heads_that_fill_a_program_share_no_prefix():
    assert mla_shared_workspace(8, 64, 16, DEVICE) is None
    assert mla_shared_workspace(8, 128, 16, DEVICE) is None


@pytest.mark.parametrize(
    "chunks",
    [[(1, 1)], [(40, 40)], [(7, 50)], [(5, 5), (1, 33), (0, 9), (17, 20)], [(7, 30), (24, 0), (0, 0)]],
    ids=str,
)
@pytest.mark.parametrize("before", [0, 5])
def test_chunks_match_the_definition(chunks, before):
    _check_chunks(chunks, before=before)


@pytest.mark.parametrize("heads, dtype", [(4, torch.bfloat16), (16, torch.float16), (80, torch.float32)], ids=str)
def test_chunks_in_the_default_configuration(heads, dtype):
    _check_chunks([(5, 20), (9, 9)], heads=heads, dtype=dtype, config=None, page_size=16)


def test_wrong_inputs_are_refused():
    pool, latents = _pool([5], 16, 8, 1, torch.float32)
    workspace = mla_decode_workspace(4, 4, 16, DEVICE, torch.float32, _SMALL)
    rest = (pool.page_tables, pool.slots, pool.lengths, 1, _SCALE, workspace)
    for q, kv in (
        (_queries(1, 4, 16, torch.float32), latents),
        (_queries(1, 4, 24, torch.bfloat16), latents),
        (_queries(1, 4, 24, torch.float32), latents[:, :20]),
    ):
        with pytest.raises(ValueError, match="must be"):
            mla_decode(q, kv, *rest)


def _check_chunks(chunks, *, before=0, heads=4, rank=32, rope=8, page_size=1, dtype=torch.float32, config=_EXTEND):
    lengths = [length for _, length in chunks]
    pool, latents = _pool(lengths, rank, rope, page_size, dtype)
    row_starts = torch.tensor([before, *(new for new, _ in chunks)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = _queries(int(row_starts[-1]) + 2, heads, rank + rope, dtype)
    inputs = (q, latents, pool.page_tables, pool.slots, row_starts.to(DEVICE), pool.lengths, page_size, _SCALE)
    out = q.new_zeros(len(q), heads, rank)
    got = mla_extend(*inputs, out, config)
    want = mla_extend_reference(*inputs, rank)
    torch.testing.assert_close(got.float(), want.float(), **_tolerance(q, latents, rank, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_long_rows_on_the_gpu(heads, page_size):
    lengths = [1, 4000, 129, 0, 2048, 777, 64, 8000]
    _check(lengths, heads=heads, rank=512, rope=64, page_size=page_size, dtype=torch.bfloat16, config=None, calls=3)
    chunks = [(100, 4000), (1, 1), (333, 333), (64, 2000)]
    _check_chunks(chunks, heads=heads, rank=512, rope=64, page_size=page_size, dtype=torch.bfloat16, config=None)


@pytest.mark.gpu
@pytest.mark.skipif(not has_wgmma(torch.device(DEVICE)), reason="written for Hopper")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads, dtype", [(128, torch.bfloat16), (64, torch.float16), (80, torch.bfloat16)], ids=str)
def test_the_kernel_for_hopper_matches_the_definition(heads, dtype, page_size):
    for lengths in ([1, 4000, 129, 0, 2048, 777, 64, 8000], [65], [0, 0]):
        config = replace(_SM90, min_tiles=2 if len(lengths) > 1 else 1)
        _check(lengths, heads=heads, rank=512, rope=64, page_size=page_size, dtype=dtype, config=config, calls=3)


@pytest.mark.gpu
@pytest.mark.skipif(not has_wgmma(torch.device(DEVICE)), reason="written for Hopper")
def test_the_kernel_for_hopper_reads_prefixes_once():
    lengths, heads, rank = [700, 600, 513, 900, 700, 530, 0], 16, 512
    pool, latents = _pool(lengths, rank, 64, 1, torch.bfloat16)
    pool.page_tables[:, :512] = pool.page_tables[:1, :512].clone()
    q = _queries(len(lengths), heads, rank + 64, torch.bfloat16)
    workspace = mla_shared_workspace(len(lengths) + 1, heads, rank, DEVICE, torch.bfloat16, _SM90)
    inputs = (q, latents, pool.page_tables, pool.slots, pool.lengths, 1, _SCALE)
    workspace.set_groups([PrefixGroup(np.arange(6), 512)], pool.slots.tolist())
    for _ in range(3):
        plan_shared_decode(pool.lengths, workspace)
        got = mla_shared_decode(*inputs, workspace)
        want = mla_decode_reference(*inputs, rank)
        torch.testing.assert_close(got.float(), want.float(), **_tolerance(q, latents, rank, lengths))


@pytest.mark.gpu
@pytest.mark.skipif(not has_wgmma(torch.device(DEVICE)), reason="written for Hopper")
def test_the_kernel_for_hopper_gives_a_row_the_same_bits_in_any_batch():
    lengths, rank = [1000, 64, 47, 1600, 1], 512
    pool, latents = _pool(lengths, rank, 64, 1, torch.bfloat16)
    q = _queries(len(lengths), 128, rank + 64, torch.bfloat16)
    workspace = mla_decode_workspace(8, 128, rank, DEVICE, torch.bfloat16, _SM90, is_batch_invariant=True)

    def attend(rows):
        lens, slots = pool.lengths[rows].contiguous(), pool.slots[rows].contiguous()
        plan_decode(lens, workspace)
        return mla_decode(q[rows].contiguous(), latents, pool.page_tables, slots, lens, 1, _SCALE, workspace)

    together = attend(list(range(5)))
    for rows in ([0], [4, 3], [3, 0, 2]):
        assert torch.equal(attend(rows), together[rows])


@pytest.mark.parametrize("lengths", [[1], [130], [1, 17, 0, 64, 33], [0, 0]], ids=str)
@pytest.mark.parametrize("heads, rank, dtype", [(4, 32, torch.float32), (16, 48, torch.bfloat16)], ids=str)
def test_few_rows_are_merged_where_they_are_expanded(lengths, heads, rank, dtype):
    _check_expanded(lengths, heads=heads, rank=rank, dtype=dtype)


@pytest.mark.gpu
def test_few_long_rows_on_the_gpu():
    for heads in (16, 128):
        for lengths in ([384], [1, 4000, 129, 0, 2048, 777, 64, 8000]):
            _check_expanded(lengths, heads=heads, rank=512, rope=64, value=128, dtype=torch.bfloat16)


def _check_expanded(lengths, *, heads, rank, dtype, rope=8, value=24):
    pool, latents = _pool(lengths, rank, rope, 1, dtype)
    q = _queries(len(lengths), heads, rank + rope, dtype)
    expand = torch.randn(heads, value + 8, rank, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    workspace = mla_few_rows_workspace(heads, rank, DEVICE, dtype)
    inputs = (q, latents, pool.page_tables, pool.slots, pool.lengths, 1, _SCALE)
    decoded = mla_decode_reference(*inputs, rank)
    want = head_gemm_reference(decoded.float(), expand[:, 8:].float())
    for _ in range(2):
        plan_decode(pool.lengths, workspace)
        got = mla_decode_expanded(*inputs, workspace, expand[:, 8:])
        tolerance = _tolerance(q, latents, rank, lengths)
        # Errors of a head's result are expanded too.
        factor = float(expand.float().norm(dim=2).max()) + 1
        torch.testing.assert_close(
            got.float(), want, rtol=4 * torch.finfo(dtype).eps + tolerance["rtol"], atol=factor * tolerance["atol"]
        )
