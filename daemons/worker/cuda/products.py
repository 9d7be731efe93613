"""What computes products of many rows: the library's own choice of an algorithm, or one that was measured.

Legend: T rows, N features out, K features in. Weights are [out, in].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from radixmesh.daemons.worker.cuda.cublaslt import Algorithm, CublasLt, Product, ProductShape


class Products(ABC):
    """In the dtype of the inputs, with sums in float32."""

    @abstractmethod
    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        """Adds the product to the residual in place."""


class TorchProducts(Products):
    """cuBLAS with the first algorithm that it names."""

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_TK, w_NK.t())

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN.addmm_(x_TK, w_NK.t())


class ChosenProduct(NamedTuple):
    product: Product
    algorithm: Algorithm


class TunedProducts(TorchProducts):
    """The chosen algorithm where a product of these shapes has one; torch for the others."""

    def __init__(self, table: Mapping[ProductShape, ChosenProduct]) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
        chosen = self._table.get(_shape(x_TK, w_NK, False))
        if chosen is not None:
            out_TN = x_TK.new_empty(x_TK.shape[0], w_NK.shape[0])
            if chosen.product.accepts(x_TK, w_NK, out_TN):
                chosen.product.run(chosen.algorithm, x_TK, w_NK, out_TN)
                return out_TN
        return super().linear(x_TK, w_NK)

    def add_linear(self, x_TK: torch.Tensor, w_NK: torch.Tensor, residual_TN: torch.Tensor) -> None:
        chosen = self._table.get(_shape(x_TK, w_NK, True))
        if chosen is not None and chosen.product.accepts(x_TK, w_NK, residual_TN):
            chosen.product.run(chosen.algorithm, x_TK, w_NK, residual_TN)
        else:
            super().add_linear(x_TK, w_NK, residual_TN)


def spread(
    lt: CublasLt, measured: Mapping[ProductShape, Algorithm | None], sizes: Iterable[int]
) -> dict[ProductShape, ChosenProduct]:
    """A table for all `sizes` of rows: each takes what was best, None being torch, at the next larger size that was
    measured, of up to twice as many rows, if the library says that it serves this size too."""
    table: dict[ProductShape, ChosenProduct] = {}
    matrices = {(shape.num_out, shape.num_in, shape.dtype, shape.is_added) for shape in measured}
    for num_out, num_in, dtype, is_added in matrices:
        by_rows = {
            shape.num_rows: algorithm
            for shape, algorithm in measured.items()
            if (shape.num_out, shape.num_in, shape.dtype, shape.is_added) == (num_out, num_in, dtype, is_added)
        }
        for size in sizes:
            nearest = min((num_rows for num_rows in by_rows if size <= num_rows <= 2 * size), default=None)
            algorithm = by_rows[nearest] if nearest is not None else None
            if algorithm is None:
                continue
            product = Product(lt, ProductShape(size, num_out, num_in, dtype, is_added))
            adopted = algorithm if size == nearest else product.adopt(algorithm)
            if adopted is not None:
                table[product.shape] = ChosenProduct(product, adopted)
    return table


def _shape(x_TK: torch.Tensor, w_NK: torch.Tensor, is_added: bool) -> ProductShape:
    return ProductShape(x_TK.shape[0], w_NK.shape[0], w_NK.shape[1], x_TK.dtype, is_added)
