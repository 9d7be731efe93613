"""FlashInfer's compiled modules in torch, on the host: the arguments of FlashInfer 0.6.12, read as its kernels do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from radixmesh.daemons.worker.cuda.attention import paged_rows
from radixmesh.daemons.worker.cuda.flashinfer import attention as flashinfer_attention
from radixmesh.daemons.worker.cuda.flashinfer import kernels as flashinfer_kernels
from radixmesh.daemons.worker.cuda.flashinfer import plan as planned_lane
from radixmesh.daemons.worker.cuda.flashinfer import shared_prefix as flashinfer_shared_prefix
from radixmesh.daemons.worker.cuda.flashinfer import workspace as flashinfer_workspace
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig
from radixmesh.daemons.worker.cuda.step.inputs import row_order
from radixmesh.kernels.kv_fp8 import take_rows

_SIZES = (64, 128, 256)
_NUM_SMS = 4


def use_torch_modules(monkeypatch: pytest.MonkeyPatch, *, is_hopper: bool = True) -> list[str]:
    """Has FlashInfer's kernels computed here; the list that comes back gets the name of each that runs."""
    ran: list[str] = []
    monkeypatch.setattr(flashinfer_kernels, "decode_module", lambda config: _Decode(config, ran))
    monkeypatch.setattr(flashinfer_kernels, "extend_module", lambda name, config: _Extend(name, config, ran))
    monkeypatch.setattr(flashinfer_shared_prefix, "merge_module", lambda: _Merge(ran))
    monkeypatch.setattr(flashinfer_attention, "has_hopper_kernels", lambda device: is_hopper)
    monkeypatch.setattr(flashinfer_workspace, "num_sms_of", lambda device: _NUM_SMS)
    for module in (paged_rows, planned_lane, row_order):
        monkeypatch.setattr(module, "PinnedRing", _HostRing)
    return ran


