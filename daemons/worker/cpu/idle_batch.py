"""The batch of a rank without rows whose experts compute those of other ranks."""

from __future__ import annotations

import torch

from radixmesh.daemons.worker.cpu.attention.backend import BatchAttention
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.model import ModelBatch
from radixmesh.daemons.worker.tiles import RowTiles


def idle_batch(tiles: RowTiles, pool: KvPool) -> ModelBatch:
    """Padding rows alone, as few as there can be; nothing is written."""
    zeros_T = torch.zeros(tiles.padded(1), dtype=torch.int64)
    return ModelBatch(
        ids_T=zeros_T,
        positions_T=zeros_T,
        num_rows=0,
        kv_slots_N=zeros_T[:0],
        kv=pool,
        attention=_NoAttention(),
        tiles=tiles,
    )


class _NoAttention(BatchAttention):
    """That of a step without rows."""

    def attend(
        self,
        query_THD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        return torch.zeros_like(query_THD)
