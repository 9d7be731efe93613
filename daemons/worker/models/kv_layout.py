"""KV that a model keeps per token and layer, for whoever owns the memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from radixmesh.kernels.kv_fp8 import KvScales


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlane:
    """One array of the pool: `row_shape` numbers per token and layer, e.g. keys of [kv heads, head_dim].

    padding: zeros in memory behind each of the last axis, for kernels that have no size as small; nobody writes there.
    form: in what the numbers differ between two workers with the same weights, e.g. in their order within a head. Pages
    of other forms have the same size and another meaning.
    """

    name: str
    row_shape: tuple[int, ...]
    padding: int = 0
    form: str = ""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """`row_shape` as it lies in memory."""
        return (*self.row_shape[:-1], self.row_shape[-1] + self.padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """All planes of a model. A model with a compressed cache has other planes than one with keys and values.

    is_whole: every rank of a tensor-parallel group holds the same KV, not a part of the heads.
    """

    num_layers: int
    planes: tuple[KvPlane, ...]
    is_whole: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of memory, over all layers and planes."""
        return self.num_layers * dtype.itemsize * sum(math.prod(plane.stored_shape) for plane in self.planes)

    def in_form(self, plane: str, form: str) -> KvLayout:
        """The same with `form` added to that of a plane."""
        planes = (replace(p, form=f"{p.form}{form}") if p.name == plane else p for p in self.planes)
        return replace(self, planes=tuple(planes))

    def padded(self, size: int) -> KvLayout:
        """The same with the last axis of every plane stored in `size` numbers, which is no fewer than it has."""
        planes = tuple(replace(plane, padding=size - plane.row_shape[-1]) for plane in self.planes)
        assert all(plane.padding >= 0 for plane in planes), (size, self.planes)
        return replace(self, planes=planes)


class KvPlanes(ABC):
    """The pool as a model sees it in a step. Tokens of the pool are numbered page x page_size + offset."""

    @abstractmethod
    def tokens(self, plane: str, layer: int) -> torch.Tensor:
        """View of all tokens of one plane and layer, [tokens of the pool, *row_shape]: written through, not copied.

        Strides are those of `stored_shape`. Of FP8, the numbers are without the `scales`.
        """

    def scales(self, layer: int) -> KvScales | None:
        """Scales of the layer's keys and values in an FP8 pool; None: all are 1."""
        return None
