"""Memory of the rows of a network that drafts on a device, and of which tokens its KV is fresh for.

Legend of shapes: `follow.py`, whose kernels read and write all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class FreshTokens(NamedTuple):
    """is_fresh_N int8. By slot, int32: fresh_lens_S, how many of its first positions are known to be fresh;
    tabled_lens_S, how many of its positions tables_SL has by the network's positions: numbers of the pool's tokens. The
    last slot is the dummy of padding, whose table is not changed."""

    is_fresh_N: torch.Tensor
    fresh_lens_S: torch.Tensor
    tabled_lens_S: torch.Tensor
    tables_SL: torch.Tensor


class NetworkShape(NamedTuple):
    """first: the target's position of the network's first row. page_size: of the target's tables. max_total_len: most
    tokens that the network takes. zero_token: a token of the pool that rows without features of their own read."""

    first: int
    page_size: int
    max_total_len: int
    zero_token: int


class NetworkRows(NamedTuple):
    """Rows of a forward of the network, int32 [T] each: token, position of the network, slot (the dummy where a row is
    not used), KV length, and the number of the pool's token whose features it takes (int64). The same as chunks, the
    rows that are not used being chunks of KV length 0: slots and KV lengths [2 B], row_starts [2 B + 1]."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    features: torch.Tensor
    chunk_slots: torch.Tensor
    chunk_row_starts: torch.Tensor
    chunk_kv_lens: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, num_chunks: int, device: torch.device) -> NetworkRows:
        """For so many rows, of so many sequences."""
        sizes = [num_rows] * 5 + [2 * num_chunks, 2 * num_chunks + 1, 2 * num_chunks]
        tensors = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        tensors[4] = tensors[4].long()
        return cls(*tensors)

    def of(self, num_rows: int, num_chunks: int) -> NetworkRows:
        """Those of the first rows, and of the first sequences: the same memory."""
        rows = (part[:num_rows] for part in self[:5])
        sizes = (2 * num_chunks, 2 * num_chunks + 1, 2 * num_chunks)
        return NetworkRows(*rows, *(part[:size] for part, size in zip(self[5:], sizes, strict=True)))


class ChainRows(NamedTuple):
    """Of each row of a step, int32 [B]: last_rows, the row of the forward that gives its first draft; num_drafts;
    sample_slots and sample_positions of the next draft, the dummy slot where there is none; positions, slots and
    kv_lens of the network's next row."""

    last_rows: torch.Tensor
    num_drafts: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_rows: int, device: torch.device) -> ChainRows:
        return cls(*(torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(7)))

    def of(self, num_rows: int) -> ChainRows:
        """Those of the first rows: the same memory."""
        return ChainRows(*(part[:num_rows] for part in self))
