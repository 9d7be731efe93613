"""A rank's share of a checkpoint tensor, as data: ranges along one dim.

Legend: N features out, K features in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class TensorSlice(NamedTuple):
    """ranges: of [start, stop) along `dim`, side by side in the rank's tensor in this order; more than one where the
    checkpoint holds several projections in one tensor. size: of the whole tensor along dim."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int

    @property
    def length(self) -> int:
        """Of the rank's share."""
        return sum(stop - start for start, stop in self.ranges)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a share of that shape."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def is_aligned(self, block: int) -> bool:
        """True where all ranges begin at multiples of `block`, and end there or with the tensor."""
        return all(start % block == 0 and (stop % block == 0 or stop == self.size) for start, stop in self.ranges)

    def in_blocks(self, block: int) -> TensorSlice:
        """The same of a tensor that has one number for every `block` along dim."""
        assert self.is_aligned(block), (self, block)
        ranges = tuple((start // block, -(-stop // block)) for start, stop in self.ranges)
        return TensorSlice(self.dim, ranges, -(-self.size // block))

    def take(self, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> torch.Tensor:
        """The share; `read` gives the part of the tensor at some indices."""
        before = (slice(None),) * self.dim
        parts = [read((*before, slice(start, stop))) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)
