"""Features of a device that came with Hopper."""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_gdc(device: torch.device) -> bool:
    """True if kernels may use griddepcontrol and bulk copies (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """True if kernels may use warp group MMA (compute capability 9.x alone)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
