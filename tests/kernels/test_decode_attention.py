"""Paged decode against its definition, under Triton's interpreter on a CPU and on the GPU where there is one."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.triton_interpreter import DEVICE

from radixmesh.kernels.attention import split_schedule
from radixmesh.kernels.attention.decode_attention import (
    DecodeWorkspace,
    paged_decode,
    paged_decode_reference,
    plan_decode,
)
from radixmesh.kernels.attention.split_schedule import SplitConfig


def _check(
    lengths,
    *,
    heads=6,
    kv_heads=2,
    dim=16,
    page_size=1,
    window=None,
    dtype=torch.float32,
    config=None,
    calls=1,
    softcap=None,
    has_sinks=False,
    attention_chunk=None,
    is_batch_invariant=False,
):
    pool = PagedPool.random(lengths, kv_heads, dim, page_size, dtype)
    q = torch.randn(len(lengths), heads, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    workspace = DecodeWorkspace(
        len(lengths) + 3, heads, kv_heads, dim, DEVICE, dtype, (None, 5), config, is_batch_invariant, (8, 24)
    )
    plan_decode(pool.lengths, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, page_size, 0.3, window)
    # Some that hardly count, and some that take nearly all.
    sinks = torch.linspace(-4, 6, heads).to(DEVICE, dtype) if has_sinks else None
    want = paged_decode_reference(*inputs, softcap, sinks, attention_chunk)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=max(lengths))
    for _ in range(calls):
        got = paged_decode(*inputs, workspace, softcap=softcap, sinks_H=sinks, attention_chunk=attention_chunk)
        torch.testing.assert_close(got.float(), want.float(), **tolerance)
    assert workspace.parts.arrivals.count_nonzero() == 0
    return workspace


def _config(**changed):
    small = SplitConfig(heads=1, block_n=16, num_warps=4, num_stages=3, programs_per_sm=1, min_tiles=1)
    return replace(small, **changed)


@pytest.mark.parametrize("lengths", [[1], [130], [1, 17, 0, 64, 33], [0, 0]])
def test_rows_of_any_length_match_the_definition(lengths):
    _check(lengths, config=_config())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    _check([5, 70], dtype=dtype)


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
def test_scores_are_capped_before_keys_are_hidden(softcap):
    """Parts of several programs too; a window of 5."""
    _check([5, 130, 0, 17], softcap=softcap, config=_config())
    _check([40, 3], softcap=softcap, window=5)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_join_the_softmax_once_however_a_row_is_cut(window, is_batch_invariant):
    sizes = {"has_sinks": True, "window": window, "is_batch_invariant": is_batch_invariant}
    _check([5, 130, 0, 17], config=_config(programs_per_sm=2), calls=2, **sizes)
    _check([40, 3], softcap=2.0, **sizes)
    _check([19, 40], heads=8, kv_heads=4, dim=24, config=_config(heads=2), **sizes)


@pytest.mark.parametrize("attention_chunk", [8, 24])
def test_a_chunk_hides_the_ones_before_it(attention_chunk):
    """Lengths around the borders of chunks; tokens that are not seen have no tiles."""
    lengths = [1, 8, 9, 23, 24, 25, 48, 49, 130, 0]
    workspace = _check(lengths, attention_chunk=attention_chunk, config=_config(), page_size=4)
    starts = workspace.chunk_plans[attention_chunk].tile_starts[: len(lengths) + 1].tolist()
    tiles = [end - start for start, end in pairwise(starts)]
    seen = [length and (length - 1) % attention_chunk + 1 for length in lengths]
    assert tiles == [max(1, -(-count // 16)) for count in seen]


def test_a_chunk_that_the_workspace_was_not_made_for_is_refused():
    with pytest.raises(ValueError, match="chunks"):
        _check([3], attention_chunk=7)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    _check([33, 15, 16], page_size=page_size)


@pytest.mark.parametrize("heads, kv_heads, per_program", [(8, 4, 4), (6, 2, 2), (8, 1, 1), (2, 2, 1), (12, 4, 4)])
def test_several_kv_heads_a_program(heads, kv_heads, per_program):
    _check([40, 3, 21], heads=heads, kv_heads=kv_heads, config=_config(heads=per_program))


@pytest.mark.parametrize("dim, per_program", [(24, 1), (24, 2), (8, 2)])
def test_head_dims_are_padded(dim, per_program):
    _check([19, 40], dim=dim, config=_config(heads=per_program))


def test_a_window_hides_what_lies_before_it():
    _check([3, 5, 6, 40, 0], window=5, config=_config())


def test_a_share_may_be_cut_anywhere_and_the_workspace_serves_again():
    """Shares of 1, 2, .. tiles: parts of one program, of many, units cut at both ends; counts return to 0."""
    for programs in (1, 2, 5):
        _check([100, 1, 47], config=_config(programs_per_sm=programs), calls=2)


def test_a_least_share_leaves_programs_without_work():
    workspace = _check([20, 20], config=_config(min_tiles=8))
    assert workspace.plans[None].num_programs * 8 > 2 * 2 * 2


def test_a_row_has_the_same_bits_in_any_batch():
    """Shares of several programs, whose ends would cut the long rows elsewhere in each batch."""
    lengths = [100, 5, 0, 47, 160, 1]
    pool = PagedPool.random(lengths, 2, 16, 1, torch.float32)
    q = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    planes, rest = (pool.keys, pool.values, pool.page_tables), (1, 0.3, None)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=max(lengths))
    workspace = DecodeWorkspace(8, 6, 2, 16, DEVICE, torch.float32, config=_config(), is_batch_invariant=True)

    def attend(rows):
        lens, slots = pool.lengths[rows].contiguous(), pool.slots[rows].contiguous()
        plan_decode(lens, workspace)
        got = paged_decode(q[rows].contiguous(), *planes, slots, lens, *rest, workspace)
        want = paged_decode_reference(q[rows], *planes, slots, lens, *rest)
        torch.testing.assert_close(got, want, **tolerance)
        return got

    together = attend(list(range(6)))
    for rows in ([0], [4], [5, 4], [3, 0, 4], [1, 2, 3]):
        assert torch.equal(attend(rows), together[rows])


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_more_rows_than_the_plan_looks_at_in_one_step(is_batch_invariant, monkeypatch):
    monkeypatch.setattr(split_schedule, "UNITS_AT_ONCE", 4)
    lengths = [7, 0, 33, 1, 16, 40, 3, 3, 17, 0]
    pool = PagedPool.random(lengths, 2, 16, 1, torch.float32)
    q = torch.randn(len(lengths), 6, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    workspace = DecodeWorkspace(
        12, 6, 2, 16, DEVICE, torch.float32, config=_config(), is_batch_invariant=is_batch_invariant
    )
    plan_decode(pool.lengths, workspace)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, 1, 0.3, None)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=max(lengths))
    torch.testing.assert_close(paged_decode(*inputs, workspace), paged_decode_reference(*inputs), **tolerance)


def test_wrong_inputs_are_refused():
    pool = PagedPool.random([4, 4], 2, 16, 1, torch.float32)
    q = torch.zeros(2, 6, 16, device=DEVICE)
    workspace = DecodeWorkspace(1, 6, 2, 16, DEVICE, torch.float32)
    with pytest.raises(ValueError, match="made for 1"):
        plan_decode(pool.lengths, workspace)
    rest = (pool.page_tables, pool.slots, pool.lengths, 1, 0.3)
    with pytest.raises(ValueError, match="windows"):
        paged_decode(q, pool.keys, pool.values, *rest, 7, workspace)
    with pytest.raises(ValueError, match="queries"):
        paged_decode(q[:, :4], pool.keys, pool.values, *rest, None, workspace)
    with pytest.raises(ValueError, match="pool"):
        paged_decode(q.half(), pool.keys, pool.values, *rest, None, workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
def test_many_rows_of_mixed_lengths(dim, page_size):
    lengths = torch.randint(1, 3000, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    _check(lengths, heads=24, kv_heads=8, dim=dim, page_size=page_size, dtype=torch.bfloat16, calls=3)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths():
    pool = PagedPool.random([700, 1, 333, 4000], 8, 128, 1, torch.bfloat16)
    q = torch.randn(4, 24, 128, device=DEVICE, dtype=torch.bfloat16)
    workspace = DecodeWorkspace(4, 24, 8, 128, DEVICE)
    out = torch.empty_like(q)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, pool.lengths, 1, 0.1, None)

    def step():
        plan_decode(pool.lengths, workspace)
        paged_decode(*inputs, workspace, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([700, 1, 333, 4000], [1, 0, 7, 64], [20, 1, 65, 3999]):
        pool.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.1, num_keys=max(lengths))
        torch.testing.assert_close(out, paged_decode_reference(*inputs), **tolerance)
