"""Tiled attention in plain torch whose results do not depend on batch, chunking or page layout.

The rows of a segment are cut, by position, into units of Q consecutive rows; keys go in tiles of B from position 0 on.
Every matmul has the shape [Q x group, head_dim] x [head_dim, B], batched over units and KV heads, for prefill and
decode alike, and the softmax is accumulated tile by tile (online softmax: Milakov and Gimelshein 2018; as in
FlashAttention-2, Dao 2023). A row's index in its unit is position % Q; a key tile that a row sees nothing of changes
none of its bits (the maximum stays, the correction factor is exp(0) = 1, the added terms are 0). What is left to vary
is the number of units in a batched matmul, for which sizes are verified like any tile's (`tiles.py`).

    positions      0 ........ Q ........ 2Q ....... 3Q         keys  0 ..... B ..... 2B
    segment             [start ............. end)                    tile 0 | tile 1 | ..
    units          .....uuuuu|uuuuuuuuuu|uuuu......            each unit: tiles up to its last row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cpu.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionPlacement,
    AttentionShape,
    BatchAttention,
    SlotArray,
)
from radixmesh.daemons.worker.tiles import RowTiles, Tensors, agreeing_sizes

_log = get_logger(__name__)

KEY_TILE = 64
# Rows of one matmul: small ones cost about as much, and more would only compute padding in decode.
_TARGET_PRODUCT_ROWS = 8
_UNIT_COUNTS = (1, 2, 4, 8, 16, 32)
_PROBE_UNITS = 8
# Below every score and finite: a row that has seen no key yet must not compute inf - inf.
_LOWEST = -1e30


class PagedTorchAttention(AttentionBackend):
    """See the module. Where determinism is not asked for, the same tiles are used without being verified."""

    def __init__(self, shape: AttentionShape, placement: AttentionPlacement) -> None:
        self._shape = shape
        self._device = placement.device
        self._query_tile = max(1, _TARGET_PRODUCT_ROWS // shape.group_size)
        self._unit_tiles = RowTiles(self._verified_unit_counts() if placement.is_deterministic else _UNIT_COUNTS)
        self.is_batch_invariant = placement.is_deterministic

    def begin(self, batch: AttentionBatch) -> BatchAttention:
        return _PagedTorchStep(self._shape, partial(_plan, batch, self._query_tile, self._unit_tiles), self._device)

    def _verified_unit_counts(self) -> tuple[int, ...]:
        shape, generator = self._shape, torch.Generator().manual_seed(0)
        size = (_PROBE_UNITS, shape.num_kv_heads)
        query = torch.randn(*size, self._query_tile * shape.group_size, shape.head_dim, generator=generator)
        keys, values = (torch.randn(*size, 2 * KEY_TILE, shape.head_dim, generator=generator) for _ in range(2))
        # The second tile is half hidden, in another way for each unit.
        cut = torch.randint(0, KEY_TILE, (_PROBE_UNITS, self._query_tile), generator=generator)
        hidden = torch.arange(KEY_TILE) > cut[:, :, None]
        rows = tuple(x.to(self._device) for x in (query, keys, values, hidden))
        sinks_H = torch.randn(shape.num_heads, generator=generator).to(self._device)

        def attend(unit_inputs: Tensors) -> Tensors:
            q, k, v, hidden = unit_inputs
            state = _OnlineSoftmax(q.flatten(0, 1), shape)
            first, second = slice(0, KEY_TILE), slice(KEY_TILE, None)
            state.add(k[:, :, first].flatten(0, 1).contiguous(), v[:, :, first].flatten(0, 1).contiguous(), None)
            state.add(k[:, :, second].flatten(0, 1).contiguous(), v[:, :, second].flatten(0, 1).contiguous(), hidden)
            return (state.result(None).view_as(q), state.result(sinks_H).view_as(q))

        counts = agreeing_sizes(attend, rows, _UNIT_COUNTS)
        if len(counts) < len(_UNIT_COUNTS):
            _log.warning("attention_unit_counts_restricted", verified=counts, tried=_UNIT_COUNTS)
        # A matmul of one unit is always of the same shape, and its rows' indexes are fixed by their positions.
        return counts or (1,)


class _KeyTile(NamedTuple):
    slots_UB: torch.Tensor
    hidden_UQB: torch.Tensor | None


class _UnitGroup(NamedTuple):
    """Units that are computed together, and their key tiles."""

    num_units: int
    key_tiles: list[_KeyTile]


class _Plan(NamedTuple):
    """unit_to_row [units x Q]: the row at each index of each unit (row 0 at indexes without one); row_to_index its
    inverse [rows with padding]."""

    unit_to_row: torch.Tensor
    row_to_index: torch.Tensor
    groups: list[_UnitGroup]


class _PagedTorchStep(BatchAttention):
    """A plan for each window and chunk that the model's layers have, made when the first of them asks."""

    def __init__(
        self, shape: AttentionShape, plan_for: Callable[[int | None, int | None], _Plan], device: torch.device
    ) -> None:
        self._shape = shape
        self._plan_for = plan_for
        self._plans: dict[tuple[int | None, int | None], _Plan] = {}
        self._heads_K1 = torch.arange(shape.num_kv_heads, device=device)[:, None]

    def attend(
        self,
        query_THD: torch.Tensor,
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        chunk: int | None = None,
    ) -> torch.Tensor:
        shape = self._shape
        if (window, chunk) not in self._plans:
            self._plans[window, chunk] = self._plan_for(window, chunk)
        plan = self._plans[window, chunk]
        tile = plan.unit_to_row.shape[0] // sum(group.num_units for group in plan.groups)
        # [U, Q, K, G, D] -> [U, K, Q, G, D] -> [U x K, Q x G, D]: one matmul a unit and KV head.
        query = query_THD.index_select(0, plan.unit_to_row).to(torch.float32).mul_(shape.scale)
        query = query.view(-1, tile, shape.num_kv_heads, shape.group_size, shape.head_dim).transpose(1, 2)
        query = query.reshape(-1, tile * shape.group_size, shape.head_dim)
        outputs = []
        first = 0
        for group in plan.groups:
            last = first + group.num_units * shape.num_kv_heads
            outputs.append(self._attend_group(query[first:last], group.key_tiles, keys_SKD, values_SKD, sinks_H))
            first = last
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if window is not None or chunk is not None:
            # The tiles that are skipped depend on the batch, and a tile of which a row sees nothing turns -0 to 0.
            out = out + 0.0
        out = out.view(-1, shape.num_kv_heads, tile, shape.group_size, shape.head_dim).transpose(1, 2)
        out_THD = out.reshape(-1, shape.num_heads, shape.head_dim).index_select(0, plan.row_to_index)
        return out_THD.to(query_THD.dtype)

    def _attend_group(
        self,
        query: torch.Tensor,
        key_tiles: Sequence[_KeyTile],
        keys_SKD: torch.Tensor,
        values_SKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        num_kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        keys, values = keys_SKD.view(-1, head_dim), values_SKD.view(-1, head_dim)
        state = _OnlineSoftmax(query, self._shape)
        for slots_UB, hidden_UQB in key_tiles:
            # Gathered with the heads outside, which is the layout that the matmuls want.
            index = (slots_UB[:, None, :] * num_kv_heads + self._heads_K1).view(-1)
            size = (query.shape[0], KEY_TILE, head_dim)
            keys_NBD = keys.index_select(0, index).view(size).to(torch.float32)
            # A compressed cache attends over one plane, which is keys and values.
            is_one = values_SKD is keys_SKD
            values_NBD = keys_NBD if is_one else values.index_select(0, index).view(size).to(torch.float32)
            state.add(keys_NBD, values_NBD, hidden_UQB)
        return state.result(sinks_H)


class _OnlineSoftmax:
    """Attention of some units over key tiles that come one by one. N = units x KV heads, M = Q x group."""

    def __init__(self, query_NMD: torch.Tensor, shape: AttentionShape) -> None:
        self._query_NMD = query_NMD
        self._shape = shape
        self._max_NM1: torch.Tensor | None = None
        self._sum_NM1 = query_NMD
        self._weighted_NMD = query_NMD

    def add(self, keys_NBD: torch.Tensor, values_NBD: torch.Tensor, hidden_UQB: torch.Tensor | None) -> None:
        """Takes the next key tile. hidden_UQB: True where a row must not see a key; None = all see all."""
        scores_NMB = torch.bmm(self._query_NMD, keys_NBD.transpose(1, 2))
        if self._shape.softcap is not None:
            scores_NMB.div_(self._shape.softcap).tanh_().mul_(self._shape.softcap)
        if hidden_UQB is not None:
            units, queries, keys = hidden_UQB.shape
            by_row = scores_NMB.view(units, -1, queries, self._shape.group_size, keys)
            by_row.masked_fill_(hidden_UQB[:, None, :, None, :], float("-inf"))
        max_NM1 = scores_NMB.amax(dim=-1, keepdim=True)
        if self._max_NM1 is None:
            max_NM1.clamp_(min=_LOWEST)
            exp_NMB = scores_NMB.sub_(max_NM1).exp_()
            self._sum_NM1 = exp_NMB.sum(dim=-1, keepdim=True)
            self._weighted_NMD = torch.bmm(exp_NMB, values_NBD)
        else:
            max_NM1 = torch.maximum(max_NM1, self._max_NM1)
            exp_NMB = scores_NMB.sub_(max_NM1).exp_()
            correction_NM1 = self._max_NM1.sub_(max_NM1).exp_()
            self._sum_NM1.mul_(correction_NM1).add_(exp_NMB.sum(dim=-1, keepdim=True))
            self._weighted_NMD.mul_(correction_NM1).add_(torch.bmm(exp_NMB, values_NBD))
        self._max_NM1 = max_NM1

    def result(self, sinks_H: torch.Tensor | None) -> torch.Tensor:
        """[N, M, D]. Indexes without a row may divide 0 by 0; nobody reads them."""
        if sinks_H is None:
            return self._weighted_NMD / self._sum_NM1
        assert self._max_NM1 is not None
        group, num_kv_heads = self._shape.group_size, self._shape.num_kv_heads
        num, rows = self._max_NM1.shape[:2]
        # Rows of a unit are queries x heads of the group.
        sinks_K1G = sinks_H.float().view(num_kv_heads, 1, group)
        sinks_NM1 = sinks_K1G.expand(num // num_kv_heads, num_kv_heads, rows // group, group).reshape(num, rows, 1)
        max_NM1 = torch.maximum(self._max_NM1, sinks_NM1)
        kept_NM1 = (self._max_NM1 - max_NM1).exp()
        return self._weighted_NMD * kept_NM1 / (self._sum_NM1 * kept_NM1 + (sinks_NM1 - max_NM1).exp())


def _plan(batch: AttentionBatch, query_tile: int, unit_tiles: RowTiles, window: int | None, chunk: int | None) -> _Plan:
    """Cuts the segments into units and sorts those by context, so that units of a group have about as many tiles."""
    segment_U, first_U, row_U = _cut_into_units(batch, query_tile)
    end_U = np.array([segment.start + segment.length for segment in batch.segments])[segment_U]
    num_tiles_U = (np.minimum(first_U + query_tile, end_U) - 1) // KEY_TILE + 1
    order = np.argsort(-num_tiles_U, kind="stable")
    segment_U, first_U, row_U, end_U, num_tiles_U = (x[order] for x in (segment_U, first_U, row_U, end_U, num_tiles_U))
    cover = unit_tiles.cover(len(order))
    unit_to_row = np.zeros((sum(cover), query_tile), np.int64)
    row_to_index = np.zeros(batch.num_rows, np.int64)
    starts_U = np.array([segment.start for segment in batch.segments])[segment_U]
    position_UQ = first_U[:, None] + np.arange(query_tile)
    has_row_UQ = (position_UQ >= starts_U[:, None]) & (position_UQ < end_U[:, None])
    rows_UQ = position_UQ - first_U[:, None] + row_U[:, None]
    unit_to_row[: len(order)][has_row_UQ] = rows_UQ[has_row_UQ]
    row_to_index[rows_UQ[has_row_UQ]] = np.flatnonzero(has_row_UQ)
    slots = [_padded_slots(segment.kv_slots, batch.zero_slot) for segment in batch.segments]
    groups, at = [], 0
    for size in cover:
        units = slice(at, min(at + size, len(order)))
        nearest = int(first_U[units].min())
        first_seen = 0 if window is None else max(0, nearest - window + 1)
        if chunk is not None:
            first_seen = max(first_seen, nearest // chunk * chunk)
        first_tile = first_seen // KEY_TILE
        groups.append(
            _UnitGroup(
                num_units=size,
                key_tiles=[
                    _key_tile(j, size, segment_U[units], position_UQ[units], slots, batch.zero_slot, window, chunk)
                    for j in range(first_tile, int(num_tiles_U[at]))
                ],
            )
        )
        at += size
    return _Plan(torch.from_numpy(unit_to_row.reshape(-1)), torch.from_numpy(row_to_index), groups)


def _cut_into_units(batch: AttentionBatch, query_tile: int) -> tuple[SlotArray, SlotArray, SlotArray]:
    """Per unit: its segment, the position of its first index, and the row that this index has or would have."""
    segments, firsts, rows = [], [], []
    row = 0
    for index, segment in enumerate(batch.segments):
        first = np.arange(segment.start // query_tile * query_tile, segment.start + segment.length, query_tile)
        segments.append(np.full(len(first), index))
        firsts.append(first)
        rows.append(row + first - segment.start)
        row += segment.length
    return np.concatenate(segments), np.concatenate(firsts), np.concatenate(rows)


def _padded_slots(slots: SlotArray, zero_slot: int) -> SlotArray:
    padded = np.full(-(-len(slots) // KEY_TILE) * KEY_TILE, zero_slot, np.int64)
    padded[: len(slots)] = slots
    return padded


def _key_tile(
    index: int,
    num_units: int,
    segment_U: SlotArray,
    position_UQ: SlotArray,
    slots: Sequence[SlotArray],
    zero_slot: int,
    window: int | None,
    chunk: int | None,
) -> _KeyTile:
    """Key tile `index` of a group: the pool's zero token stands for keys that a unit does not have."""
    first = index * KEY_TILE
    slots_UB = np.full((num_units, KEY_TILE), zero_slot, np.int64)
    for unit, segment in enumerate(segment_U.tolist()):
        if first < len(slots[segment]):
            slots_UB[unit] = slots[segment][first : first + KEY_TILE]
    nearest, farthest = int(position_UQ.min()), int(position_UQ.max())
    sees_all = nearest >= first + KEY_TILE - 1 and (window is None or farthest - window < first)
    sees_all = sees_all and (chunk is None or farthest // chunk * chunk <= first)
    if sees_all and len(segment_U) == num_units:
        return _KeyTile(torch.from_numpy(slots_UB), None)
    key_B = np.arange(first, first + KEY_TILE)
    hidden_UQB = np.ones((num_units, position_UQ.shape[1], KEY_TILE), np.bool_)
    hidden_UQB[: len(segment_U)] = key_B > position_UQ[:, :, None]
    if window is not None:
        hidden_UQB[: len(segment_U)] |= key_B <= position_UQ[:, :, None] - window
    if chunk is not None:
        hidden_UQB[: len(segment_U)] |= key_B < position_UQ[:, :, None] // chunk * chunk
    return _KeyTile(torch.from_numpy(slots_UB), torch.from_numpy(hidden_UQB))
