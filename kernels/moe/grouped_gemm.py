"""Grouped GEMMs of routed experts: gate and up with SwiGLU, down, and the weighted sum of a row's picks.

A program computes a tile of one expert's pairs by a block of columns, so that an expert's weights are read once for all
rows of a tile. A row's bits depend on its own numbers alone: which rows share its tile changes nothing, and its picks
are added in their order.

Legend: T rows, D hidden size, E experts, F mlp size of an expert, A picks of a row, N tiles of R slots; of rows that
lie by expert, P slots with room for X rows each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig, default_config
from radixmesh.kernels.moe.group_rows import ExpertTiles, RowTiles, group_places, group_rows
from radixmesh.kernels.moe.route import Routes

_COMBINE_BLOCK = 1024


class ExpertVariant(NamedTuple):
    """Maths of experts beyond down(silu(gate) x up). b_gate_up_E2F, b_down_ED: biases, features contiguous.

    swiglu_limit: (up + 1) x gate x sigmoid(swiglu_alpha x gate), with gate <= limit and up within +-limit, in place of
    SwiGLU (GPT-OSS). scales_input: the weights of a row's picks multiply what experts read, not what they give (Llama
    4).
    """

    b_gate_up_E2F: torch.Tensor | None = None
    b_down_ED: torch.Tensor | None = None
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    scales_input: bool = False

    @property
    def is_swiglu(self) -> bool:
        """Nothing but down(silu(gate) x up)."""
        has_bias = self.b_gate_up_E2F is not None or self.b_down_ED is not None
        return not has_bias and self.swiglu_limit is None and not self.scales_input


SWIGLU = ExpertVariant()


@triton.jit
def _clamped_swiglu(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    # A comparison lets NaN through, which the minimum of some devices does not.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_kernel(
    x_ptr, w_ptr, bias_ptr, weights_ptr, out_ptr, pairs_ptr, tile_experts_ptr, num_pairs, x_stride, w_stride,
    bias_stride, F, A: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # bias_ptr, weights_ptr (scales of each pair's row), LIMIT: None where there are none. pairs_ptr, tile_experts_ptr:
    # None where all rows are of one expert. w_ptr: with TMA a descriptor [E, 2 F, K] of blocks [1, BLOCK_N, BLOCK_K].
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1).to(tl.int64)
    expert = tile * 0
    if tile_experts_ptr is not None:
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        slots = tl.arange(0, R)
        pairs = tl.program_id(1) * R + slots
        if pairs_ptr is not None:
            pairs = tl.load(pairs_ptr + tile * R + slots)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        row_mask, column_mask = (pairs < num_pairs)[:, None], (columns < F)[None, :]
        x_at = x_ptr + (pairs // A).to(tl.int64)[:, None] * x_stride + depth[None, :]
        if not TMA:
            gate_at = w_ptr + expert * w_stride + columns.to(tl.int64)[None, :] * K + depth[:, None]
        if weights_ptr is not None:
            scale = tl.load(weights_ptr + pairs, mask=pairs < num_pairs, other=0.0)[:, None]
        gate_sums = tl.zeros((R, BLOCK_N), tl.float32)
        up_sums = tl.zeros((R, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            in_row = depth < K - start
            x = tl.load(x_at + start, mask=row_mask & in_row[None, :], other=0.0)
            if weights_ptr is not None:
                x = (x.to(tl.float32) * scale).to(x.dtype)
            if TMA:
                first = tl.program_id(0) * BLOCK_N
                gate = tl.reshape(w_ptr.load([expert.to(tl.int32), first, start]), (BLOCK_N, BLOCK_K)).T
                up = tl.reshape(w_ptr.load([expert.to(tl.int32), F + first, start]), (BLOCK_N, BLOCK_K)).T
            else:
                w_mask = in_row[:, None] & column_mask
                gate = tl.load(gate_at + start, mask=w_mask, other=0.0)
                up = tl.load(gate_at + F * K + start, mask=w_mask, other=0.0)
            gate_sums = tl.dot(x, gate, gate_sums, input_precision=PRECISION)
            up_sums = tl.dot(x, up, up_sums, input_precision=PRECISION)
        if bias_ptr is not None:
            bias_at = bias_ptr + expert * bias_stride + columns
            gate_sums += tl.load(bias_at, mask=columns < F, other=0.0).to(tl.float32)[None, :]
            up_sums += tl.load(bias_at + F, mask=columns < F, other=0.0).to(tl.float32)[None, :]
        if LIMIT is not None:
            gated = _clamped_swiglu(gate_sums, up_sums, LIMIT, ALPHA)
        else:
            gated = gate_sums / (1.0 + tl.exp(-gate_sums)) * up_sums
        out_at = out_ptr + (tile * R + slots)[:, None] * F + columns[None, :]
        tl.store(out_at, gated.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def _down_kernel(
    h_ptr, w_ptr, bias_ptr, out_ptr, pairs_ptr, tile_experts_ptr, num_pairs, w_stride, bias_stride, D,
    K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # w_ptr: with TMA a descriptor [E, D, K] of blocks [1, BLOCK_N, BLOCK_K].
    tile = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tile * 0
    if tile_experts_ptr is not None:
        expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        slots = tl.arange(0, R)
        pairs = tl.program_id(1) * R + slots
        if pairs_ptr is not None:
            pairs = tl.load(pairs_ptr + tile * R + slots)
        depth = tl.arange(0, BLOCK_K)
        row_mask, column_mask = (pairs < num_pairs)[:, None], (columns < D)[None, :]
        h_at = h_ptr + (tile * R + slots)[:, None] * K + depth[None, :]
        if not TMA:
            w_at = w_ptr + expert * w_stride + columns.to(tl.int64)[None, :] * K + depth[:, None]
        sums = tl.zeros((R, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            in_row = depth < K - start
            h = tl.load(h_at + start, mask=row_mask & in_row[None, :], other=0.0)
            if TMA:
                first = tl.program_id(0) * BLOCK_N
                w = tl.reshape(w_ptr.load([expert.to(tl.int32), first, start]), (BLOCK_N, BLOCK_K)).T
            else:
                w = tl.load(w_at + start, mask=in_row[:, None] & column_mask, other=0.0)
            sums = tl.dot(h, w, sums, input_precision=PRECISION)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * bias_stride + columns, mask=columns < D, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        out_at = out_ptr + pairs.to(tl.int64)[:, None] * D + columns[None, :]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=row_mask & column_mask)


@triton.jit
def _combine_kernel(
    results_ptr, weights_ptr, residual_ptr, beside_ptr, out_ptr, D, A: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    total = tl.zeros((BLOCK,), tl.float32)
    for pick in tl.static_range(A):
        weight = tl.load(weights_ptr + row * A + pick)
        result = tl.load(results_ptr + (row * A + pick) * D + columns, mask=mask, other=0.0).to(tl.float32)
        # Of a pick that another rank computes there is no result, but anything, and its weight is 0.
        total += tl.where(weight != 0.0, weight * result, 0.0)
    if beside_ptr is not None:
        total += tl.load(beside_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def routed_experts(
    x_TD: torch.Tensor,
    routes: Routes,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    *,
    residual_TD: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: ExpertsConfig | None = None,
    variant: ExpertVariant = SWIGLU,
    num_expected: int | None = None,
    beside: Callable[[], torch.Tensor] | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Sum over each row's experts of weight x down(silu(gate(row)) x up(row)), [T, D], added to the residual if given.

    All of one dtype (float32, float16, bfloat16); each expert's matrix and each row of x is contiguous, and gate's rows
    are the first F of a matrix. `out` may be the residual. float32 sums; rounded to the dtype behind the gate, behind
    down and at the end. `config` overrides the one for so many rows. `use_pdl` as in `rms_norm`. A pick of the id E,
    whose weight has to be 0, is not computed: an expert of another rank. num_expected: about how many picks are
    computed; None: all. beside: called before the last launch, which adds what it gives [T, D], contiguous; it may have
    the stream wait for that.
    """
    num_rows, num_experts = len(x_TD), len(w_down_EDF)
    _check(x_TD, routes, w_gate_up_E2FD, w_down_EDF)
    _check_variant(variant, w_gate_up_E2FD, w_down_EDF)
    num_picks = routes.expert_ids_TA.shape[1]
    out = torch.empty_like(x_TD) if out is None else out
    if num_rows == 0:
        return out
    config = config or default_config(num_expected or num_rows * num_picks, num_experts, x_TD.element_size())
    tiles = group_rows(routes.expert_ids_TA, num_experts, config.tile_rows, use_pdl=use_pdl)
    scales_TA, weights_TA = None, routes.weights_TA
    if variant.scales_input:
        scales_TA, weights_TA = weights_TA, torch.ones_like(weights_TA)
    num_pairs = num_rows * num_picks
    gated = gate_up_silu(x_TD, tiles, num_pairs, w_gate_up_E2FD, config.gate_up, variant, scales_TA, use_pdl=use_pdl)
    results = down(gated, tiles, num_pairs, w_down_EDF, config.down, variant.b_down_ED, use_pdl=use_pdl)
    if beside is None:
        combine(results, weights_TA, residual_TD, out, use_pdl=use_pdl)
    else:
        # A launch that waits for two streams waits for the ends of both.
        combine(results, weights_TA, residual_TD, out, beside())
    return out


