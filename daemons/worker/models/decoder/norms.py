"""The norms of a decoder as functions of rows, by the kind that its config names."""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixmesh.daemons.worker.models.decoder.config import DecoderConfig, NormKind
from radixmesh.daemons.worker.models.row_maths import layer_norm, rms_norm, rms_norm_plus_one

Norm = Callable[[torch.Tensor], torch.Tensor]


def create_norm(config: DecoderConfig, weight_D: torch.Tensor | None, bias_D: torch.Tensor | None = None) -> Norm:
    """Over the last dim; no function at all where the model has no such norm: weight None or without elements."""
    if weight_D is None or not weight_D.numel():
        return _unchanged
    weight, eps = weight_D, config.norm_eps
    if config.norm_kind is NormKind.LAYER:
        return lambda x: layer_norm(x, weight, bias_D, eps)
    if config.norm_kind is NormKind.RMS_PLUS_ONE:
        return lambda x: rms_norm_plus_one(x, weight, eps)
    return lambda x: rms_norm(x, weight, eps)


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x
