"""Gather and scatter of KV: tokens that lie scattered in a pool's pages, and a contiguous staging region.

A region holds chunks of CHUNK_TOKENS tokens, the last one fewer; a chunk holds the rows of plane after plane, layer
after layer. One launch copies planes that lie alike, two at most, in all layers: few, long copies leave the pool,
however scattered the tokens are. A transport that was given a descriptor for each row would be slower by two orders of
magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from radixmesh.kernels.prepared_kernel import PreparedKernel

CHUNK_TOKENS = 256
# A program's tile. Of 2 to 32 KiB none is faster, to another GPU's memory or to its own (two H200).
_TILE_BYTES = 4 << 10
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}


# The stride of layers is that of a pool's pages, as many as there is memory for: one kernel for all of them, which is
# compiled once, and kept from one start to the next.
@triton.jit(do_not_specialize=["first_plane", "second_plane", "layer_stride", "indexes", "region", "num_tokens"])
def _copy_rows_kernel(
    first_plane, second_plane, layer_stride, indexes, region, num_tokens,
    LAYERS: tl.constexpr, STRIDE_ALIGNED: tl.constexpr, ROW_STRIDE: tl.constexpr, ROW: tl.constexpr,
    TOKEN: tl.constexpr, BEFORE: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, IS_GATHER: tl.constexpr,
):  # fmt: skip
    # Rows of the first plane's layers, then of the second's.
    number = tl.program_id(1).to(tl.int64)
    plane = tl.where(number < LAYERS, first_plane, second_plane)
    layer_start = number % LAYERS * tl.multiple_of(layer_stride, STRIDE_ALIGNED)
    pool_ptr = tl.multiple_of(plane.to(tl.pointer_type(WORD)), ALIGNED) + layer_start
    region_ptr = tl.multiple_of(region.to(tl.pointer_type(WORD)), ALIGNED)
    first = tl.program_id(0) * TOKENS
    # TOKENS divides CHUNK: all tokens of a program are of one chunk.
    chunk_first = first // CHUNK * CHUNK
    in_chunk = tl.minimum(num_tokens - chunk_first, CHUNK)
    tokens = first + tl.arange(0, TOKENS)
    index = tl.load(indexes.to(tl.pointer_type(tl.int32)) + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
    rows_ptr = region_ptr + chunk_first.to(tl.int64) * TOKEN + in_chunk.to(tl.int64) * (BEFORE + number * ROW)
    for start in tl.static_range(0, ROW, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = (tokens < num_tokens)[:, None] & (words < ROW)[None, :]
        in_pool = pool_ptr + index[:, None] * ROW_STRIDE + words[None, :]
        in_region = rows_ptr + (tokens - chunk_first)[:, None] * ROW + words[None, :]
        if IS_GATHER:
            tl.store(in_region, tl.load(in_pool, mask=mask), mask=mask)
        else:
            tl.store(in_pool, tl.load(in_region, mask=mask), mask=mask)


class _Planes(NamedTuple):
    """One plane, or two that lie alike. Numbers are of bytes; before: of what a region's token has of planes ahead."""

    addresses: tuple[int, int]
    count: int
    layers: int
    layer_stride: int
    row_stride: int
    row: int
    before: int


class _Variant(NamedTuple):
    """layer_stride: in its words. tokens: of a program."""

    kernel: PreparedKernel
    layer_stride: int
    tokens: int


