"""Fixed tiles: how a row's result is kept from depending on the rows it is computed with.

A GEMM of another shape may add in another order, so the same row may differ in its last bits when the batch
has another size. Here every function of rows runs on tiles of a few sizes only, and a size is used only if, on this
hardware and these weights, it was seen to give every row the same bits as the other sizes, at every index of the tile
(`agreeing_sizes`). Then a row's bits depend on the row alone: not on its neighbours, the batch size, nor the chunking.
A function that no size serves is run one row at a time: always the same shape at the same alignment, so the same bits
by construction, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

Tensors = tuple[torch.Tensor, ...]
RowFunction = Callable[[Tensors], Tensors]
"""From tensors [rows, ...] to tensors [rows, ...]; row i of the result is to depend on row i of the inputs alone."""

# Alignment in bytes of torch's own allocations: a GEMM may choose another path for data that is aligned less.
_ALIGNMENT = 64


class RowTiles:
    """Runs row functions on tiles of the given sizes. `sizes` None: on all rows at once, whatever their number.

    row_by_row: functions that are run one row at a time instead; known again by equality, as bound methods are.
    """

    def __init__(self, sizes: Sequence[int] | None, row_by_row: Collection[RowFunction] = ()) -> None:
        assert sizes is None or (sizes and min(sizes) >= 1), sizes
        self.sizes = None if sizes is None else tuple(sorted(set(sizes)))
        self.row_by_row = frozenset(row_by_row)

    def cover(self, num_rows: int) -> list[int]:
        """Sizes of the tiles for `num_rows` rows, in order; together at least `num_rows`."""
        if self.sizes is None:
            return [num_rows]
        tiles = [self.sizes[-1]] * (num_rows // self.sizes[-1])
        rest = num_rows % self.sizes[-1]
        if rest:
            tiles.append(next(size for size in self.sizes if size >= rest))
        return tiles

    def padded(self, num_rows: int) -> int:
        """Rows of the tiles that `num_rows` rows take."""
        return sum(self.cover(num_rows))

    def map(self, function: RowFunction, inputs: Tensors) -> Tensors:
        """Applies `function` tile by tile. All inputs have the same number of rows, one that `padded` returns."""
        num_rows = inputs[0].shape[0]
        cover = [1] * num_rows if function in self.row_by_row else self.cover(num_rows)
        assert sum(cover) == num_rows, (cover, inputs[0].shape)
        if self.sizes is None:
            return function(inputs)
        if len(cover) == 1:
            return function(tuple(_aligned(x) for x in inputs))
        parts: list[Tensors] = []
        start = 0
        for size in cover:
            parts.append(function(tuple(_aligned(x[start : start + size]) for x in inputs)))
            start += size
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def agreeing_sizes(function: RowFunction, rows: Tensors, candidates: Sequence[int]) -> tuple[int, ...]:
    """The largest set of tile sizes in which each of `rows` gets the same bits at every index; ascending, maybe empty.

    `rows` are distinct samples of ordinary magnitude, a number of them that every smaller candidate divides and that
    divides every larger one. Kernels that add in another order differ in many of the numbers of such rows, so agreement
    on some thousand numbers shows that the order is the same, and with it the results for all other rows.
    """
    classes: list[tuple[list[int], Tensors]] = []
    for size in candidates:
        outputs = _outputs_at_every_index(function, rows, size)
        if outputs is None:
            continue
        for sizes, reference in classes:
            if _equal(outputs, reference):
                sizes.append(size)
                break
        else:
            classes.append(([size], outputs))
    best = max((sizes for sizes, _ in classes), key=lambda sizes: (len(sizes), sizes[-1]), default=[])
    return tuple(sorted(best))


def sizes_agree(function: RowFunction, rows: Tensors, sizes: Sequence[int]) -> bool:
    """True if `rows` get the same bits in tiles of all `sizes`, each seen in one order of the rows.

    A third of the work of `agreeing_sizes`: to confirm sizes for another matrix of a kind that was tried in full.
    """
    reference: Tensors | None = None
    for shift, size in enumerate(sizes):
        outputs = _outputs(function, rows, size, shift)
        if outputs is None or (reference is not None and not _equal(outputs, reference)):
            return False
        reference = outputs
    return True


def _outputs_at_every_index(function: RowFunction, rows: Tensors, size: int) -> Tensors | None:
    """Results of `rows` in tiles of `size`, None if a row's bits depend on its index.

    Shifting all rows by one compares each index with the next, which links all indexes; the second shift changes the
    neighbours once more.
    """
    first: Tensors | None = None
    for shift in (0, 1, rows[0].shape[0] // 2 + 1):
        outputs = _outputs(function, rows, size, shift)
        if outputs is None or (first is not None and not _equal(outputs, first)):
            return None
        first = outputs
    return first


def _outputs(function: RowFunction, rows: Tensors, size: int, shift: int) -> Tensors | None:
    """Results of `rows`, shifted by some indexes, in tiles of `size`; None if copies of a row in a tile differ."""
    num_rows = rows[0].shape[0]
    shifted = tuple(_cycled(torch.roll(x, shift, 0), size) for x in rows)
    tiles = [tuple(x[at : at + size].clone() for x in shifted) for at in range(0, shifted[0].shape[0], size)]
    parts = [function(tile) for tile in tiles]
    joined = tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
    first: Tensors | None = None
    for copy in range(0, joined[0].shape[0], num_rows):
        outputs = tuple(torch.roll(x[copy : copy + num_rows], -shift, 0) for x in joined)
        if first is None:
            first = outputs
        elif not _equal(outputs, first):
            return None
    return first


def _cycled(x: torch.Tensor, size: int) -> torch.Tensor:
    repeats = max(1, size // x.shape[0])
    return x.repeat(repeats, *([1] * (x.dim() - 1)))


def _equal(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
