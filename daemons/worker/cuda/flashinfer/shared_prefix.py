"""Decode that reads a prefix shared by several rows once for all of them, by FlashInfer's kernels.

    group   |<--- prefix: all rows' queries against it in tiles --->|
    row i                                                           |<- own: plain decode ->|

The parts are put together by their softmax sums (Hydragen, Juravsky et al. 2024; FlashInfer's cascade, Ye et al. 2025).
Three kernels a layer, of which the grids depend on the number of rows alone: capturable.
"""

from __future__ import annotations

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.paged_rows import PagedRows
from radixmesh.daemons.worker.cuda.flashinfer.kernels import decode_kind_for
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelConfig, KernelKind, merge_module
from radixmesh.daemons.worker.cuda.flashinfer.plan import FlashInferPlan, PlanSpec

# Rows (queries x heads of a group) of the tile that the prefix's keys are multiplied with.
_TILE = 64


class FlashInferSharedPrefix:
    """For one runner, all its layers without a window. Arguments as of `FlashInferAttention`."""

    def __init__(
        self,
        shape: AttentionShape,
        page_tables: torch.Tensor,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        page_size: int,
        max_rows: int,
        suffix_kind: KernelKind | None = None,
    ) -> None:
        device = page_tables.device
        self._page_size = page_size
        self._dummy_slot = page_tables.shape[0] - 1
        self._prefix_rows = PagedRows(page_tables, page_size, max_rows)
        self._suffix_rows = PagedRows(page_tables, page_size, max_rows)
        specs = shared_prefix_plan_specs(
            shape, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, max_rows=max_rows, suffix_kind=suffix_kind
        )
        self._tile_rows = specs[0].longest
        self._prefix_plan, self._suffix_plan = (FlashInferPlan(spec, device) for spec in specs)
        self._merge = merge_module()
        self._prefix_out = torch.empty(max_rows, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        self._lses = torch.empty(2, max_rows, shape.num_heads, dtype=torch.float32, device=device)
        self._planned_groups: tuple[bytes, ...] = ()

    def plan(self, row_slots: IntArray, kv_lens: IntArray, group_sizes: IntArray, prefix_lens: IntArray) -> None:
        """Prepares `decode`; call it before each replay of a graph that holds it.

        row_slots, kv_lens int32 [B]: as of `FlashInferAttention.plan_decode`, padding of length 1. group_sizes,
        prefix_lens int32 [groups]: groups of two rows or more follow one another from row 0 on; rows after them share
        nothing. A group's prefix is some full pages, the same in the tables of all its rows, and ends before the last
        token of each.
        """
        rows = len(row_slots)
        if (prefix_lens % self._page_size).any():
            raise ValueError(f"shared prefixes end in a page of {self._page_size}: {prefix_lens.tolist()}")
        in_groups = int(group_sizes.sum())
        assert in_groups <= rows and (group_sizes >= 2).all(), (group_sizes, rows)
        shared = np.zeros(rows, np.int32)
        shared[:in_groups] = np.repeat(prefix_lens, group_sizes)
        assert (shared < kv_lens).all(), "a row's last token is its own"
        self._suffix_rows.place(row_slots, np.ones(rows, np.int32), kv_lens - shared, shared // self._page_size)
        self._suffix_plan.update(self._suffix_rows)
        first_slots = row_slots[np.cumsum(group_sizes) - group_sizes]
        groups = (first_slots.tobytes(), group_sizes.tobytes(), prefix_lens.tobytes(), bytes(rows))
        if groups != self._planned_groups:
            self._plan_groups(rows, first_slots, group_sizes, prefix_lens)
            self._planned_groups = groups

    def decode(
        self,
        query_BHd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `FlashInferAttention.decode`, for the rows last planned."""
        rows = len(query_BHd)
        assert rows == len(self._suffix_rows), (rows, len(self._suffix_rows))
        if out is None:
            out = torch.empty(query_BHd.shape, dtype=query_BHd.dtype, device=query_BHd.device)
        paged = (-1, self._page_size, *keys_SKd.shape[1:])
        keys, values = keys_SKd.view(paged), values_SKd.view(paged)
        prefix_out, prefix_lse, lse = self._prefix_out[:rows], self._lses[0, :rows], self._lses[1, :rows]
        self._prefix_plan.run(self._prefix_rows, query_BHd, keys, values, prefix_out, prefix_lse)
        self._suffix_plan.run(self._suffix_rows, query_BHd, keys, values, out, lse)
        self._merge.merge_state_in_place(out, lse, prefix_out, prefix_lse, None)
        return out

    def _plan_groups(self, rows: int, first_slots: IntArray, group_sizes: IntArray, prefix_lens: IntArray) -> None:
        """Groups, one of all rows that share nothing, and as many empty ones as make their number that of the graph.

        That number also tells the kernel how long the longest group can be, from which it takes its tile.
        """
        count = min(rows, max(rows - self._tile_rows + 1, rows // 2 + 1))
        groups = len(group_sizes)
        sizes, lengths = np.zeros((2, count), np.int32)
        slots = np.full(count, self._dummy_slot, np.int32)
        slots[:groups], sizes[:groups], lengths[:groups] = first_slots, group_sizes, prefix_lens
        left = rows - int(group_sizes.sum())
        if left:
            sizes[groups] = left
        self._prefix_rows.place(slots, sizes, lengths)
        self._prefix_plan.update(self._prefix_rows)


def shared_prefix_plan_specs(
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    page_size: int,
    max_rows: int,
    suffix_kind: KernelKind | None = None,
) -> tuple[PlanSpec, PlanSpec]:
    """Those of prefixes and of what is the rows' own. Arguments as of `FlashInferSharedPrefix`."""
    config = KernelConfig(
        shape=shape, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, window=None, is_causal=False, in_graphs=True
    )
    prefix, suffix = (
        PlanSpec(kind=kind, config=config, max_rows=max_rows, max_queries=max_rows, longest=longest)
        for kind, longest in (
            (KernelKind.TENSOR_CORES, max(1, _TILE // shape.group_size)),
            (suffix_kind or decode_kind_for(shape), 1),
        )
    )
    return prefix, suffix
