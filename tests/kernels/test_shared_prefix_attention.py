"""Decode over shared prefixes against plain decode's definition, under the interpreter and on the GPU."""

import numpy as np
import pytest
import torch
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.triton_interpreter import DEVICE

from radixmesh.kernels.attention.decode_attention import paged_decode_reference
from radixmesh.kernels.attention.prefix_groups import PrefixGroup
from radixmesh.kernels.attention.shared_prefix_attention import (
    SharedPrefixWorkspace,
    paged_shared_decode,
    plan_shared_decode,
)
from radixmesh.kernels.attention.split_schedule import SplitConfig


def _share(pool, groups):
    """Lets the rows of each group read their first row's pages for the group's prefix."""
    for rows, length in groups:
        pages = length // pool.page_size
        slots = pool.slots[torch.as_tensor(rows, device=DEVICE)].long()
        pool.page_tables[slots, :pages] = pool.page_tables[slots[0], :pages].clone()


def _groups(*groups):
    return [PrefixGroup(np.array(rows), length) for rows, length in groups]


def _check(
    lengths,
    group_sets,
    *,
    heads=6,
    kv_heads=2,
    dim=16,
    page_size=1,
    dtype=torch.float32,
    spare_rows=1,
    configs=(None, None),
    softcap=None,
):
    pool = PagedPool.random(lengths, kv_heads, dim, page_size, dtype)
    q = torch.randn(len(lengths), heads, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    workspace = SharedPrefixWorkspace(len(lengths) + spare_rows, heads, kv_heads, dim, DEVICE, dtype, *configs)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, page_size, 0.3)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=max(lengths))
    for groups in group_sets:
        _share(pool, groups)
        workspace.set_groups(groups, pool.slots.tolist())
        plan_shared_decode(pool.lengths, workspace)
        got = paged_shared_decode(*inputs, workspace, softcap=softcap)
        want = paged_decode_reference(*inputs, None, softcap)
        torch.testing.assert_close(got.float(), want.float(), **tolerance)
    return workspace


def test_scores_of_prefixes_are_capped_as_all_are():
    _check([70, 66, 41], [_groups(([0, 1], 64))], softcap=0.5)


def test_rows_of_groups_and_rows_alone():
    lengths = [70, 66, 41, 0, 65, 90, 3]
    _check(lengths, [_groups(([0, 4, 1], 64), ([5, 2], 33))])


@pytest.mark.parametrize("dim", [16, 24])
def test_several_kv_heads_a_program_and_shares_cut_anywhere(dim):
    small = SplitConfig(heads=2, block_n=16, num_warps=4, num_stages=3, programs_per_sm=3, min_tiles=1)
    lengths = [70, 66, 41, 65, 90]
    _check(lengths, [_groups(([0, 3, 1], 64), ([4, 2], 33))], dim=dim, configs=(small, small))


def test_without_groups_it_is_plain_decode_and_groups_may_go():
    lengths = [40, 50, 45, 47]
    _check(lengths, [[], _groups(([1, 2, 3], 36)), _groups(([0, 3], 17)), []])


def test_a_group_larger_than_a_gemm_is_cut():
    workspace = _check([20] * 70, [_groups((list(range(70)), 18))], heads=2, kv_heads=1)
    assert workspace.rows_per_group < 70


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    _check([70, 66, 41], [_groups(([0, 1], 64), ([2], 32))], page_size=page_size)


def test_more_groups_than_rows_can_make_are_refused():
    workspace = SharedPrefixWorkspace(4, 6, 2, 16, DEVICE, torch.float32)
    with pytest.raises(ValueError, match="3 groups"):
        workspace.set_groups(_groups(([0], 16), ([1], 16), ([2], 16)), [0, 1, 2, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_many_groups_of_long_prefixes(page_size):
    groups = _groups(*((range(16 * g, 16 * g + 16), 1024 + 16 * g) for g in range(8)), (range(128, 180), 512))
    lengths = [2000 + 7 * row for row in range(200)]
    _check(lengths, [groups, []], heads=24, kv_heads=8, dim=128, page_size=page_size, dtype=torch.bfloat16)