class SlotRows(NamedTuple):
    """Rows that lie by the slots of their experts, once for each pick. x_PXD, contiguous: the first counts_P (int32 on
    the device) of the X rows of each slot are there. most: rows that can be there in all; num_expected: about how many
    are."""

    x_PXD: torch.Tensor
    counts_P: torch.Tensor
    most: int
    num_expected: int


def slot_experts(
    rows: SlotRows,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    *,
    config: ExpertsConfig | None = None,
    variant: ExpertVariant = SWIGLU,
    use_pdl: bool = False,
) -> torch.Tensor:
    """down(silu(gate(row)) x up(row)) of each row by the expert of its slot, [P, X, D]; anything where no row is.

    Reads and writes the rows that are there alone. Weights and rounding as in `routed_experts`, whose weighted sums are
    for whoever sent the rows: experts that scale what they read are not for this.
    """
    x_PXD, counts_P, most, num_expected = rows
    num_slots, num_rows, hidden = x_PXD.shape
    assert x_PXD.is_contiguous() and len(counts_P) == num_slots == len(w_down_EDF), (x_PXD.shape, counts_P.shape)
    assert x_PXD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype and not variant.scales_input, x_PXD.dtype
    _check_variant(variant, w_gate_up_E2FD, w_down_EDF)
    config = config or default_config(num_expected, num_slots, x_PXD.element_size())
    tiles = group_places(counts_P, num_rows, most, config.tile_rows, use_pdl=use_pdl)
    if not len(tiles.pairs_NR):
        return torch.empty_like(x_PXD)
    x_TD, num_places = x_PXD.view(-1, hidden), num_slots * num_rows
    gated = gate_up_silu(x_TD, tiles, num_places, w_gate_up_E2FD, config.gate_up, variant, use_pdl=use_pdl)
    results = down(gated, tiles, num_places, w_down_EDF, config.down, variant.b_down_ED, use_pdl=use_pdl)
    return results.view(x_PXD.shape)


