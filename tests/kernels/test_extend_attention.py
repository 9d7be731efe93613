"""Paged extend against its definition, under Triton's interpreter on a CPU and on the GPU where there is one."""

import pytest
import torch
from support.paged_pool import PagedPool
from support.rounding import attention_kernel_tolerance
from support.triton_interpreter import DEVICE

from radixmesh.kernels.attention.extend_attention import ExtendConfig, paged_extend, paged_extend_reference

_SMALL = ExtendConfig(block_m=16, block_n=16, num_warps=4, num_stages=3)


def _check(
    chunks,
    *,
    before=0,
    heads=6,
    kv_heads=2,
    dim=16,
    page_size=1,
    window=None,
    dtype=torch.float32,
    config=_SMALL,
    softcap=None,
    has_sinks=False,
    attention_chunk=None,
):
    """chunks: (new tokens, KV length with them) each. before: rows that come before the first."""
    pool = PagedPool.random([length for _, length in chunks], kv_heads, dim, page_size, dtype)
    row_starts = torch.tensor([before, *(new for new, _ in chunks)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_rows = int(row_starts[-1])
    q = torch.randn(num_rows + 2, heads, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    inputs = (q, pool.keys, pool.values, pool.page_tables, pool.slots, row_starts.to(DEVICE), pool.lengths)
    sinks = torch.linspace(-4, 6, heads).to(DEVICE, dtype) if has_sinks else None
    want = paged_extend_reference(*inputs, page_size, 0.3, window, softcap, sinks, attention_chunk)
    out = torch.zeros_like(q)
    most_new = max(new for new, _ in chunks)
    got = paged_extend(
        *inputs, page_size, 0.3, window, most_new, out, config, softcap, sinks_H=sinks, attention_chunk=attention_chunk
    )
    most = max(length for _, length in chunks)
    tolerance = attention_kernel_tolerance(q, pool.keys, pool.values, scale=0.3, num_keys=most)
    assert got is out
    torch.testing.assert_close(got.float(), want.float(), **tolerance)


@pytest.mark.parametrize(
    "chunks",
    [[(1, 1)], [(40, 40)], [(7, 50)], [(5, 5), (1, 33), (0, 9), (17, 20)], [(0, 3), (16, 32)]],
    ids=str,
)
def test_chunks_match_the_definition(chunks):
    _check(chunks)


@pytest.mark.parametrize("before", [1, 16, 21])
def test_rows_of_others_before_the_chunks_and_of_padding_behind_them(before):
    """As a captured step has them: decodes, chunks, a chunk of padding without KV, and chunks without rows."""
    _check([(7, 30), (1, 1), (24, 0), (0, 0), (0, 0)], before=before)


def test_more_chunks_than_a_program_looks_at_in_one_step():
    _check([(1, 1 + i % 3) if i % 5 else (0, 2) for i in range(70)], before=3)


def test_a_chunk_ends_and_starts_at_every_position_of_a_block():
    """Blocks of 5 rows: chunks of 1 .. 6 rows follow one another."""
    _check([(new, new + 3) for new in (1, 2, 3, 4, 5, 6, 5)])


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_are_capped_before_keys_are_hidden(softcap):
    _check([(7, 50), (3, 3)], softcap=softcap)
    _check([(7, 50)], softcap=softcap, window=5)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_join_the_softmax(window):
    _check([(7, 50), (3, 3), (24, 0)], has_sinks=True, window=window, before=2)
    _check([(9, 40)], has_sinks=True, window=window, heads=8, kv_heads=1, softcap=2.0)


@pytest.mark.parametrize("attention_chunk", [1, 8, 24, 100])
def test_a_chunk_of_attention_hides_the_ones_before_it(attention_chunk):
    """Rows of a block before, at and behind a border."""
    _check([(30, 50), (3, 4), (1, 40), (8, 8), (24, 0)], attention_chunk=attention_chunk)
    _check([(40, 40)], attention_chunk=attention_chunk, page_size=4, has_sinks=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    _check([(5, 70), (20, 20)], dtype=dtype)


def test_the_default_configuration():
    _check([(5, 70), (20, 20)], config=None)


@pytest.mark.parametrize("page_size", [4, 16])
def test_pages_of_several_tokens(page_size):
    _check([(6, 33), (15, 15)], page_size=page_size)


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (8, 1), (2, 2), (12, 1)])
def test_group_sizes(heads, kv_heads):
    _check([(9, 40), (3, 3)], heads=heads, kv_heads=kv_heads)


def test_head_dims_are_padded():
    _check([(9, 40)], dim=24)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_a_window_hides_what_lies_before_it(window):
    _check([(30, 50), (3, 4), (1, 40)], window=window)


def test_wrong_inputs_are_refused():
    pool = PagedPool.random([4, 4], 2, 16, 1, torch.float32)
    q = torch.zeros(2, 6, 16, device=DEVICE)
    rest = (pool.page_tables, pool.slots, pool.lengths, pool.lengths, 1, 0.3, None, 1)
    with pytest.raises(ValueError, match="row starts"):
        paged_extend(q, pool.keys, pool.values, *rest)
    with pytest.raises(ValueError, match="pool"):
        paged_extend(q.half(), pool.keys, pool.values, *rest)
    with pytest.raises(ValueError, match="multiple"):
        paged_extend(q[:, :5].contiguous(), pool.keys, pool.values, *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_chunks_over_long_prefixes(dim, page_size):
    chunks = [(700, 3000), (128, 128), (1, 900), (333, 334)]
    _check(chunks, heads=24, kv_heads=8, dim=dim, page_size=page_size, dtype=torch.bfloat16, config=None)
