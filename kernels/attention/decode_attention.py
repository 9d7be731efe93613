"""Paged decode attention: one query token a row over its own KV, for any lengths under one captured CUDA graph.

T rows, H query heads, K KV heads, D head_dim, S tokens of the KV pool. The algorithm is in `split_kv.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from radixmesh.kernels.attention.split_kv import split_attention
from radixmesh.kernels.attention.split_pieces import Tails, with_tail
from radixmesh.kernels.attention.split_schedule import SplitConfig, SplitParts, SplitPlan, SplitShape
from radixmesh.kernels.kv_fp8 import KV_FP8, take_rows


class DecodeWorkspace:
    """Buffers of `plan_decode` and `paged_decode` for up to `max_rows` rows; a few MB, allocated once.

    windows, attention_chunks: those of the model's layers (None: all of the context); a step is planned for all of
    them.
    config: None takes `decode_config`. is_batch_invariant: a row's bits depend on its own sequence alone; costs speed
    where there are few rows. Serves one stream: layers that run at the same time need one workspace each.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        windows: Sequence[int | None] = (None,),
        config: SplitConfig | None = None,
        is_batch_invariant: bool = False,
        attention_chunks: Sequence[int] = (),
    ) -> None:
        device = torch.device(device)
        self.shape = SplitShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.config = replace(config or decode_config(self.shape, dtype), is_whole=is_batch_invariant)
        self.plans = {window: SplitPlan(self.shape, self.config, max_rows, device) for window in windows}
        self.chunk_plans = {chunk: SplitPlan(self.shape, self.config, max_rows, device) for chunk in attention_chunks}
        self.parts = SplitParts([*self.plans.values(), *self.chunk_plans.values()], device)

    def plan(self, window: int | None, attention_chunk: int | None = None) -> SplitPlan:
        """Raises ValueError where the workspace was not made for this window or chunk."""
        if attention_chunk is not None:
            if window is not None or attention_chunk not in self.chunk_plans:
                raise ValueError(
                    f"the workspace was made for chunks {list(self.chunk_plans)} without windows, not for "
                    f"{attention_chunk} and a window of {window}"
                )
            return self.chunk_plans[attention_chunk]
        if window not in self.plans:
            raise ValueError(
                f"the workspace was made for windows {list(self.plans)}, not for {window}: name all of them"
            )
        return self.plans[window]


def decode_config(shape: SplitShape, dtype: torch.dtype) -> SplitConfig:
    """The defaults for an H200 at bf16 and head_dim 128; `bench/gpu/attention.py` measures the alternatives."""
    tile_bytes = 16384
    block_n = tile_bytes // (shape.padded_dim * torch.finfo(dtype).bits // 8)
    # Tiles of FP8 are half as large, so two of them are under way where one is otherwise.
    num_stages = 5 if dtype == KV_FP8 else 3
    return SplitConfig(
        heads=1, block_n=max(16, min(64, block_n)), num_warps=4, num_stages=num_stages, programs_per_sm=4, min_tiles=1
    )


def plan_decode(
    kv_lens_T: torch.Tensor, workspace: DecodeWorkspace, *, skips_empty: bool = False, use_pdl: bool = False
) -> None:
    """Lays out a step's work on the device; once a step, before the `paged_decode` of its layers.

    kv_lens_T: int32 [T] on the device, each row's KV length with its own token; 0 for a row of padding.
    skips_empty: rows with length 0, which must be the last ones, cost nothing and are left as they are in the output.
    use_pdl: runs beside the previous kernel (Hopper and later), which is the step's first: it does not write the
    lengths, and all of the step before was over when it began.
    """
    if kv_lens_T.dtype != torch.int32:
        raise ValueError(f"KV lengths must be int32, not {kv_lens_T.dtype}")
    for window, plan in workspace.plans.items():
        plan.fill(kv_lens_T, None, window, least_tiles=0 if skips_empty else 1, use_pdl=use_pdl)
    for chunk, plan in workspace.chunk_plans.items():
        plan.fill(kv_lens_T, None, None, least_tiles=0 if skips_empty else 1, attention_chunk=chunk, use_pdl=use_pdl)


