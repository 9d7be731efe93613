"""GEMM results that the next kernel finishes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeferredNormGemm(NamedTuple):
    """Result [T, N] of a GEMM whose norm and bias [N] are left to the kernel that reads it.

    norm_input_TD: the rows [T, D] that went into the GEMM without being normed; None: they were normed before. The
    reader multiplies each row by its inverse RMS, 1 / sqrt(mean(x^2) + eps), then adds the bias.
    """

    out_TN: torch.Tensor
    bias_N: torch.Tensor | None = None
    norm_input_TD: torch.Tensor | None = None
