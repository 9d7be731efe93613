"""FlashInfer's kernels over the pool's page tables against attention written out in torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.rounding import attention_tolerance, excess, unit_roundoff

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape

if torch.cuda.is_available():
    from radixmesh.daemons.worker.cuda.flashinfer.attention import FlashInferAttention
    from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelKind
    from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import FlashInferSharedPrefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed"),
]

_SLOTS = 12
_DECODE_KINDS = ["cuda_cores", "tensor_cores"]
_EXTEND_KINDS = ["tensor_cores", "hopper"]


@dataclass(frozen=True)
class _Case:
    num_heads: int = 24
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    max_pages: int = 64

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=1 / math.sqrt(self.head_dim),
        )


_CASES = [_Case(), _Case(page_size=1, max_pages=1024), _Case(head_dim=64, num_heads=32), _Case(num_heads=32)]


class _Pool:
    """Shuffled pages. Tokens past a slot's length are NaN: in its last page, and in the rest of those in its table."""

    def __init__(self, case: _Case, kv_lens: list[int]) -> None:
        torch.manual_seed(0)
        num_pages = _SLOTS * case.max_pages
        order = torch.randperm(num_pages).view(_SLOTS, case.max_pages)
        dummy = torch.full((1, case.max_pages), num_pages)
        tables = torch.cat([order, dummy]).int()
        self.keys, self.values = (
            torch.full((num_pages + 1, case.page_size, case.num_kv_heads, case.head_dim), math.nan).bfloat16().cuda()
            for _ in range(2)
        )
        for plane in (self.keys, self.values):
            plane[num_pages] = 0
        for slot, length in enumerate(kv_lens):
            count = -(-length // case.page_size)
            for plane in (self.keys, self.values):
                tokens = torch.randn(count * case.page_size, case.num_kv_heads, case.head_dim).bfloat16()
                tokens[length:] = math.nan
                plane[tables[slot, :count].long().cuda()] = tokens.view(count, *plane.shape[1:]).cuda()
        self.tables = tables.cuda()
        self._case = case

    def planes(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)

    def expected(
        self, query_THd: torch.Tensor, slot: int, length: int, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a slot's last queries and how far off results may be, float32 [queries, heads, head_dim]."""
        case = self._case
        count = -(-length // case.page_size)
        pages = self.tables[slot, :count].long()
        groups = case.num_heads // case.num_kv_heads
        keys, values = (
            plane[pages].flatten(0, 1)[:length].float().repeat_interleave(groups, dim=1)
            for plane in (self.keys, self.values)
        )
        queries = len(query_THd)
        at = torch.arange(length - queries, length, device="cuda")[:, None]
        key_at = torch.arange(length, device="cuda")[None, :]
        hidden = key_at > at
        if window is not None:
            hidden |= key_at <= at - window
        scores = torch.einsum("thd,lhd->htl", query_THd.float() * case.shape.scale, keys)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        expected = torch.einsum("htl,lhd->thd", weights, values)
        exact = attention_tolerance(query_THd, keys, values, scale=case.shape.scale, num_keys=length)
        # Weights and the parts that are put together are rounded to the pool's dtype, and so is the result; tensor
        # cores cut what others round.
        magnitude = torch.einsum("htl,lhd->thd", weights, values.abs())
        unit = unit_roundoff(torch.bfloat16)
        return expected, 4 * exact + 3 * unit * magnitude + unit * expected.abs()


def _attention(case: _Case, pool: _Pool, window: int | None = None, **kinds: KernelKind) -> FlashInferAttention:
    try:
        return FlashInferAttention(
            case.shape,
            pool.tables,
            dtype=torch.bfloat16,
            page_size=case.page_size,
            max_rows=_SLOTS + 4,
            max_extend_tokens=2048,
            windows=(window,),
            **kinds,
        )
    except MeshError as error:
        if "FLASHINFER_DISABLE_JIT" in os.environ:
            pytest.skip(str(error))
        raise


def _query(case: _Case, rows: int) -> torch.Tensor:
    """Part of a wider row, as a GEMM of all projections gives it."""
    wide = torch.randn(rows, case.num_heads + 2 * case.num_kv_heads, case.head_dim).bfloat16().cuda()
    return wide[:, : case.num_heads]


def _check(actual: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert excess(actual, *expected) <= 1


@pytest.mark.parametrize("kind", _DECODE_KINDS)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_decode(case: _Case, kind: str) -> None:
    kv_lens = [1, 15, 16, 17, 128, 300, 640, 1000]
    pool = _Pool(case, kv_lens)
    attention = _attention(case, pool, decode_kind=KernelKind(kind))
    slots = np.array([3, 0, 7, 1, 2, 5, 4, 6], np.int32)
    query = _query(case, len(slots))
    attention.plan_decode(slots, np.array(kv_lens, np.int32)[slots])
    out = attention.decode(query, *pool.planes())
    for row, slot in enumerate(slots.tolist()):
        _check(out[row : row + 1], pool.expected(query[row : row + 1], slot, kv_lens[slot], None))


@pytest.mark.parametrize("kind", _DECODE_KINDS)
def test_a_graph_replays_after_other_plans(kind: str) -> None:
    case = _CASES[0]
    kv_lens = [1000, 3, 77, 512, 16, 640]
    pool = _Pool(case, kv_lens)
    attention = _attention(case, pool, decode_kind=KernelKind(kind))
    rows = 8
    query = torch.zeros(rows, case.num_heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(query)
    padding = np.full(rows, _SLOTS, np.int32)
    # Loads modules and kernels: not allowed while capturing.
    attention.plan_decode(padding, np.ones(rows, np.int32))
    attention.decode(query, *pool.planes(), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.decode(query, *pool.planes(), out=out)
    for taken in ([0], [5, 2, 0], [1, 3, 0, 4, 2, 5]):
        slots, lens = padding.copy(), np.ones(rows, np.int32)
        slots[: len(taken)] = taken
        lens[: len(taken)] = np.array(kv_lens)[taken]
        query.copy_(_query(case, rows))
        attention.plan_decode(slots, lens)
        graph.replay()
        assert out.isfinite().all(), "padding rows too"
        for row, slot in enumerate(taken):
            _check(out[row : row + 1], pool.expected(query[row : row + 1], slot, kv_lens[slot], None))


@pytest.mark.parametrize("kind", _EXTEND_KINDS)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_extend(case: _Case, kind: str) -> None:
    kv_lens = [1, 1000, 17, 640, 300]
    lens = [1, 200, 17, 5, 299]
    pool = _Pool(case, kv_lens)
    attention = _attention(case, pool, extend_kind=KernelKind(kind))
    order = np.array([3, 1, 0, 4, 2], np.int32)
    chunks = np.array(lens, np.int32)[order]
    query = _query(case, int(chunks.sum()) + 3)
    attention.plan_extend(order, chunks, np.array(kv_lens, np.int32)[order])
    out = attention.extend(query, *pool.planes(), out=torch.full_like(query.contiguous(), 7.0))
    row = 0
    for slot in order.tolist():
        rows = slice(row, row + lens[slot])
        _check(out[rows], pool.expected(query[rows], slot, kv_lens[slot], None))
        row += lens[slot]
    assert (out[row:] == 7.0).all(), "rows that were not planned are left alone"


@pytest.mark.parametrize("kind", _EXTEND_KINDS)
@pytest.mark.parametrize("window", [1, 16, 100])
def test_sliding_window(window: int, kind: str) -> None:
    case = _CASES[0]
    kv_lens, lens = [1000, 90], [130, 40]
    pool = _Pool(case, kv_lens)
    attention = _attention(case, pool, window, decode_kind=KernelKind.TENSOR_CORES, extend_kind=KernelKind(kind))
    slots = np.array([0, 1], np.int32)
    query = _query(case, sum(lens))
    attention.plan_extend(slots, np.array(lens, np.int32), np.array(kv_lens, np.int32))
    out = attention.extend(query, *pool.planes(), window)
    _check(out[: lens[0]], pool.expected(query[: lens[0]], 0, kv_lens[0], window))
    _check(out[lens[0] :], pool.expected(query[lens[0] :], 1, kv_lens[1], window))
    attention.plan_decode(slots, np.array(kv_lens, np.int32))
    out = attention.decode(query[:2], *pool.planes(), window)
    for slot in (0, 1):
        _check(out[slot : slot + 1], pool.expected(query[slot : slot + 1], slot, kv_lens[slot], window))


def test_a_host_that_runs_ahead_overwrites_no_plan() -> None:
    case = _CASES[0]
    kv_lens = [1000, 3, 77, 512, 16, 640]
    pool = _Pool(case, kv_lens)
    attention = _attention(case, pool)
    query = _query(case, 1)
    planned = [slot for _ in range(8) for slot in range(len(kv_lens))]
    expected = [pool.expected(query, slot, kv_lens[slot], None) for slot in range(len(kv_lens))]
    outs = []
    # The device is busy while the host plans all of them.
    torch.cuda._sleep(200_000_000)
    for slot in planned:
        attention.plan_decode(np.array([slot], np.int32), np.array([kv_lens[slot]], np.int32))
        outs.append(attention.decode(query, *pool.planes()))
    for slot, out in zip(planned, outs, strict=True):
        _check(out, expected[slot])


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_rows_that_share_a_prefix(case: _Case) -> None:
    """Captured with no group at all, replayed with groups of several sizes, rows that share nothing, and padding."""
    kv_lens = [700, 641, 1000, 16 * 30, 333, 16 * 20 + 1, 5]
    pool = _Pool(case, kv_lens)
    for owner, sharers, tokens in ((0, (2, 1), 640), (3, (4,), 320)):
        for slot in sharers:
            pool.tables[slot, : tokens // case.page_size] = pool.tables[owner, : tokens // case.page_size]
    attention = FlashInferSharedPrefix(
        case.shape, pool.tables, dtype=torch.bfloat16, page_size=case.page_size, max_rows=_SLOTS
    )
    rows, nothing = 9, np.zeros(0, np.int32)
    query, out = _query(case, rows), torch.zeros(rows, case.num_heads, case.head_dim).bfloat16().cuda()
    attention.plan(np.full(rows, _SLOTS, np.int32), np.ones(rows, np.int32), nothing, nothing)
    attention.decode(query, *pool.planes(), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.decode(query, *pool.planes(), out=out)
    steps = (
        ([0, 2, 1, 3, 4, 6, 5], [3, 2], [640, 320]),
        ([4, 3, 6], [2], [16]),
        ([1, 2, 5], [2], [640]),
        ([6, 5], [], []),
    )
    for taken, sizes, prefixes in steps:
        slots, lens = np.full(rows, _SLOTS, np.int32), np.ones(rows, np.int32)
        slots[: len(taken)], lens[: len(taken)] = taken, np.array(kv_lens)[taken]
        attention.plan(slots, lens, np.array(sizes, np.int32), np.array(prefixes, np.int32))
        graph.replay()
        assert out.isfinite().all(), "padding rows too"
        for row, slot in enumerate(taken):
            _check(out[row : row + 1], pool.expected(query[row : row + 1], slot, kv_lens[slot], None))