def paged_decode(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    workspace: DecodeWorkspace,
    out: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    tails: Tails | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Softmax attention of each row over its sequence, whose last token is the row's own. Returns [T, H, D].

    keys_SKd, values_SKd: the layer's pool, contiguous, of the query's dtype or FP8 (as stored: queries come multiplied
    by the keys' scale, and the result is without that of the values). page_tables int32 [slots, pages of a slot]:
    position p of slot s is token page_tables[s, p // page_size] * page_size + p % page_size of the pool. row_slots_T
    int32 [T].
    window: a token sees itself and the `window - 1` before it. A row with kv_len 0 gives zeros, or what is in `out`.
    `plan_decode` must have run with the same kv_lens_T. Raises ValueError on shapes or dtypes that do not fit.
    softcap: scaled scores become softcap x tanh(score / softcap); None: they stay.
    sinks_H: a score of each head that joins its softmax and has no value. attention_chunk: sequences are cut at
    multiples of it, and a token sees those of its own chunk alone; not with a window.
    tails: where the KV of the rows' last positions lies, if not where the page tables say.
    use_pdl: begins while the kernel ahead of it ends (Hopper and later).
    """
    check_decode_inputs(workspace.shape, q_THd, keys_SKd, values_SKd, page_tables, row_slots_T)
    out = torch.empty_like(q_THd) if out is None else out
    split_attention(
        workspace.plan(window, attention_chunk),
        workspace.parts,
        (q_THd, keys_SKd, values_SKd, page_tables),
        slots_U=row_slots_T,
        ends_U=kv_lens_T,
        page_size=page_size,
        scale=scale,
        window=window,
        softcap=softcap,
        out=out,
        sinks_H=sinks_H,
        attention_chunk=attention_chunk,
        tails=tails,
        use_pdl=use_pdl,
    )
    return out


def is_kv_dtype(pool: torch.Tensor, q_THd: torch.Tensor) -> bool:
    """True where kernels read such a pool for such queries."""
    return pool.dtype in (q_THd.dtype, KV_FP8)


def check_decode_inputs(
    shape: SplitShape,
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
) -> None:
    """Raises ValueError where shapes, dtypes or layouts do not fit the kernel."""
    heads, dim = shape.num_heads, shape.head_dim
    if q_THd.shape[1:] != (heads, dim) or not q_THd.is_contiguous():
        raise ValueError(f"queries must be contiguous [rows, {heads}, {dim}], not {tuple(q_THd.shape)}")
    for pool in (keys_SKd, values_SKd):
        if pool.shape[1:] != (shape.num_kv_heads, dim) or not pool.is_contiguous() or not is_kv_dtype(pool, q_THd):
            raise ValueError(
                f"a pool must be contiguous {q_THd.dtype} or {KV_FP8} [tokens, {shape.num_kv_heads}, {dim}], "
                f"not {pool.dtype} {tuple(pool.shape)}"
            )
    if page_tables.dtype != torch.int32 or row_slots_T.dtype != torch.int32:
        raise ValueError("page tables and slots must be int32")
    if row_slots_T.shape[0] != q_THd.shape[0]:
        raise ValueError(f"{row_slots_T.shape[0]} slots for {q_THd.shape[0]} rows")


def paged_decode_reference(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    row_slots_T: torch.Tensor,
    kv_lens_T: torch.Tensor,
    page_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    tails: Tails | None = None,
) -> torch.Tensor:
    """Reference of `paged_decode`, in fp32 and row by row."""
    out_THd = torch.zeros(q_THd.shape, dtype=torch.float32, device=q_THd.device)
    group = q_THd.shape[1] // keys_SKd.shape[1]
    for row, (slot, length) in enumerate(zip(row_slots_T.tolist(), kv_lens_T.tolist(), strict=True)):
        if length == 0:
            continue
        begin = 0 if window is None else max(0, length - window)
        if attention_chunk is not None:
            begin = (length - 1) // attention_chunk * attention_chunk
        position = torch.arange(begin, length, device=q_THd.device)
        token = page_tables[slot, position // page_size].long() * page_size + position % page_size
        if tails is not None:
            token = with_tail(token, position, tails, row)
        k_LHd = take_rows(keys_SKd, token).repeat_interleave(group, dim=1)
        v_LHd = take_rows(values_SKd, token).repeat_interleave(group, dim=1)
        scores_HL = torch.einsum("hd,lhd->hl", q_THd[row].float() * scale, k_LHd)
        if softcap is not None:
            scores_HL = (scores_HL / softcap).tanh() * softcap
        if sinks_H is not None:
            scores_HL = torch.cat((scores_HL, sinks_H.float()[:, None]), dim=1)
        out_THd[row] = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1)[:, : len(position)], v_LHd)
    return out_THd.to(q_THd.dtype)
