"""Attention of trees of drafts against its definition, under the interpreter and on the GPU."""

import numpy as np
import pytest
import torch
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.triton_interpreter import DEVICE

from radixmesh.daemons.worker.speculation.draft_tree import DraftTree
from radixmesh.kernels.attention.decode_attention import paged_decode_reference
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.attention.tree_attention import (
    TreeWorkspace,
    paged_tree_attention,
    paged_tree_reference,
    plan_trees,
    tree_masks,
)

CUT_ANYWHERE = SplitConfig(heads=1, block_n=16, num_warps=4, num_stages=1, programs_per_sm=1, min_tiles=1)


def _parents(rng, size, num_used):
    """A random tree, and padding behind it."""
    ids, parents = list(range(num_used - 1)), [int(rng.integers(0, row)) for row in range(1, num_used)]
    tree = DraftTree.grown(ids, parents)
    return [*tree.parents.tolist(), *[-2] * (size - num_used)]


def _world(prefix_lens, size, *, heads=6, kv_heads=2, dim=16, page_size=1, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    pool = PagedPool.random([length + size for length in prefix_lens], kv_heads, dim, page_size, dtype)
    num_used = [int(rng.integers(1, size + 1)) for _ in prefix_lens]
    parents = torch.tensor([_parents(rng, size, used) for used in num_used], device=DEVICE)
    q = torch.randn(len(prefix_lens) * size, heads, dim, generator=torch.Generator().manual_seed(seed))
    lens = torch.tensor(prefix_lens, dtype=torch.int32, device=DEVICE)
    return pool, q.to(DEVICE, dtype), lens, parents


def _got(pool, q, lens, masks, size, config=None):
    heads, dim = q.shape[1:]
    workspace = TreeWorkspace(len(lens) + 1, size, heads, pool.keys.shape[1], dim, DEVICE, q.dtype, config)
    plan_trees(lens, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, lens, masks, pool.page_size, 0.3)
    return paged_tree_attention(*inputs, workspace), paged_tree_reference(*inputs)


@pytest.mark.parametrize(
    ("size", "options", "config"),
    [
        (5, {}, None),
        (8, {"page_size": 16, "dim": 24}, None),
        # More queries than a block has, and shares of the prefix that are cut anywhere.
        (16, {"heads": 16, "page_size": 4}, CUT_ANYWHERE),
        (2, {"dtype": torch.bfloat16, "heads": 4, "kv_heads": 4}, None),
    ],
)
def test_each_position_sees_the_prefix_and_its_own_path(size, options, config):
    lens = [70, 0, 33, 1, 64]
    pool, q, prefix_lens, parents = _world(lens, size, **options)
    got, want = _got(pool, q, prefix_lens, tree_masks(parents), size, config)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=max(lens) + size)
    torch.testing.assert_close(got.float(), want.float(), **tolerance)
    is_padding = (parents == -2).flatten()
    assert is_padding.any() and not got[is_padding].any()


def test_a_chain_is_decodes_of_its_positions():
    size, lens = 6, [19, 40]
    pool, q, prefix_lens, _ = _world(lens, size)
    parents = torch.arange(-1, size - 1, device=DEVICE).expand(len(lens), size)
    got, _ = _got(pool, q, prefix_lens, tree_masks(parents), size)
    kv_lens = (prefix_lens[:, None] + 1 + torch.arange(size, device=DEVICE)).flatten().to(torch.int32)
    slots = pool.slots.repeat_interleave(size)
    want = paged_decode_reference(q, pool.keys, pool.values, pool.page_tables, slots, kv_lens, pool.page_size, 0.3)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_masks_are_paths_up_to_the_last_bit():
    assert tree_masks(torch.tensor([[-1, 0, 1, 0, -2]])).tolist() == [1, 0b11, 0b111, 0b1001, 0]
    deep = tree_masks(torch.arange(-1, 63)[None])
    assert deep[-1].item() == -1 and deep[62].item() == (1 << 63) - 1


def test_what_other_branches_hold_changes_no_bit():
    """Positions that a path does not hold are hidden from it, whatever their KV is."""
    size = 4
    pool, q, prefix_lens, _ = _world([20], size)
    masks = tree_masks(torch.tensor([[-1, 0, 1, 0]], device=DEVICE))
    before, _ = _got(pool, q, prefix_lens, masks, size)
    at = 21  # Position 1, which 0 and 3 do not see.
    token = int(pool.page_tables[pool.slots[0], at // pool.page_size]) * pool.page_size + at % pool.page_size
    pool.keys[token], pool.values[token] = 1e4, -1e4
    after, _ = _got(pool, q, prefix_lens, masks, size)
    assert torch.equal(before[[0, 3]], after[[0, 3]])
    assert not torch.equal(before[[1, 2]], after[[1, 2]])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="1 to 64 positions"):
        TreeWorkspace(2, 65, 4, 2, 16, DEVICE)
    pool, q, prefix_lens, parents = _world([5], 3)
    masks = tree_masks(parents)
    with pytest.raises(ValueError, match="as many queries"):
        _got(pool, q, prefix_lens, masks[:2], 3)
    with pytest.raises(ValueError, match="as many queries"):
        _got(pool, q, prefix_lens, masks.int(), 3)