class _HostRing:
    """The host's work is done when it is launched."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def take(self) -> torch.Tensor:
        # As a ring does, it comes with what was there before.
        return self._buffer

    def fence(self) -> None:
        return


class _Planned:
    """A plan as it would lie in `ints`, whose first numbers say which it is."""

    def __init__(self, config: KernelConfig) -> None:
        self._config = config
        self._plans: list[tuple[list[int], list[int]]] = []

    def _keep(self, ints: torch.Tensor, staging: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        assert len(ints) == len(staging) and ints.dtype == staging.dtype == torch.uint8
        self._plans.append((starts.tolist(), lengths.tolist()))
        ints[:8].view(torch.int64)[0] = len(self._plans) - 1

    def _kept(self, ints: torch.Tensor) -> tuple[list[int], list[int]]:
        return self._plans[int(ints[:8].view(torch.int64)[0])]

    def _check(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        shape, size = self._config.shape, self._config.shape.head_dim
        assert size in _SIZES and self._config.dtype in (torch.float16, torch.bfloat16)
        assert {query.dtype, out.dtype} == {self._config.dtype}
        assert {keys.dtype, values.dtype} == {self._config.pool_dtype}
        assert query.shape[1:] == out.shape[1:] == (shape.num_heads, size) and query.stride(2) == 1
        assert out.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
        assert keys.shape == values.shape and keys.shape[1:] == (self._config.page_size, shape.num_kv_heads, size)


class _Decode(_Planned):
    def __init__(self, config: KernelConfig, ran: list[str]) -> None:
        super().__init__(config)
        self._ran = ran

    def plan(
        self, floats, ints, staging, page_counts, rows, heads, kv_heads, page_size, in_graphs, window_left, soft_cap,
        dim_qk, dim_vo, empty_q, empty_kv,
    ) -> Sequence[int]:  # fmt: skip
        config, shape = self._config, self._config.shape
        assert (heads, kv_heads, dim_qk, dim_vo) == (shape.num_heads, shape.num_kv_heads, *(shape.head_dim,) * 2)
        assert (page_size, in_graphs, window_left) == (config.page_size, config.in_graphs, config.window_left)
        assert len(page_counts) == rows + 1 and (empty_q.dtype, empty_kv.dtype) == (config.dtype, config.pool_dtype)
        assert soft_cap == 0
        self._keep(ints, staging, torch.arange(rows + 1), page_counts.diff())
        return [rows]

    def run(
        self, floats, ints, layout, query, keys, values, starts, page_list, last_lens, out, lse, nhd, window_left, pdl,
        alibi, soft_cap, scale, rope_scale, rope_theta,
    ) -> None:  # fmt: skip
        self._ran.append("decode")
        self._check(query, keys, values, out)
        assert list(layout) == [len(query)] and nhd == 0 and alibi is None and soft_cap == 0
        lengths = _lengths(starts, last_lens, self._config.page_size)
        query_starts, pages = self._kept(ints)
        # A row is split as its pages were counted.
        assert pages == [-(-length // self._config.page_size) for length in lengths]
        _attend(query, keys, values, query_starts, starts, lengths, page_list, out, lse, window_left, scale, False)


class _Extend(_Planned):
    def __init__(self, name: str, config: KernelConfig, ran: list[str]) -> None:
        super().__init__(config)
        self._is_hopper = name == "fa3"
        assert not self._is_hopper or config.pool_dtype == config.dtype
        self._name, self._ran = name, ran

    def plan(
        self, floats, ints, staging, query_starts, page_starts, lengths, num_queries, rows, heads, kv_heads, page_size,
        in_graphs, dim_qk, dim_vo, is_causal, window_left, *split,
    ) -> Sequence[int]:  # fmt: skip
        config, shape = self._config, self._config.shape
        assert (heads, kv_heads, dim_qk, dim_vo) == (shape.num_heads, shape.num_kv_heads, *(shape.head_dim,) * 2)
        assert (page_size, in_graphs, window_left) == (config.page_size, config.in_graphs, config.window_left)
        assert is_causal == config.is_causal and split == (() if self._is_hopper else (-1, False, 0))
        assert len(query_starts) == rows + 1 and len(lengths) == rows and int(query_starts[-1]) == num_queries
        if not self._is_hopper:
            assert page_starts.diff().tolist() == (-(-lengths // page_size)).tolist()
        self._keep(ints, staging, page_starts if self._is_hopper else query_starts, lengths)
        return [rows, num_queries]

    def paged_run(
        self, floats, ints, layout, query, keys, values, query_starts, starts, page_list, last_lens, out, lse, mask,
        nhd, window_left, pdl, *rest,
    ) -> None:  # fmt: skip
        self._ran.append(self._name)
        self._check(query, keys, values, out)
        num_rows, num_queries = layout
        assert len(query) >= num_queries and nhd == 0 and mask == int(self._config.is_causal)
        if self._is_hopper:
            *nothing, soft_cap, scale, one, items = rest
            assert nothing == [None] * 4 and (soft_cap, one, items) == (0.0, 1.0, 0)
            # The plan's own starts and lengths are what this kernel reads.
            planned_starts, lengths = self._kept(ints)
            starts = torch.tensor(planned_starts)
        else:
            *nothing, soft_cap, scale, _, _, items = rest
            assert nothing == [None] * 8 and (soft_cap, items) == (0.0, 0)
            lengths = _lengths(starts, last_lens, self._config.page_size)
            # Padding of no length may be read as one token of zeros, or as none.
            assert all(a == b or b == 0 for a, b in zip(lengths, self._kept(ints)[1], strict=True))
        assert len(lengths) == num_rows
        is_causal = self._config.is_causal
        _attend(
            query, keys, values, query_starts.tolist(), starts, lengths, page_list, out, lse, window_left, scale,
            is_causal,
        )  # fmt: skip


class _Merge:
    def __init__(self, ran: list[str]) -> None:
        self._ran = ran

    def merge_state_in_place(self, out, lse, other, other_lse, mask) -> None:
        self._ran.append("merge")
        assert mask is None and lse.dtype == other_lse.dtype == torch.float32
        both = torch.stack((lse, other_lse))
        shares = (both - both.amax(0)).exp2()
        shares = (shares / shares.sum(0))[..., None]
        out.copy_((shares[0] * out.float() + shares[1] * other.float()).to(out.dtype))
        lse.copy_(both.mul(_LN2).logsumexp(0) / _LN2)


_LN2 = 0.6931471805599453


def _lengths(starts: torch.Tensor, last_lens: torch.Tensor, page_size: int) -> list[int]:
    """As `paged_kv_t::get_length` has them, in 32-bit modular arithmetic."""
    spans = (starts.long().diff() - 1) * page_size + last_lens.long()
    return torch.where(starts.diff() == 0, 0, spans % 2**32).tolist()


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: Sequence[int],
    starts: torch.Tensor,
    lengths: Sequence[int],
    page_list: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    window_left: int,
    scale: float,
    is_causal: bool,
) -> None:
    page_size, group = keys.shape[1], query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths):
        queries = slice(query_starts[row], query_starts[row + 1])
        count = queries.stop - queries.start
        if not count:
            continue
        first = int(starts[row])
        pages = page_list[first : first + -(-length // page_size)].long()
        k, v = (take_rows(x, pages).flatten(0, 1)[:length].repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,lhd->htl", query[queries].float() * scale, k)
        at, key_at = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
        if window_left >= 0 or is_causal:
            hidden = key_at > at if is_causal else torch.zeros(count, length, dtype=torch.bool)
            if window_left >= 0:
                hidden = hidden | (key_at < at - window_left)
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1) if length else scores
        out[queries] = torch.einsum("htl,lhd->thd", weights, v).to(out.dtype)
        if lse is not None:
            lse[queries] = scores.logsumexp(-1).t() / _LN2
