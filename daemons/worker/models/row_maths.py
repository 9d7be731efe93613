"""Small functions of rows that the models share. T rows, I and O features in and out, D hidden size, F mlp size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def linear(x_TI: torch.Tensor, w_IO: torch.Tensor, b_O: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w + b; weights are [in, out]."""
    return plus(x_TI @ w_IO, b_O)


def plus(x_TD: torch.Tensor, b_D: torch.Tensor | None) -> torch.Tensor:
    """x + b, or x where there is no bias."""
    # Apart from the matmul: with the bias inside, some libraries take another kernel.
    return x_TD if b_D is None else x_TD + b_D


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) x weight over the last dim, float32 inside (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps)


def rms_norm_plus_one(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """The same with 1 + weight for weight, rounded to the dtype of x at the end alone, as Gemma does."""
    return functional.rms_norm(x_TD.float(), weight_D.shape, 1.0 + weight_D.float(), eps).to(x_TD.dtype)


def layer_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(variance + eps) x weight + bias over the last dim (Ba et al. 2016)."""
    return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)


def soft_capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap x tanh(x / cap): nearly x where that is small, never beyond +-cap (Bello et al. 2016)."""
    return cap * torch.tanh(x / cap)


def gated(gate_up_TF2: torch.Tensor, *, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """activation(gate) x up of both side by side, [T, F]; the activation is elementwise (Shazeer 2020)."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return activation(gate_TF) * up_TF


def silu_gated(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`gated` by SiLU: SwiGLU."""
    return gated(gate_up_TF2, activation=functional.silu)


def clamped_gated(gate_up_TF2: torch.Tensor, *, limit: float, alpha: float) -> torch.Tensor:
    """(up + 1) x gate x sigmoid(alpha x gate), with gate <= limit and up within +-limit: GPT-OSS's SwiGLU."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return (up_TF + 1) * (gate_TF * torch.sigmoid(gate_TF * alpha))
