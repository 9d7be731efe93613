"""Rows' positions in the table of all slots, read as FlashInfer's kernels read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.paged_rows import row_positions
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig, KernelKind
from radixmesh.daemons.worker.cuda.flashinfer.workspace import workspace_bytes

_MODULUS = 2**32


@st.composite
def _steps(draw: st.DrawFn) -> tuple[IntArray, IntArray, tuple[int, int], int]:
    page_size = draw(st.sampled_from([1, 4, 16]))
    max_pages = draw(st.sampled_from([1, 3, 512, 8192]))
    num_slots = draw(st.sampled_from([1, 2, 16, 512]))
    slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=8))
    lengths = [draw(st.integers(1, max_pages * page_size)) for _ in slots]
    num_padding = draw(st.integers(0 if slots else 1, 5))
    lengths += [draw(st.integers(0, 1)) for _ in range(num_padding)]
    slots += [num_slots] * num_padding
    return np.array(slots, np.int32), np.array(lengths, np.int32), (num_slots + 1, max_pages), page_size


@given(_steps())
def test_kernels_read_each_rows_pages_and_length(step: tuple[IntArray, IntArray, tuple[int, int], int]) -> None:
    slots, lengths, (num_slots, max_pages), page_size = step
    # Every entry names its slot, so that reading another slot's part shows.
    page_list = np.repeat(np.arange(num_slots), max_pages)

    starts, last_lens = row_positions(slots, lengths, (num_slots, max_pages), page_size)

    assert starts.dtype == last_lens.dtype == np.int32
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        read = _length(starts, last_lens, row, page_size)
        # Rows of the dummy slot have nowhere else to start where its part of the table is one page.
        assert read == length or (slot == num_slots - 1 and max_pages == 1 and read == 0)
        pages = page_list[starts[row] : starts[row] + -(-read // page_size)]
        assert len(pages) == -(-read // page_size) and (pages == slot).all()
        assert starts[row] + len(pages) <= starts[-1] == len(page_list)


def _length(starts: IntArray, last_lens: IntArray, row: int, page_size: int) -> int:
    """As `paged_kv_t::get_length` computes it, in 32-bit modular arithmetic."""
    first, following = int(starts[row]), int(starts[row + 1])
    if first == following:
        return 0
    return ((following - first - 1) * page_size + int(last_lens[row])) % _MODULUS


@pytest.mark.parametrize(
    ("kind", "num_heads", "floats", "ints"),
    [
        # 24 heads of 8 groups: 512 rows are ceil(512 * 3 / 16) + 511 = 607 tiles of 16 of which each may be split.
        (KernelKind.TENSOR_CORES, 24, 24 * 607 * 16 * (128 + 1) * 4, 3 * 4 * 607 + 607 + 513 * 4 + 513 * 4 + 8),
        # At most 32 blocks of 132 multiprocessors, over 8 KV heads, write one partial row a head.
        (KernelKind.CUDA_CORES, 24, 24 * 528 * (128 + 1) * 4, 3 * 4 * 529 + 528 + 4),
    ],
)
def test_a_decode_plan_of_all_rows_has_room(kind: KernelKind, num_heads: int, floats: int, ints: int) -> None:
    config = KernelConfig(
        shape=AttentionShape(num_heads=num_heads, num_kv_heads=8, head_dim=128, scale=0.1),
        dtype=torch.bfloat16,
        page_size=16,
        window=None,
        is_causal=False,
        in_graphs=True,
    )
    has_floats, has_ints = workspace_bytes(kind, config, 132, max_rows=512, max_queries=512)
    assert floats <= has_floats < 1.2 * floats
    assert ints + 16 * 8 <= has_ints


def test_an_extend_plan_has_room() -> None:
    config = KernelConfig(
        shape=AttentionShape(num_heads=24, num_kv_heads=8, head_dim=128, scale=0.1),
        dtype=torch.bfloat16,
        page_size=16,
        window=None,
        is_causal=True,
        in_graphs=False,
    )
    # 8192 queries of 64 chunks: at most 64 + 63 tiles of 128 for each of 24 heads, in seven arrays.
    _, ints = workspace_bytes(KernelKind.HOPPER, config, 132, max_rows=64, max_queries=8192)
    assert ints >= 7 * 4 * (64 + 63) * 24 + 133 * 4 + 16 * 8
    # Split where there are fewer tiles than blocks: 2 x 132 blocks over 8 KV heads, tiles of 128.
    floats, _ = workspace_bytes(KernelKind.TENSOR_CORES, config, 132, max_rows=64, max_queries=8192)
    assert floats >= 24 * 33 * 128 * (128 + 1) * 4
