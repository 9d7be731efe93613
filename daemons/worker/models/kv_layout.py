"""What a model keeps per token and layer, told to whoever owns the memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlane:
    """One array of the pool: `row_shape` numbers per token and layer, e.g. keys of [kv heads, head_dim]."""

    name: str
    row_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """All planes of a model. A model with a compressed cache has other planes than one with keys and values."""

    num_layers: int
    planes: tuple[KvPlane, ...]

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Over all layers and planes."""
        return self.num_layers * dtype.itemsize * sum(math.prod(plane.row_shape) for plane in self.planes)


class KvPlanes(ABC):
    """The pool as a model sees it in a step. Tokens of the pool are numbered page x page_size + offset."""

    @abstractmethod
    def tokens(self, plane: str, layer: int) -> torch.Tensor:
        """View of all tokens of one plane and layer, [tokens of the pool, *row_shape]: written through, not copied."""
