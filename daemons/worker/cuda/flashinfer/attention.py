"""Attention over the paged pool by FlashInfer's kernels, planned on the host while the device runs.

    host     plan_decode(step n + 1) ..................... replay(n + 1)
    device   ... step n ... | copies of the plan | graph of step n + 1: decode x layers

Plans and rows' positions lie at addresses that depend on the number of rows alone, so a graph captured after one
`plan_decode` of B rows replays after any other of B rows. Nothing here waits for the device, but for a host four plans
ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.paged_rows import PagedRows
from radixmesh.daemons.worker.cuda.flashinfer.kernels import decode_kind_for, has_hopper_kernels
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig, KernelKind
from radixmesh.daemons.worker.cuda.flashinfer.plan import FlashInferPlan, PlanSpec


class FlashInferAttention:
    """Decode and extend for one runner and all its layers. Not safe for use from several streams at a time.

    page_tables: int32 [slots + 1, max_pages] on the device, the last the dummy slot's. windows: all that layers have.
    Numbers of rows are bounded by `max_rows`, queries of one extend by `max_extend_tokens`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        page_tables: torch.Tensor,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        page_size: int,
        max_rows: int,
        max_extend_tokens: int,
        windows: Sequence[int | None] = (None,),
        decode_kind: KernelKind | None = None,
        extend_kind: KernelKind | None = None,
    ) -> None:
        self._page_size = page_size
        self._decode_rows = PagedRows(page_tables, page_size, max_rows)
        self._extend_rows = PagedRows(page_tables, page_size, max_rows)
        specs = attention_plan_specs(
            shape,
            page_tables.device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            max_rows=max_rows,
            max_extend_tokens=max_extend_tokens,
            windows=windows,
            decode_kind=decode_kind,
            extend_kind=extend_kind,
        )
        self._decode_plans, self._extend_plans = (
            {spec.config.window: FlashInferPlan(spec, page_tables.device) for spec in of_kind} for of_kind in specs
        )

    def plan_decode(self, row_slots: IntArray, kv_lens: IntArray) -> None:
        """Prepares `decode` for one query a row; call it before each replay of a graph that holds `decode`.

        row_slots, kv_lens int32 [B], on the host: exact lengths with the row's own token. Padding rows are of the
        dummy slot with length 0 or 1.
        """
        self._decode_rows.place(row_slots, np.ones(len(row_slots), np.int32), kv_lens)
        for plan in self._decode_plans.values():
            plan.update(self._decode_rows)

    def decode(
        self,
        query_BHd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, heads, head_dim] for the rows last planned. query: with RoPE, not scaled, its last axis dense.

        keys, values: the layer's pool of [tokens, kv heads, head_dim], the rows' own tokens written. Capturable.
        """
        return self._run(self._decode_plans[window], self._decode_rows, query_BHd, keys_SKd, values_SKd, out)

    def plan_extend(self, slots: IntArray, lens: IntArray, kv_lens: IntArray) -> None:
        """Prepares `extend` for chunks: the last `lens` of the `kv_lens` tokens of each slot. int32 [chunks], host."""
        self._extend_rows.place(slots, lens, kv_lens)
        for plan in self._extend_plans.values():
            plan.update(self._extend_rows)

    def extend(
        self,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `decode`, causal, for the chunks last planned, one after the other; rows after them are not written."""
        return self._run(self._extend_plans[window], self._extend_rows, query_THd, keys_SKd, values_SKd, out)

    def _run(
        self,
        plan: FlashInferPlan,
        rows: PagedRows,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(query_THd.shape, dtype=query_THd.dtype, device=query_THd.device)
        paged = (-1, self._page_size, *keys_SKd.shape[1:])
        plan.run(rows, query_THd, keys_SKd.view(paged), values_SKd.view(paged), out)
        return out


def attention_plan_specs(
    shape: AttentionShape,
    device: torch.device,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    page_size: int,
    max_rows: int,
    max_extend_tokens: int,
    windows: Sequence[int | None] = (None,),
    decode_kind: KernelKind | None = None,
    extend_kind: KernelKind | None = None,
) -> tuple[list[PlanSpec], list[PlanSpec]]:
    """Those of decode and of extend, one a window. Arguments as of `FlashInferAttention`."""
    if extend_kind is None:
        # The Hopper kernels multiply a pool of FP8 by queries of FP8 alone.
        is_hopper = has_hopper_kernels(device) and kv_dtype in (None, dtype)
        extend_kind = KernelKind.HOPPER if is_hopper else KernelKind.TENSOR_CORES
    decodes, extends = (
        [
            PlanSpec(
                kind=kind,
                config=KernelConfig(
                    shape=shape,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    page_size=page_size,
                    window=window,
                    is_causal=is_extend,
                    in_graphs=not is_extend,
                ),
                max_rows=max_rows,
                max_queries=max_extend_tokens if is_extend else max_rows,
            )
            for window in dict.fromkeys(windows)
        ]
        for kind, is_extend in ((decode_kind or decode_kind_for(shape), False), (extend_kind, True))
    )
    return decodes, extends
