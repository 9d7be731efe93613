"""The MLP that all rows go through beside their routed experts, by the kernels of those: in two launches.

A GEMM of a library takes whole SMs. These programs take half of one, as those of the routed experts do, so that both
are resident together.

Legend: T rows, D hidden size, F mlp size.
"""

from __future__ import annotations

import torch

from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig
from radixmesh.kernels.moe.group_rows import RowTiles
from radixmesh.kernels.moe.grouped_gemm import down, gate_up_silu, one_expert, routed_experts_reference
from radixmesh.kernels.moe.row_experts import SharedWeights

# Rows up to which it is used, slots of a tile, and columns, depth, warps and stages of both GEMMs. Weights are read
# once a tile, from the L2 cache but for the first.
_CONFIGS = (
    (16, 16, (32, 128, 4, 4), (32, 128, 4, 4)),
    (32, 32, (32, 128, 4, 3), (32, 128, 4, 3)),
    (64, 64, (32, 128, 4, 3), (32, 128, 4, 3)),
    (float("inf"), 128, (64, 64, 8, 3), (64, 64, 8, 3)),
)


def shared_mlp(
    x_TD: torch.Tensor, weights: SharedWeights, config: ExpertsConfig | None = None, *, use_pdl: bool = False
) -> torch.Tensor:
    """down(silu(gate(x)) x up(x)), [T, D]. float32 sums, rounded to the dtype behind the gate and at the end.

    x and weights of one dtype, features contiguous. `use_pdl` as in `rms_norm`.
    """
    w_gate_up_2FD, w_down_DF = weights
    (num_rows, hidden), mlp = x_TD.shape, w_down_DF.shape[1]
    assert w_gate_up_2FD.shape == (2 * mlp, hidden) and w_down_DF.shape[0] == hidden, (w_gate_up_2FD.shape, mlp)
    assert x_TD.dtype == w_gate_up_2FD.dtype == w_down_DF.dtype and x_TD.stride(1) == 1, (x_TD.dtype, x_TD.stride())
    assert w_gate_up_2FD.is_contiguous() and w_down_DF.is_contiguous(), (w_gate_up_2FD.stride(), w_down_DF.stride())
    if num_rows == 0:
        return torch.empty_like(x_TD)
    config = config or shared_config(num_rows, x_TD.element_size())
    tiles = RowTiles(num_rows, config.tile_rows)
    gated = gate_up_silu(x_TD, tiles, num_rows, w_gate_up_2FD[None], config.gate_up, use_pdl=use_pdl)
    return down(gated, tiles, num_rows, w_down_DF[None], config.down, use_pdl=use_pdl)


def shared_config(num_rows: int, itemsize: int = 2) -> ExpertsConfig:
    """By the number of rows; blocks of float32 have half the depth, since shared memory holds as many bytes."""
    _, tile_rows, *blocks = next(row for row in _CONFIGS if num_rows <= row[0])
    gate_up, down_ = (
        GroupedConfig(columns, depth * 2 // itemsize, num_warps, num_stages)
        for columns, depth, num_warps, num_stages in blocks
    )
    return ExpertsConfig(tile_rows=tile_rows, gate_up=gate_up, down=down_)


def shared_mlp_reference(x_TD: torch.Tensor, weights: SharedWeights) -> torch.Tensor:
    """The same as `shared_mlp`, in torch."""
    experts = weights.w_gate_up[None], weights.w_down[None]
    return routed_experts_reference(x_TD, one_expert(0, len(x_TD), x_TD.device), *experts)
