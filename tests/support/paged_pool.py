"""A KV pool with sequences on scattered pages, for the tests of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.triton_interpreter import DEVICE


@dataclass(slots=True, kw_only=True)
class PagedPool:
    """keys, values [tokens, kv heads, dim]: NaN where no sequence lies. Row i reads slot `slots[i]`, for `lengths[i]`
    tokens; slots are in another order than rows."""

    keys: torch.Tensor
    values: torch.Tensor
    page_tables: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    page_size: int

    @staticmethod
    def random(
        lengths: list[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, seed: int = 0
    ) -> PagedPool:
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages) + 5, generator=generator).to(torch.int32)
        slots = torch.randperm(len(lengths), generator=generator).to(torch.int32)
        # Entries past a row's end point outside the pool: nothing may follow them.
        tables = torch.full((len(lengths) + 1, max(pages) + 2), 1 << 29, dtype=torch.int32)
        planes = [torch.full(((len(order) + 1) * page_size, kv_heads, dim), float("nan")) for _ in range(2)]
        at = 0
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            table = order[at : at + count]
            tables[slots[row], :count] = table
            at += count
            token = (table.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            for plane in planes:
                plane[token] = torch.randn(length, kv_heads, dim, generator=generator)
        return PagedPool(
            keys=planes[0].to(DEVICE, dtype),
            values=planes[1].to(DEVICE, dtype),
            page_tables=tables.to(DEVICE),
            slots=slots.to(DEVICE),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            page_size=page_size,
        )
