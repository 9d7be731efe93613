"""Activations of MLPs by the names that config files use; all are elementwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]

_gelu_tanh = partial(functional.gelu, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """The approximation of GPT-1 and CLIP."""
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


SILU = frozenset(("silu", "swish"))
"""Names of the activation that fused kernels and those of routed experts compute."""

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
}
