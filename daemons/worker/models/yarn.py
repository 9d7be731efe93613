"""Rotary frequencies stretched by YaRN (Peng et al. 2023), and the scaling of scores that it asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Pairs that turn more than `beta_fast` times within `original_max_len` keep their frequency, those that turn less
    than `beta_slow` times have it divided by `factor`, and between them is a ramp.

    mscale and mscale_all_dim: weights of 0.1 x ln(factor) in the scale of RoPE dims and of all scores; 0 = unset.
    attention_factor: the scale of RoPE dims, if not None. is_truncated: the ramp begins and ends at whole pairs.
    """

    factor: float
    original_max_len: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None
    is_truncated: bool

    @property
    def rope_scale(self) -> float:
        """Factor of cos and sin."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor of all scores in DeepSeek's models, beside 1 / sqrt(query dim)."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def yarn_frequencies(dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Angle per position of each pair, float32 [dim / 2]."""
    pairs_h = torch.arange(dim // 2, dtype=torch.float32)
    powers_h = theta ** (2 * pairs_h / dim)
    first, last = (_pair_of_turns(turns, dim, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # 0 = kept, 1 = stretched; a ramp of no width is a step.
    stretched_h = ((pairs_h - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return stretched_h / (scaling.factor * powers_h) + (1 - stretched_h) / powers_h


def _pair_of_turns(turns: float, dim: int, theta: float, scaling: YarnScaling) -> float:
    """Index of the pair that turns that many times within the original length; between two pairs in general."""
    return dim * math.log(scaling.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