class RowCopies:
    """Copies between the tokens of a pool and regions, of N tokens and N x token_bytes.

    planes: [layers, tokens of the pool, ...] each, with the rows of a token contiguous, of all the same layers; they
    outlive this. Indexes are int32 numbers of tokens. A region is uint8 and contiguous, or the address of one, for
    memory that no tensor of this process has, such as another device's. All on one device, or mapped there; copies run
    on the current stream.
    """

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        assert can_copy(planes), [plane.stride() for plane in planes]
        self.token_bytes = token_bytes_of(planes)
        self._planes = _grouped(planes)
        self._variants: dict[tuple[int, bool], list[_Variant]] = {}
        """By bytes to which a region is aligned, and direction: of each of the planes."""

    def gather(self, indexes_N: torch.Tensor, region: torch.Tensor | int) -> None:
        """From the pool to a region."""
        self._copy(indexes_N, region, is_gather=True)

    def scatter(self, indexes_N: torch.Tensor, region: torch.Tensor | int) -> None:
        """From a region to the pool: no index occurs twice."""
        self._copy(indexes_N, region, is_gather=False)

    def _copy(self, indexes_N: torch.Tensor, region: torch.Tensor | int, *, is_gather: bool) -> None:
        num_tokens = len(indexes_N)
        assert indexes_N.dtype == torch.int32 and indexes_N.is_contiguous(), (indexes_N.dtype, indexes_N.stride())
        if isinstance(region, torch.Tensor):
            assert region.dtype == torch.uint8 and region.is_contiguous(), (region.dtype, region.stride())
            assert region.numel() == num_tokens * self.token_bytes, (region.shape, num_tokens)
        if not num_tokens:
            return
        address = region if isinstance(region, int) else region.data_ptr()
        aligned = math.gcd(16, address)
        variants = self._variants.get((aligned, is_gather))
        if variants is None:
            variants = [_variant_of(planes, self.token_bytes, aligned, is_gather=is_gather) for planes in self._planes]
            self._variants[aligned, is_gather] = variants
        for planes, variant in zip(self._planes, variants, strict=True):
            programs = triton.cdiv(num_tokens, variant.tokens), planes.count * planes.layers
            places = *planes.addresses, variant.layer_stride, indexes_N.data_ptr(), address
            variant.kernel.launch(*programs, *places, num_tokens)


def can_copy(planes: Sequence[torch.Tensor]) -> bool:
    """True if the rows of a token are contiguous, as those of a pool without padding between heads are."""
    return all(plane[0, 0].is_contiguous() for plane in planes)


def token_bytes_of(planes: Sequence[torch.Tensor]) -> int:
    """Bytes of a token in a region."""
    return sum(plane.shape[0] * plane[0, 0].numel() * plane.element_size() for plane in planes)


def gather_rows_reference(planes: Sequence[torch.Tensor], indexes_N: torch.Tensor, region: torch.Tensor) -> None:
    """The same as `RowCopies.gather`, in torch."""
    parts = [
        plane[layer][chunk.long()].contiguous().view(torch.uint8).flatten()
        for chunk in indexes_N.split(CHUNK_TOKENS)
        for plane in planes
        for layer in range(len(plane))
    ]
    region.copy_(torch.cat(parts))


def _grouped(planes: Sequence[torch.Tensor]) -> list[_Planes]:
    groups: list[_Planes] = []
    before = 0
    for plane in planes:
        address, size, layers = plane.data_ptr(), plane.element_size(), len(plane)
        row = size * math.prod(plane.shape[2:])
        shape = layers, size * plane.stride(0) if layers > 1 else 0, size * plane.stride(1), row
        last = groups[-1] if groups else None
        if last is not None and last.count == 1 and last[2:-1] == shape:
            groups[-1] = last._replace(addresses=(last.addresses[0], address), count=2)
        else:
            groups.append(_Planes((address, address), 1, *shape, before))
        before += row * layers
    return groups


def _variant_of(planes: _Planes, token_bytes: int, aligned: int, *, is_gather: bool) -> _Variant:
    offsets = planes.layer_stride, planes.row_stride, planes.row, planes.before, token_bytes
    word = math.gcd(8, aligned, *planes.addresses, *offsets)
    block = min(triton.next_power_of_2(planes.row // word), 256)
    tokens = max(1, min(_TILE_BYTES // (block * word), 64))
    kernel = PreparedKernel(
        _copy_rows_kernel,
        LAYERS=planes.layers,
        STRIDE_ALIGNED=math.gcd(16, planes.layer_stride // word),
        ROW_STRIDE=planes.row_stride // word,
        ROW=planes.row // word,
        TOKEN=token_bytes // word,
        BEFORE=planes.before // word,
        CHUNK=CHUNK_TOKENS,
        TOKENS=tokens,
        BLOCK=block,
        WORD=_WORDS[word],
        ALIGNED=math.gcd(aligned, *planes.addresses),
        IS_GATHER=is_gather,
    )
    return _Variant(kernel, planes.layer_stride // word, tokens)
