"""Weights of norms folded into the GEMMs behind them.

norm(x) @ W = (x s w) @ W = s (x @ (diag(w) W))        w the norm's weight, s = 1 / sqrt(mean(x^2) + eps)
"""

from __future__ import annotations

import torch


def fold_norm(norm_D: torch.Tensor, w_ND: torch.Tensor) -> None:
    """Multiplies a norm into the projection [out, in] that reads it, in place, and leaves ones in the norm: the model
    stays what it was, each weight rounded once. Not for the final norm: the projection behind it may be the embedding.
    """
    w_ND.mul_(norm_D)
    norm_D.fill_(1.0)
