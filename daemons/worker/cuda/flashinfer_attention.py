"""Attention over the paged pool by FlashInfer's kernels, planned on the host while the device runs.

    host     plan_decode(step n + 1) ..................... replay(n + 1)
    device   ... step n ... | copies of the plan | graph of step n + 1: decode x layers

Plans and rows' places lie at addresses that depend on the number of rows alone, so a graph captured after one
`plan_decode` of B rows replays after any other of B rows. Nothing here waits for the device, but for a host four plans
ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.attention.backend import AttentionShape

from .flashinfer_kernels import create_kernel, has_hopper_kernels
from .flashinfer_modules import KernelConfig, KernelKind, PlanLayout
from .flashinfer_workspace import allocate_workspace
from .paged_rows import PagedRows
from .pinned_ring import PinnedRing

# From so many query heads a KV head on, the tensor cores' tile of 16 is full enough to be worth it.
_TENSOR_CORE_GROUP = 4


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
        page_size: int,
        max_rows: int,
        max_extend_tokens: int,
        windows: Sequence[int | None] = (None,),
        decode_kind: KernelKind | None = None,
        extend_kind: KernelKind | None = None,
    ) -> None:
        device = page_tables.device
        if decode_kind is None:
            is_wide = shape.group_size >= _TENSOR_CORE_GROUP
            decode_kind = KernelKind.TENSOR_CORES if is_wide else KernelKind.CUDA_CORES
        if extend_kind is None:
            extend_kind = KernelKind.HOPPER if has_hopper_kernels(device) else KernelKind.TENSOR_CORES
        self._page_size = page_size
        self._decode_rows = PagedRows(page_tables, page_size, max_rows)
        self._extend_rows = PagedRows(page_tables, page_size, max_rows)
        self._decode_lanes, self._extend_lanes = (
            {
                window: _Lane(
                    kind,
                    KernelConfig(
                        shape=shape,
                        dtype=dtype,
                        page_size=page_size,
                        window=window,
                        is_causal=is_extend,
                        in_graphs=not is_extend,
                    ),
                    device,
                    max_rows=max_rows,
                    max_queries=max_extend_tokens if is_extend else max_rows,
                )
                for window in dict.fromkeys(windows)
            }
            for kind, is_extend in ((decode_kind, False), (extend_kind, True))
        )

    def plan_decode(self, row_slots: IntArray, kv_lens: IntArray) -> None:
        """Prepares `decode` for one query a row; call it before each replay of a graph that holds `decode`.

        row_slots, kv_lens int32 [B], on the host: exact lengths with the row's own token. Padding rows are of the
        dummy slot with length 0 or 1.
        """
        self._decode_rows.place(row_slots, np.ones(len(row_slots), np.int32), kv_lens)
        for lane in self._decode_lanes.values():
            lane.plan(self._decode_rows)

    def decode(
        self,
        query_BHd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, heads, head_dim] for the rows last planned. query: rotated, not scaled, its last axis dense.

        keys, values: the layer's pool of [tokens, kv heads, head_dim], the rows' own tokens written. Capturable.
        """
        return self._run(self._decode_lanes[window], self._decode_rows, query_BHd, keys_SKd, values_SKd, out)

    def plan_extend(self, slots: IntArray, lens: IntArray, kv_lens: IntArray) -> None:
        """Prepares `extend` for chunks: the last `lens` of the `kv_lens` tokens of each slot. int32 [chunks], host."""
        self._extend_rows.place(slots, lens, kv_lens)
        for lane in self._extend_lanes.values():
            lane.plan(self._extend_rows)

    def extend(
        self,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        window: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `decode`, causal, for the chunks last planned, one after the other; rows after them are not written."""
        return self._run(self._extend_lanes[window], self._extend_rows, query_THd, keys_SKd, values_SKd, out)

    def _run(
        self,
        lane: _Lane,
        rows: PagedRows,
        query_THd: torch.Tensor,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(query_THd.shape, dtype=query_THd.dtype, device=query_THd.device)
        paged = (-1, self._page_size, *keys_SKd.shape[1:])
        lane.run(rows, query_THd, keys_SKd.view(paged), values_SKd.view(paged), out)
        return out


class _Lane:
    """A kernel and the plan of it that is in force."""

    def __init__(
        self, kind: KernelKind, config: KernelConfig, device: torch.device, *, max_rows: int, max_queries: int
    ) -> None:
        self._kernel = create_kernel(kind, config)
        self._workspace = allocate_workspace(kind, config, device, max_rows=max_rows, max_queries=max_queries)
        self._staging = PinnedRing(len(self._workspace.ints))
        self._layout: PlanLayout = ()
        # What graphs have captured, by number of rows: another layout under them would be read as this one.
        self._captured: dict[int, tuple[int, ...]] | None = {} if config.in_graphs else None

    def plan(self, rows: PagedRows) -> None:
        self._layout = self._kernel.plan(rows, self._workspace, self._staging.take())
        self._staging.fence()
        if self._captured is not None:
            layout = tuple(self._layout)
            first = self._captured.setdefault(len(rows), layout)
            assert layout == first, (len(rows), layout, first)

    def run(
        self,
        rows: PagedRows,
        query_THd: torch.Tensor,
        keys_PSKd: torch.Tensor,
        values_PSKd: torch.Tensor,
        out_THd: torch.Tensor,
    ) -> None:
        self._kernel.run(self._layout, rows, self._workspace, query_THd, keys_PSKd, values_PSKd, out_THd)
