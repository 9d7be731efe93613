"""Rotary position embedding: the table of angles, and its application.

Source: Su et al., RoFormer (2021), whose pairs are neighbours (interleaved); most checkpoints in Hugging Face format
pair the halves of a head instead.
"""

from __future__ import annotations

import math

import torch

from radixmesh.daemons.worker.models.rope_config import AnyScaling, LongRopeScaling, RopeConfig
from radixmesh.daemons.worker.models.yarn import YarnScaling, yarn_frequencies

_BLOCK = 1024


class RopeTable:
    """cos and sin by position, float32 [positions, h]; grows in blocks of a fixed size. h: pairs that are turned, half
    of rotary_dim or else of head_dim.

    A block is always computed at the same shape, so a position's values do not depend on when it was first needed.
    """

    def __init__(self, head_dim: int, config: RopeConfig, device: torch.device) -> None:
        rotary_dim = config.rotary_dim or head_dim
        self._frequencies_h = rope_frequencies(rotary_dim, config.theta, config.scaling).to(device)
        self._scale = config.scale
        self._cos_Ph = self._frequencies_h.new_empty(0, rotary_dim // 2)
        self._sin_Ph = self._cos_Ph

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, 1, h], of int64 positions."""
        while int(positions_T.max()) >= self._cos_Ph.shape[0]:
            self._grow()
        return self._cos_Ph[positions_T].unsqueeze(1), self._sin_Ph[positions_T].unsqueeze(1)

    def all(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of at least that many positions from 0, [positions, h] each."""
        while self._cos_Ph.shape[0] < num_positions:
            self._grow()
        return self._cos_Ph, self._sin_Ph

    def _grow(self) -> None:
        first = self._cos_Ph.shape[0]
        positions = torch.arange(first, first + _BLOCK, device=self._cos_Ph.device, dtype=torch.float32)
        angles_Ph = positions[:, None] * self._frequencies_h[None, :]
        self._cos_Ph = torch.cat((self._cos_Ph, angles_Ph.cos() * self._scale))
        self._sin_Ph = torch.cat((self._sin_Ph, angles_Ph.sin() * self._scale))


def apply_rope(
    x_THD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor, *, is_interleaved: bool = False
) -> torch.Tensor:
    """Turns the pairs of the first 2h numbers of every head by the row's angles; float32 inside, dtype of x outside.

    Pairs are (x[i], x[i + h]), or (x[2i], x[2i + 1]) if interleaved.
    """
    rotary_dim = 2 * cos_T1h.shape[-1]
    x_THR, rest = x_THD[..., :rotary_dim].float(), x_THD[..., rotary_dim:]
    if is_interleaved:
        a_THh, b_THh = x_THR[..., 0::2], x_THR[..., 1::2]
    else:
        a_THh, b_THh = x_THR.chunk(2, dim=-1)
    parts = (a_THh * cos_T1h - b_THh * sin_T1h, b_THh * cos_T1h + a_THh * sin_T1h)
    turned = torch.stack(parts, dim=-1).flatten(-2) if is_interleaved else torch.cat(parts, dim=-1)
    turned = turned.to(x_THD.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rope_frequencies(head_dim: int, theta: float, scaling: AnyScaling | None) -> torch.Tensor:
    """Angle per position of each pair, float32 [head_dim / 2], with the scaling applied. head_dim: what is turned."""
    if isinstance(scaling, YarnScaling):
        return yarn_frequencies(head_dim, theta, scaling)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if isinstance(scaling, LongRopeScaling):
        return 1.0 / (torch.tensor(scaling.factors, dtype=torch.float32) * theta**exponents)
    frequencies_h = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies_h
    stretched_h = frequencies_h / scaling.factor
    if scaling.kind == "linear":
        return stretched_h
    wave_lengths_h = 2 * math.pi / frequencies_h
    turns_h = scaling.original_max_len / wave_lengths_h
    # 1 = high frequency, kept; 0 = low frequency, stretched.
    kept_h = (turns_h - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_h = kept_h.clamp(0.0, 1.0)
    return (1 - kept_h) * stretched_h + kept_h * frequencies_h
