"""Attention of trees of drafts: positions of a row share what lies before them, and see of each other their own path.

    prefix   0 .......... length - 1 |  positions  0  1  2  3      at length - 1 + position of the row's pages
                                     |  parents   -1  0  1  0
    sees     all of it               |  of 2: 0, 1, 2; of 3: 0, 3

A row's positions are a group of the split-KV kernel, which reads the prefix once for all of them ("cascade",
`shared_prefix_attention.py`). It leaves the attention over the prefix with the logarithm of its sum, from which the
kernel here goes on over the row's own positions, each under its own mask (SpecInfer, Miao et al. 2024). Masks are bits,
by position: no more than 64 of a row.

B rows, P positions of a row, T = B x P, H query heads, K KV heads, D head_dim, S tokens of the KV pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.attention.decode_attention import check_decode_inputs
from radixmesh.kernels.attention.shared_prefix_attention import shared_prefix_config
from radixmesh.kernels.attention.split_kv import LOG2_E, split_attention
from radixmesh.kernels.attention.split_pieces import LOWEST, token_index
from radixmesh.kernels.attention.split_schedule import SplitConfig, SplitParts, SplitPlan, SplitShape
from radixmesh.kernels.kv_fp8 import KV_FP8

MAX_POSITIONS = 64
_QUERIES = 64


class TreeWorkspace:
    """Buffers for up to `max_rows` rows of `num_positions` positions each; allocated once. Serves one stream."""

    def __init__(
        self,
        max_rows: int,
        num_positions: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        config: SplitConfig | None = None,
    ) -> None:
        if not 1 <= num_positions <= MAX_POSITIONS:
            raise ValueError(f"a tree has 1 to {MAX_POSITIONS} positions, not {num_positions}")
        device = torch.device(device)
        self.shape = SplitShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.num_positions = num_positions
        group = SplitShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, members=num_positions)
        self.plan = SplitPlan(group, config or shared_prefix_config(group, dtype), max_rows, device)
        self.parts = SplitParts([self.plan], device)
        size = max_rows * num_positions
        self.members_BP = torch.arange(size, dtype=torch.int32, device=device).view(max_rows, num_positions)
        self.outputs_THd = torch.empty(size, num_heads, head_dim, dtype=torch.float32, device=device)
        self.lses_TH = torch.empty(size, num_heads, dtype=torch.float32, device=device)


def plan_trees(prefix_lens_B: torch.Tensor, workspace: TreeWorkspace) -> None:
    """Lays out a step's work on the device; once a step, before the `paged_tree_attention` of its layers.

    prefix_lens_B: int32 [B] on the device, tokens before a row's positions.
    """
    if prefix_lens_B.dtype != torch.int32:
        raise ValueError(f"lengths must be int32, not {prefix_lens_B.dtype}")
    # A row without a prefix may be anywhere among the others: it has a tile of which nothing is seen.
    workspace.plan.fill(prefix_lens_B, None, None, least_tiles=1)


def paged_tree_attention(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    slots_B: torch.Tensor,
    prefix_lens_B: torch.Tensor,
    masks_T: torch.Tensor,
    page_size: int,
    scale: float,
    workspace: TreeWorkspace,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Softmax attention of each position over its row's prefix and its own path. Returns [T, H, D].

    masks_T: int64, bit n of a position says that it sees position n of its row; itself among them. A position without
    any bit is padding and gives zeros. The KV of position n is at prefix_len + n of the row's pages, at any depth.
    Pools of the query's dtype, not of FP8. `plan_trees` must have run with the same prefix_lens_B. use_pdl: begins
    while the kernel ahead of it ends (Hopper and later). Raises ValueError on shapes or dtypes that do not fit.
    """
    size = workspace.num_positions
    num_rows = len(slots_B)
    if q_THd.shape[0] != num_rows * size or masks_T.shape != (num_rows * size,) or masks_T.dtype != torch.int64:
        raise ValueError(
            f"{num_rows} rows of {size} positions need as many queries and int64 masks, not {tuple(q_THd.shape)} and "
            f"{masks_T.dtype} {tuple(masks_T.shape)}"
        )
    if keys_SKd.dtype == KV_FP8:
        raise ValueError("trees are not read from pools of FP8")
    if slots_B.dtype != torch.int32 or prefix_lens_B.dtype != torch.int32:
        raise ValueError(f"slots and lengths must be int32, not {slots_B.dtype} and {prefix_lens_B.dtype}")
    rows_T = workspace.members_BP[:num_rows].view(-1)
    check_decode_inputs(workspace.shape, q_THd, keys_SKd, values_SKd, page_tables, rows_T)
    inputs = (q_THd, keys_SKd, values_SKd, page_tables)
    split_attention(
        workspace.plan, workspace.parts, inputs, slots_U=slots_B, ends_U=prefix_lens_B, page_size=page_size,
        scale=scale, out=workspace.outputs_THd, members_UR=workspace.members_BP, out_lse=workspace.lses_TH,
        use_pdl=use_pdl,
    )  # fmt: skip
    out = torch.empty_like(q_THd)
    num_heads, head_dim = q_THd.shape[1:]
    kv_heads = keys_SKd.shape[1]
    num_queries = size * (num_heads // kv_heads)
    block = max(16, min(_QUERIES, triton.next_power_of_2(num_queries)))
    _tree_kernel[(num_rows, kv_heads, triton.cdiv(num_queries, block))](
        q_THd, keys_SKd, values_SKd, page_tables, slots_B, prefix_lens_B, masks_T, workspace.outputs_THd,
        workspace.lses_TH, out, page_tables.stride(0), scale * LOG2_E, H=num_heads, KV_HEADS=kv_heads, D=head_dim,
        DP=workspace.shape.padded_dim, P=size, BLOCK_M=block, BLOCK_N=max(16, triton.next_power_of_2(size)),
        PAGE_SIZE=page_size, PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _tree_kernel(
    q_ptr, keys_ptr, values_ptr, page_tables_ptr, slots_ptr, prefix_lens_ptr, masks_ptr, prefix_ptr, prefix_lse_ptr,
    out_ptr, table_stride, scale, H: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries of a row and a KV head, position after position, over the row's positions."""
    GROUP: tl.constexpr = H // KV_HEADS
    if PDL:
        # Queries, keys and what the prefix gave come from the kernels ahead.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    position = m // GROUP
    is_query = position < P
    masks = tl.load(masks_ptr + row * P + position, mask=is_query, other=0)
    lane = (row * P + position) * H + kv_head * GROUP + m % GROUP
    offset = lane[:, None] * D + d[None, :]
    is_dim = is_query[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + offset, mask=is_dim, other=0.0)
    # A row's first tokens have no prefix, and then nothing was written of it.
    prefix_len = tl.load(prefix_lens_ptr + row)
    has_prefix = is_query & (prefix_len > 0) & (masks != 0)
    highest = tl.load(prefix_lse_ptr + lane, mask=has_prefix, other=LOWEST)
    total = tl.where(has_prefix, 1.0, 0.0)
    acc = tl.load(prefix_ptr + offset, mask=is_dim & has_prefix[:, None], other=0.0)

    table_ptr = page_tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    sees = ((masks[:, None] >> n[None, :].to(tl.int64)) & 1) != 0
    # Positions that nobody sees are padding of the row: it may have no pages for them.
    is_seen = (tl.max(sees.to(tl.int32), 0) > 0) & (n < P)
    token = token_index(table_ptr, prefix_len + n, is_seen, PAGE_SIZE)
    kv_offset = token[:, None] * (KV_HEADS * D) + kv_head * D + d[None, :]
    is_loaded = is_seen[:, None] & (d < D)[None, :]
    k = tl.load(keys_ptr + kv_offset, mask=is_loaded, other=0.0)
    v = tl.load(values_ptr + kv_offset, mask=is_loaded, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(sees & is_seen[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    exps = tl.exp2(scores - new_highest[:, None])
    correction = tl.exp2(highest - new_highest)
    total = total * correction + tl.sum(exps, 1)
    acc = tl.dot(exps.to(q.dtype), v, acc * correction[:, None], input_precision="ieee")
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=is_dim)


def paged_tree_reference(
    q_THd: torch.Tensor,
    keys_SKd: torch.Tensor,
    values_SKd: torch.Tensor,
    page_tables: torch.Tensor,
    slots_B: torch.Tensor,
    prefix_lens_B: torch.Tensor,
    masks_T: torch.Tensor,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """Reference of `paged_tree_attention`, in fp32 and position by position."""
    out_THd = torch.zeros(q_THd.shape, dtype=torch.float32, device=q_THd.device)
    size, group = len(q_THd) // len(slots_B), q_THd.shape[1] // keys_SKd.shape[1]
    for row, (slot, length) in enumerate(zip(slots_B.tolist(), prefix_lens_B.tolist(), strict=True)):
        for index in range(row * size, (row + 1) * size):
            mask = int(masks_T[index])
            own = [length + n for n in range(size) if mask >> n & 1]
            if not own:
                continue
            position = torch.tensor([*range(length), *own], device=q_THd.device)
            token = page_tables[slot, position // page_size].long() * page_size + position % page_size
            k_LHd, v_LHd = (pool[token].float().repeat_interleave(group, dim=1) for pool in (keys_SKd, values_SKd))
            scores_HL = torch.einsum("hd,lhd->hl", q_THd[index].float() * scale, k_LHd)
            out_THd[index] = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LHd)
    return out_THd.to(q_THd.dtype)


def tree_masks(parents_BP: torch.Tensor) -> torch.Tensor:
    """int64 [T]: of each position, the bits of its path. parents_BP: int [B, P], the position that each follows, which
    is before it; -1 for the first one, and -2 for padding."""
    num_rows, size = parents_BP.shape
    masks_BP = torch.zeros(num_rows, size, dtype=torch.int64, device=parents_BP.device)
    for position in range(size):
        parent_B = parents_BP[:, position].long()
        of_parent_B = masks_BP.gather(1, parent_B.clamp(min=0)[:, None])[:, 0]
        # Bit 63 is the sign's.
        own = 1 << position if position < MAX_POSITIONS - 1 else -(1 << position)
        mask_B = torch.where(parent_B >= 0, of_parent_B, 0) | own
        masks_BP[:, position] = torch.where(parent_B >= -1, mask_B, 0)
    return masks_BP.flatten()
