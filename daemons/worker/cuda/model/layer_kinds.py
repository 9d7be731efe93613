"""Layers of a model that launch the same kernels, told by what they are made of.

Compiling needs every kernel launched once, and the Python of a step's launches takes most of its time: of layers that
are alike one is enough, ahead of it another one, since a layer may leave partial sums to the next.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Generic, TypeVar

import torch

from radixmesh.daemons.worker.cuda.experts import Fp8Experts, PlainExperts, RowExperts
from radixmesh.daemons.worker.cuda.linear import Linear

Layer = TypeVar("Layer")

_ALIGNED_BYTES = 16
"""Of an address: Triton compiles other code for those that are not its multiples."""
# Their attributes are weights and the operations that all layers share.
_MADE_OF_ATTRIBUTES = (Linear, PlainExperts, Fp8Experts, RowExperts)


def each_kind(layers: Sequence[Layer]) -> list[Layer]:
    """Those of the layers, in their order, whose kind has not come yet behind a layer of the kind ahead of it. A layer
    with a part that this module does not know is of a kind of its own."""
    found: dict[Hashable, Layer] = {}
    before: Hashable = None
    for layer in layers:
        kind = _describe(layer)
        found.setdefault((before, kind), layer)
        before = kind
    return list(found.values())


class LaunchedLayers(Generic[Layer]):
    """now: the layers that a step launches: all, but within each_kind_once()."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._all = self.now = layers

    @contextmanager
    def each_kind_once(self) -> Iterator[None]:
        """As of each_kind()."""
        self.now = each_kind(self._all)
        try:
            yield
        finally:
            self.now = self._all


def _describe(value: object) -> Hashable:
    """Equal for values with which a layer launches the same kernels."""
    if isinstance(value, torch.Tensor):
        is_aligned = value.data_ptr() % _ALIGNED_BYTES == 0
        return value.dtype, tuple(value.shape), value.stride(), is_aligned
    if value is None or isinstance(value, bool | int | float | str | enum.Enum | torch.dtype):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_describe(item) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((name, _describe(item)) for name, item in value.items())
    if is_dataclass(value):
        return type(value), tuple(_describe(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, _MADE_OF_ATTRIBUTES):
        return type(value), tuple((name, _describe(item)) for name, item in sorted(vars(value).items()))
    # Shared by all layers, as operations and tables are, or not known here.
    return id(value)
