"""Routed experts as FP8 numbers (e4m3) with a float32 scale for each block of 128 x 128, as DeepSeek-V3 publishes them.

Legend: E experts, D hidden size, F mlp size of an expert, G blocks of 128 along D, H those along F, both rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmesh.kernels.fp8.quantized import FP8, GROUP, QuantizedMatrix


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """w_gate_up_E2FD and w_down_EDF FP8, contiguous; gate's rows are the first F. Scales float32, contiguous:
    gate_up_scales_E2HG, of which the first H rows are gate's, and down_scales_EGH.

    Gate and up have blocks of their own, so that F need not be a multiple of 128.
    """

    w_gate_up_E2FD: torch.Tensor
    gate_up_scales_E2HG: torch.Tensor
    w_down_EDF: torch.Tensor
    down_scales_EGH: torch.Tensor

    def __post_init__(self) -> None:
        num_experts, hidden, mlp = self.w_down_EDF.shape
        of_hidden, of_mlp = num_blocks(hidden), num_blocks(mlp)
        shapes = (
            (self.w_gate_up_E2FD, (num_experts, 2 * mlp, hidden), FP8),
            (self.gate_up_scales_E2HG, (num_experts, 2 * of_mlp, of_hidden), torch.float32),
            (self.w_down_EDF, (num_experts, hidden, mlp), FP8),
            (self.down_scales_EGH, (num_experts, of_hidden, of_mlp), torch.float32),
        )
        for tensor, shape, dtype in shapes:
            assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(), (tensor.shape, shape)

    @property
    def expert_bytes(self) -> int:
        weights = (self.w_gate_up_E2FD, self.gate_up_scales_E2HG, self.w_down_EDF, self.down_scales_EGH)
        return sum(w[0].nbytes for w in weights)

    @classmethod
    def empty(cls, num_experts: int, hidden: int, mlp: int, device: torch.device) -> QuantizedExperts:
        """Memory, not filled."""
        of_hidden, of_mlp = num_blocks(hidden), num_blocks(mlp)
        return cls(
            torch.empty(num_experts, 2 * mlp, hidden, dtype=FP8, device=device),
            torch.empty(num_experts, 2 * of_mlp, of_hidden, device=device),
            torch.empty(num_experts, hidden, mlp, dtype=FP8, device=device),
            torch.empty(num_experts, of_hidden, of_mlp, device=device),
        )

    def gate(self, expert: int) -> QuantizedMatrix:
        """[F, D], views."""
        mlp, of_mlp = self.w_down_EDF.shape[2], self.down_scales_EGH.shape[2]
        return _matrix(self.w_gate_up_E2FD[expert, :mlp], self.gate_up_scales_E2HG[expert, :of_mlp])

    def up(self, expert: int) -> QuantizedMatrix:
        """[F, D], views."""
        mlp, of_mlp = self.w_down_EDF.shape[2], self.down_scales_EGH.shape[2]
        return _matrix(self.w_gate_up_E2FD[expert, mlp:], self.gate_up_scales_E2HG[expert, of_mlp:])

    def down(self, expert: int) -> QuantizedMatrix:
        """[D, F], views."""
        return _matrix(self.w_down_EDF[expert], self.down_scales_EGH[expert])


def num_blocks(size: int) -> int:
    """Blocks, or groups, along so many features."""
    return -(-size // GROUP)


def _matrix(data_NK: torch.Tensor, scales: torch.Tensor) -> QuantizedMatrix:
    return QuantizedMatrix(data_NK, scales, GROUP, True)