def slot_experts_reference(
    rows: SlotRows, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor, variant: ExpertVariant = SWIGLU
) -> torch.Tensor:
    """The same as `slot_experts`, in torch; zeros where no row is."""
    results_PXD = torch.zeros_like(rows.x_PXD)
    for slot, count in enumerate(rows.counts_P.tolist()):
        routes = one_expert(slot, count, rows.x_PXD.device)
        results_PXD[slot, :count] = routed_experts_reference(
            rows.x_PXD[slot, :count], routes, w_gate_up_E2FD, w_down_EDF, variant=variant
        )
    return results_PXD


def one_expert(expert: int, num_rows: int, device: torch.device) -> Routes:
    """Of rows that pick one expert with weight 1."""
    ids_T1 = torch.full((num_rows, 1), expert, dtype=torch.int32, device=device)
    return Routes(ids_T1, torch.ones(num_rows, 1, device=device))


def gate_up_silu(
    x_TD: torch.Tensor,
    tiles: ExpertTiles | RowTiles,
    num_pairs: int,
    w_gate_up_E2FD: torch.Tensor,
    config: GroupedConfig,
    variant: ExpertVariant = SWIGLU,
    scales_TA: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """silu(gate) x up of each pair's row by its expert, [N, R, F], or as the variant says; slots without a pair hold
    anything. scales_TA: float32, what each pair's row is multiplied by before."""
    num_tiles, tile_rows = tiles.sizes
    mlp, hidden = w_gate_up_E2FD.shape[1] // 2, w_gate_up_E2FD.shape[2]
    gated_NRF = x_TD.new_empty(num_tiles, tile_rows, mlp)
    blocks = _blocks_of(w_gate_up_E2FD, config)
    # Columns are the fast axis: programs that run at once share the rows of a few tiles.
    _gate_up_kernel[(triton.cdiv(mlp, config.columns), num_tiles)](
        x_TD, blocks or w_gate_up_E2FD, variant.b_gate_up_E2F, scales_TA, gated_NRF, tiles.pairs_NR,
        tiles.tile_experts_N, num_pairs, x_TD.stride(0), w_gate_up_E2FD.stride(0), _stride(variant.b_gate_up_E2F),
        mlp, A=tiles.num_picks, K=hidden, R=tile_rows, BLOCK_N=config.columns, BLOCK_K=config.depth,
        PRECISION=_precision(x_TD), LIMIT=variant.swiglu_limit, ALPHA=variant.swiglu_alpha,
        TMA=blocks is not None, PDL=use_pdl, num_warps=config.num_warps, num_stages=config.num_stages,
        launch_pdl=use_pdl,
    )  # fmt: skip
    return gated_NRF


def down(
    gated_NRF: torch.Tensor,
    tiles: ExpertTiles | RowTiles,
    num_pairs: int,
    w_down_EDF: torch.Tensor,
    config: GroupedConfig,
    b_down_ED: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """The down projection of `gate_up_silu`'s result, [pairs, D], not weighted, in the order of the pairs."""
    num_tiles, tile_rows, mlp = gated_NRF.shape
    hidden = w_down_EDF.shape[1]
    results_PD = gated_NRF.new_empty(num_pairs, hidden)
    blocks = _blocks_of(w_down_EDF, config)
    _down_kernel[(triton.cdiv(hidden, config.columns), num_tiles)](
        gated_NRF, blocks or w_down_EDF, b_down_ED, results_PD, tiles.pairs_NR, tiles.tile_experts_N, num_pairs,
        w_down_EDF.stride(0), _stride(b_down_ED), hidden, K=mlp, R=tile_rows, BLOCK_N=config.columns,
        BLOCK_K=config.depth, PRECISION=_precision(gated_NRF), TMA=blocks is not None, PDL=use_pdl,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    return results_PD


def combine(
    results_PD: torch.Tensor,
    weights_TA: torch.Tensor,
    residual_TD: torch.Tensor | None,
    out_TD: torch.Tensor,
    beside_TD: torch.Tensor | None = None,
    *,
    use_pdl: bool = False,
) -> None:
    """out = residual + the weighted sum of each row's picks, in their order, + beside; `out` may be the residual."""
    num_rows, hidden = out_TD.shape
    _combine_kernel[(num_rows, triton.cdiv(hidden, _COMBINE_BLOCK))](
        results_PD, weights_TA, residual_TD, beside_TD, out_TD, hidden, A=weights_TA.shape[1],
        BLOCK=min(_COMBINE_BLOCK, triton.next_power_of_2(hidden)), PDL=use_pdl, num_warps=4, launch_pdl=use_pdl,
    )  # fmt: skip


def routed_experts_reference(
    x_TD: torch.Tensor,
    routes: Routes,
    w_gate_up_E2FD: torch.Tensor,
    w_down_EDF: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
    variant: ExpertVariant = SWIGLU,
) -> torch.Tensor:
    """The same as `routed_experts`, in torch: each expert computes all rows, in float32 until the end."""
    total_TD = torch.zeros_like(x_TD, dtype=torch.float32) if residual_TD is None else residual_TD.float()
    rows_TD = x_TD.float()
    for expert, (w_gate_up_2FD, w_down_DF) in enumerate(zip(w_gate_up_E2FD, w_down_EDF, strict=True)):
        weights_T1 = (routes.weights_TA * (routes.expert_ids_TA == expert)).sum(dim=1, keepdim=True)
        x_ND, is_picked_T1 = rows_TD, weights_T1
        if variant.scales_input:
            x_ND = (rows_TD * weights_T1).to(x_TD.dtype).float()
            is_picked_T1 = (routes.expert_ids_TA == expert).any(dim=1, keepdim=True)
        gate_up_T2F = x_ND @ w_gate_up_2FD.float().t()
        if variant.b_gate_up_E2F is not None:
            gate_up_T2F += variant.b_gate_up_E2F[expert].float()
        gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
        if variant.swiglu_limit is None:
            gated_TF = torch.nn.functional.silu(gate_TF) * up_TF
        else:
            limit = variant.swiglu_limit
            gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
            gated_TF = (up_TF + 1) * gate_TF * torch.sigmoid(variant.swiglu_alpha * gate_TF)
        result_TD = gated_TF @ w_down_DF.float().t()
        if variant.b_down_ED is not None:
            result_TD += variant.b_down_ED[expert].float()
        # Rows that do not pick an expert take nothing from it, whatever it makes of them.
        total_TD += torch.where(is_picked_T1 != 0, is_picked_T1 * result_TD, 0.0)
    return total_TD.to(x_TD.dtype)


def _blocks_of(w_ENK: torch.Tensor, config: GroupedConfig) -> TensorDescriptor | None:
    """The weights as TMA reads them, in blocks [1, columns, depth]; None: they are loaded by pointers."""
    # TMA wants every row and every expert to begin at a multiple of 16 bytes. The interpreter has it on a CPU.
    distances = w_ENK.data_ptr(), *(stride * w_ENK.element_size() for stride in w_ENK.stride()[:2])
    is_aligned = all(distance % 16 == 0 for distance in distances)
    if not config.by_tma or not is_aligned or not (w_ENK.device.type == "cpu" or has_gdc(w_ENK.device)):
        return None
    return TensorDescriptor(w_ENK, list(w_ENK.shape), list(w_ENK.stride()), [1, config.columns, config.depth])


def _stride(bias_EN: torch.Tensor | None) -> int:
    return 0 if bias_EN is None else bias_EN.stride(0)


def _check_variant(variant: ExpertVariant, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor) -> None:
    for bias_EN, w in ((variant.b_gate_up_E2F, w_gate_up_E2FD), (variant.b_down_ED, w_down_EDF)):
        assert bias_EN is None or (bias_EN.shape == w.shape[:2] and bias_EN.stride(1) == 1), bias_EN.shape


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _check(x_TD: torch.Tensor, routes: Routes, w_gate_up_E2FD: torch.Tensor, w_down_EDF: torch.Tensor) -> None:
    num_experts, hidden, mlp = w_down_EDF.shape
    assert w_gate_up_E2FD.shape == (num_experts, 2 * mlp, hidden), (w_gate_up_E2FD.shape, w_down_EDF.shape)
    assert x_TD.shape[1] == hidden and x_TD.stride(1) == 1, (x_TD.shape, x_TD.stride())
    assert x_TD.dtype == w_gate_up_E2FD.dtype == w_down_EDF.dtype, (x_TD.dtype, w_down_EDF.dtype)
    for w in (w_gate_up_E2FD, w_down_EDF):
        assert w.stride()[1:] == (w.shape[2], 1), w.stride()
    assert routes.expert_ids_TA.shape == routes.weights_TA.shape and len(routes.weights_TA) == len(x_TD)
    assert routes.weights_TA.dtype == torch.float32 and routes.weights_TA.is_contiguous()
