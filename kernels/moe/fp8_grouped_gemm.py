"""Grouped GEMMs of routed experts in FP8: rows in groups of 1 x 128, weights in blocks of 128 x 128, sums in float32.

Groups of 128 features in are multiplied on the tensor cores and added up with their scales outside of them, as in the
grouped GEMMs of DeepSeek-V3 (2024), section 3.3. A program of the first GEMM computes a group of 128 columns of gate
and of up, which is all that the group's scale depends on: it stores silu(gate) x up in FP8, ready for the second.

Weights are the left operand: wgmma takes 64 rows there at least, but 8 columns on the right are enough for it, and
experts of a decode step have few rows. FP8 operands that are not wgmma's are widened to float16 first.

A row's bits depend on its own numbers alone, as in `grouped_gemm`.

Legend: T rows, D hidden size, E experts, F mlp size of an expert, A picks of a row, N tiles of R slots, H groups of F.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.fp8.quantize_rows import quantize_rows
from radixmesh.kernels.fp8.quantized import FP8, GROUP, QuantizedRows, quantize_rows_reference
from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig
from radixmesh.kernels.moe.group_rows import ExpertTiles, group_places, group_rows
from radixmesh.kernels.moe.grouped_gemm import SlotRows, combine, one_expert
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts, num_blocks
from radixmesh.kernels.moe.route import Routes

# Pairs of an expert up to which it is used, slots of a tile, warps and stages of gate and up, and columns, warps and
# stages of down. Measured on one H200 with DeepSeek-V3's sizes (bench/results/h200-deepseek-v3-layer.json).
_TILES = (
    (8, 16, (8, 3), (64, 4, 4)),
    (28, 32, (4, 3), (64, 4, 4)),
    (float("inf"), 64, (8, 3), (128, 4, 4)),
)


class GatedTiles(NamedTuple):
    """silu(gate) x up in FP8, [N, R, F], and its scales, float32 [H, N, R]; unused tiles hold anything."""

    data_NRF: torch.Tensor
    scales_HNR: torch.Tensor


@triton.jit(do_not_specialize=["num_pairs", "x_scales_stride", "out_scales_stride"])
def _fp8_gate_up_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, out_ptr, out_scales_ptr, pairs_ptr, tile_experts_ptr, num_pairs,
    x_scales_stride, out_scales_stride, F, A: tl.constexpr, K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    IS_TILED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        CHUNKS: tl.constexpr = (K + GROUP - 1) // GROUP
        block, num_of_f = tl.program_id(0), (F + GROUP - 1) // GROUP
        slots = tl.arange(0, R)
        if IS_TILED:
            rows = tile * R + slots
        else:
            # Places without a pair compute the last one again; nobody reads them.
            pairs = tl.minimum(tl.load(pairs_ptr + tile * R + slots), num_pairs - 1)
            rows = (pairs // A).to(tl.int64)
        columns = block * GROUP + tl.arange(0, GROUP)
        from_columns = tl.minimum(columns, F - 1).to(tl.int64)
        features = tl.arange(0, GROUP)
        x_at = x_ptr + rows[None, :] * K + features[:, None]
        gate_at = w_ptr + (expert * 2 * F + from_columns)[:, None] * K + features[None, :]
        gate_scales_at = w_scales_ptr + (expert * 2 * num_of_f + block) * CHUNKS
        gate_sums = tl.zeros((GROUP, R), tl.float32)
        up_sums = tl.zeros((GROUP, R), tl.float32)
        for chunk in range(CHUNKS):
            at = chunk * GROUP
            if K % GROUP == 0:
                x = tl.load(x_at + at)
                gate = tl.load(gate_at + at)
                up = tl.load(gate_at + F.to(tl.int64) * K + at)
            else:
                is_in = at + features < K
                x = tl.load(x_at + at, mask=is_in[:, None], other=0.0)
                gate = tl.load(gate_at + at, mask=is_in[None, :], other=0.0)
                up = tl.load(gate_at + F.to(tl.int64) * K + at, mask=is_in[None, :], other=0.0)
            x_scales = tl.load(x_scales_ptr + rows + chunk * x_scales_stride)
            gate_scale = tl.load(gate_scales_at + chunk)
            up_scale = tl.load(gate_scales_at + num_of_f * CHUNKS + chunk)
            gate_sums += tl.dot(gate, x) * (x_scales * gate_scale)[None, :]
            up_sums += tl.dot(up, x) * (x_scales * up_scale)[None, :]
        gated = gate_sums / (1.0 + tl.exp(-gate_sums)) * up_sums
        gated = tl.where((columns < F)[:, None], gated, 0.0)
        largest = tl.max(tl.abs(gated), axis=0)
        scales = tl.where(largest > 0, largest / 448.0, 1.0)
        gated = tl.minimum(tl.maximum(gated * (1.0 / scales)[None, :], -448.0), 448.0)
        tl.store(out_scales_ptr + block.to(tl.int64) * out_scales_stride + tile * R + slots, scales)
        out_at = out_ptr + (tile * R + slots)[None, :] * F + columns[:, None]
        tl.store(out_at, gated.to(tl.float8e4nv), mask=(columns < F)[:, None])


@triton.jit(do_not_specialize=["num_pairs", "h_scales_stride"])
def _fp8_down_kernel(
    h_ptr, h_scales_ptr, w_ptr, w_scales_ptr, out_ptr, pairs_ptr, tile_experts_ptr, num_pairs, h_scales_stride, D,
    K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1).to(tl.int64)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        CHUNKS: tl.constexpr = (K + GROUP - 1) // GROUP
        num_of_d = (D + GROUP - 1) // GROUP
        slots = tl.arange(0, R)
        pairs = tl.load(pairs_ptr + tile * R + slots)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        from_columns = tl.minimum(columns, D - 1).to(tl.int64)
        features = tl.arange(0, GROUP)
        h_at = h_ptr + (tile * R + slots)[None, :] * K + features[:, None]
        h_scales_at = h_scales_ptr + tile * R + slots
        w_at = w_ptr + (expert * D + from_columns)[:, None] * K + features[None, :]
        # A program's columns lie within one block.
        w_scales_at = w_scales_ptr + (expert * num_of_d + tl.program_id(0) * BLOCK_N // GROUP) * CHUNKS
        sums = tl.zeros((BLOCK_N, R), tl.float32)
        for chunk in range(CHUNKS):
            at = chunk * GROUP
            if K % GROUP == 0:
                h = tl.load(h_at + at)
                w = tl.load(w_at + at)
            else:
                is_in = at + features < K
                h = tl.load(h_at + at, mask=is_in[:, None], other=0.0)
                w = tl.load(w_at + at, mask=is_in[None, :], other=0.0)
            h_scales = tl.load(h_scales_at + chunk * h_scales_stride)
            sums += tl.dot(w, h) * (h_scales * tl.load(w_scales_at + chunk))[None, :]
        out_at = out_ptr + pairs.to(tl.int64)[None, :] * D + columns[:, None]
        tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=(pairs < num_pairs)[None, :] & (columns < D)[:, None])


def fp8_routed_experts(
    x_TD: torch.Tensor,
    routes: Routes,
    experts: QuantizedExperts,
    *,
    residual_TD: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: ExpertsConfig | None = None,
    num_expected: int | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """As `routed_experts` with FP8 weights: x of float32, float16 or bfloat16 is quantised in groups of 128 features,
    and so is the result of the gate. `out` may be the residual; results of down are rounded to the dtype of x.

    use_pdl: of the kernel that quantises x, as in `rms_norm`.
    """
    (num_rows, hidden), num_experts = x_TD.shape, len(experts.w_down_EDF)
    assert hidden == experts.w_down_EDF.shape[1], (x_TD.shape, experts.w_down_EDF.shape)
    assert routes.expert_ids_TA.shape == routes.weights_TA.shape and len(routes.weights_TA) == num_rows
    out = torch.empty_like(x_TD) if out is None else out
    if num_rows == 0:
        return out
    num_pairs = routes.expert_ids_TA.numel()
    config = config or default_fp8_config(num_expected or num_pairs, num_experts)
    rows = quantize_rows(x_TD, is_grouped=True, use_pdl=use_pdl)
    tiles = group_rows(routes.expert_ids_TA, num_experts, config.tile_rows)
    gated = fp8_gate_up_silu(rows, tiles, num_pairs, experts, config.gate_up)
    results_PD = fp8_down(gated, tiles, num_pairs, experts, config.down, x_TD.dtype)
    combine(results_PD, routes.weights_TA, residual_TD, out)
    return out


def fp8_slot_experts(
    rows: SlotRows, experts: QuantizedExperts, *, config: ExpertsConfig | None = None, use_pdl: bool = False
) -> torch.Tensor:
    """As `slot_experts` with FP8 weights. Rows that are there are quantised in the order of the tiles.

    use_pdl: of the kernel that groups rows, as in `rms_norm`.
    """
    x_PXD, counts_P, most, num_expected = rows
    num_slots, num_rows, hidden = x_PXD.shape
    assert x_PXD.is_contiguous() and len(counts_P) == num_slots == len(experts.w_down_EDF), x_PXD.shape
    config = config or default_fp8_config(num_expected, num_slots)
    tiles = group_places(counts_P, num_rows, most, config.tile_rows, use_pdl=use_pdl)
    if not len(tiles.pairs_NR):
        return torch.empty_like(x_PXD)
    num_places = num_slots * num_rows
    quantized = quantize_rows(x_PXD.view(-1, hidden), is_grouped=True, from_rows=tiles.pairs_NR.view(-1))
    gated = fp8_gate_up_silu(quantized, tiles, num_places, experts, config.gate_up, is_tiled=True)
    return fp8_down(gated, tiles, num_places, experts, config.down, x_PXD.dtype).view(x_PXD.shape)


def fp8_slot_experts_reference(rows: SlotRows, experts: QuantizedExperts) -> torch.Tensor:
    """The same as `fp8_slot_experts`, in torch; zeros where no row is."""
    results_PXD = torch.zeros_like(rows.x_PXD)
    for slot, count in enumerate(rows.counts_P.tolist()):
        routes = one_expert(slot, count, rows.x_PXD.device)
        results_PXD[slot, :count] = fp8_routed_experts_reference(rows.x_PXD[slot, :count], routes, experts)
    return results_PXD


def fp8_gate_up_silu(
    rows: QuantizedRows,
    tiles: ExpertTiles,
    num_pairs: int,
    experts: QuantizedExperts,
    config: GroupedConfig,
    *,
    is_tiled: bool = False,
) -> GatedTiles:
    """silu(gate) x up of each pair's row by its expert, quantised in groups of 128. A program's columns are a group.
    is_tiled: rows are in the order of the tiles."""
    num_tiles, tile_rows = tiles.pairs_NR.shape
    _, hidden, mlp = experts.w_down_EDF.shape
    assert rows.is_grouped and config.columns == config.depth == GROUP, config
    device = rows.data_PK.device
    data_NRF = torch.empty(num_tiles, tile_rows, mlp, dtype=FP8, device=device)
    scales_HNR = torch.empty(num_blocks(mlp), num_tiles, tile_rows, device=device)
    # Columns are the fast axis: programs that run at once share the rows of a few tiles.
    _fp8_gate_up_kernel[(num_blocks(mlp), num_tiles)](
        rows.data_PK, rows.scales_PG, experts.w_gate_up_E2FD, experts.gate_up_scales_E2HG, data_NRF, scales_HNR,
        tiles.pairs_NR, tiles.tile_experts_N, num_pairs, rows.scales_PG.stride(1), scales_HNR.stride(0), mlp,
        A=tiles.num_picks, K=hidden, R=tile_rows, GROUP=GROUP, IS_TILED=is_tiled, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return GatedTiles(data_NRF, scales_HNR)


def fp8_down(
    gated: GatedTiles,
    tiles: ExpertTiles,
    num_pairs: int,
    experts: QuantizedExperts,
    config: GroupedConfig,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The down projection of `fp8_gate_up_silu`'s result, [pairs, D], not weighted, in the order of the pairs."""
    num_tiles, tile_rows, mlp = gated.data_NRF.shape
    hidden = experts.w_down_EDF.shape[1]
    assert GROUP % config.columns == 0 and config.depth == GROUP, config
    results_PD = torch.empty(num_pairs, hidden, dtype=dtype, device=gated.data_NRF.device)
    _fp8_down_kernel[(triton.cdiv(hidden, config.columns), num_tiles)](
        gated.data_NRF, gated.scales_HNR, experts.w_down_EDF, experts.down_scales_EGH, results_PD, tiles.pairs_NR,
        tiles.tile_experts_N, num_pairs, gated.scales_HNR.stride(0), hidden, K=mlp, R=tile_rows,
        BLOCK_N=config.columns, GROUP=GROUP, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return results_PD


def fp8_routed_experts_reference(
    x_TD: torch.Tensor, routes: Routes, experts: QuantizedExperts, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """The same as `fp8_routed_experts`, in torch: each expert computes all rows, in float32 until the end."""
    total_TD = torch.zeros_like(x_TD, dtype=torch.float32) if residual_TD is None else residual_TD.float()
    rows_TD = quantize_rows_reference(x_TD, is_grouped=True).dequantized()
    for expert in range(len(experts.w_down_EDF)):
        weights_T1 = (routes.weights_TA * (routes.expert_ids_TA == expert)).sum(dim=1, keepdim=True)
        gate_TF, up_TF = (rows_TD @ of(expert).dequantized().t() for of in (experts.gate, experts.up))
        gated = quantize_rows_reference(torch.nn.functional.silu(gate_TF) * up_TF, is_grouped=True)
        result_TD = gated.dequantized() @ experts.down(expert).dequantized().t()
        # Rows that do not pick an expert take nothing from it, whatever it makes of them.
        total_TD += torch.where(weights_T1 != 0, weights_T1 * result_TD, 0.0)
    return total_TD.to(x_TD.dtype)


def default_fp8_config(num_pairs: int, num_experts: int) -> ExpertsConfig:
    """By the pairs that an expert gets on average: weights are read once a tile, empty slots cost arithmetic alone."""
    average = num_pairs / num_experts
    _, tile_rows, (gate_warps, gate_stages), (columns, warps, stages) = next(row for row in _TILES if average <= row[0])
    return ExpertsConfig(
        tile_rows=tile_rows,
        gate_up=GroupedConfig(GROUP, GROUP, gate_warps, gate_stages),
        down=GroupedConfig(columns, GROUP, warps, stages),
    )
