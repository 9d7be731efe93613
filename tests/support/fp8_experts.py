"""Random FP8 experts and rows that pick them."""

from __future__ import annotations

import torch

from radixmesh.kernels.fp8.quantized import quantize_matrix
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import Routes


def random_experts(
    num_rows: int,
    num_experts: int,
    num_picks: int,
    hidden: int,
    mlp: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[QuantizedExperts, torch.Tensor, Routes]:
    """Weights whose blocks differ in size, rows [T, D] whose groups do, and routes."""
    device = device or torch.device("cpu")
    experts = QuantizedExperts.empty(num_experts, hidden, mlp, device)
    # Scales that were mixed up show.
    by_hidden, by_mlp = (torch.linspace(0.3, 3, size, device=device) for size in (hidden, mlp))
    for expert in range(num_experts):
        for matrix, by_out, by_in in (
            (experts.gate(expert), by_mlp.flip(0), by_hidden),
            (experts.up(expert), by_mlp, by_hidden),
            (experts.down(expert), by_hidden, by_mlp.flip(0)),
        ):
            weight = torch.randn(matrix.shape, device=device) * by_out[:, None] * by_in * matrix.shape[1] ** -0.5
            made = quantize_matrix(weight, is_grouped=True)
            matrix.data_NK.view(torch.uint8).copy_(made.data_NK.view(torch.uint8))
            matrix.scales.copy_(made.scales)
    x_TD = torch.randn(num_rows, hidden, device=device) * torch.linspace(0.1, 10, num_rows, device=device)[:, None]
    ids_TA = torch.rand(num_rows, num_experts, device=device).argsort(dim=1)[:, :num_picks].int().contiguous()
    return experts, (x_TD / by_hidden).to(dtype), Routes(ids_TA, torch.rand(num_rows, num_picks, device=device))
