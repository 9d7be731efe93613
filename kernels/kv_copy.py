"""Gather and scatter of KV: tokens that lie scattered in a pool's pages, and a contiguous staging region.

A region holds chunks of CHUNK_TOKENS tokens, the last one fewer; a chunk holds the rows of plane after plane, layer
after layer. One launch copies one plane in all layers: few, long copies leave the pool, however scattered the tokens
are. A transport that was given a descriptor for each row would be slower by two orders of magnitude.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

CHUNK_TOKENS = 256
_TILE_BYTES = 16 << 10  # A program's tile.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _copy_rows_kernel(
    pool_ptr, indexes_ptr, region_ptr, num_tokens, layer_stride,
    ROW_STRIDE: tl.constexpr, ROW: tl.constexpr, TOKEN: tl.constexpr, BEFORE: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, IS_GATHER: tl.constexpr, IS_ADDRESS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TOKENS
    if IS_ADDRESS:
        region_ptr = tl.multiple_of(region_ptr.to(pool_ptr.dtype), ALIGNED)
    # TOKENS divides CHUNK: all tokens of a program are of one chunk.
    chunk_first = first // CHUNK * CHUNK
    in_chunk = tl.minimum(num_tokens - chunk_first, CHUNK)
    tokens = first + tl.arange(0, TOKENS)
    index = tl.load(indexes_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
    rows = region_ptr + chunk_first.to(tl.int64) * TOKEN + in_chunk.to(tl.int64) * (BEFORE + layer * ROW)
    pool = pool_ptr + layer * layer_stride
    for start in tl.static_range(0, ROW, BLOCK):
        words = start + tl.arange(0, BLOCK)
        mask = (tokens < num_tokens)[:, None] & (words < ROW)[None, :]
        in_pool = pool + index[:, None] * ROW_STRIDE + words[None, :]
        in_region = rows + (tokens - chunk_first)[:, None] * ROW + words[None, :]
        if IS_GATHER:
            tl.store(in_region, tl.load(in_pool, mask=mask), mask=mask)
        else:
            tl.store(in_pool, tl.load(in_region, mask=mask), mask=mask)


def gather_rows(planes: list[torch.Tensor], indexes_N: torch.Tensor, region: torch.Tensor | int) -> None:
    """Copies tokens of a pool to a region, uint8 and contiguous, of N x bytes of a token.

    planes: [layers, tokens of the pool, ...] each, with the rows of a token contiguous, of all the same layers.
    indexes: int32 numbers of tokens. region: or its address, for memory that no tensor of this process has, such as
    another device's. All on one device, or mapped there; the region is written when the stream is.
    """
    _copy(planes, indexes_N, region, is_gather=True)


def scatter_rows(planes: list[torch.Tensor], indexes_N: torch.Tensor, region: torch.Tensor | int) -> None:
    """The reverse of gather_rows(): no index occurs twice."""
    _copy(planes, indexes_N, region, is_gather=False)


def can_copy(planes: list[torch.Tensor]) -> bool:
    """True if the rows of a token are contiguous, as those of a pool without padding between heads are."""
    return all(plane[0, 0].is_contiguous() for plane in planes)


def token_bytes_of(planes: list[torch.Tensor]) -> int:
    """Bytes of a token in a region."""
    return sum(plane.shape[0] * plane[0, 0].numel() * plane.element_size() for plane in planes)


def gather_rows_reference(planes: list[torch.Tensor], indexes_N: torch.Tensor, region: torch.Tensor) -> None:
    """The same as `gather_rows`, in torch."""
    parts = [
        plane[layer][chunk.long()].contiguous().view(torch.uint8).flatten()
        for chunk in indexes_N.split(CHUNK_TOKENS)
        for plane in planes
        for layer in range(len(plane))
    ]
    region.copy_(torch.cat(parts))


def _copy(planes: list[torch.Tensor], indexes_N: torch.Tensor, region: torch.Tensor | int, *, is_gather: bool) -> None:
    token_bytes, num_tokens = token_bytes_of(planes), len(indexes_N)
    assert indexes_N.dtype == torch.int32, indexes_N.dtype
    if isinstance(region, torch.Tensor):
        assert region.dtype == torch.uint8 and region.is_contiguous(), (region.dtype, region.stride())
        assert region.numel() == num_tokens * token_bytes, (region.shape, num_tokens)
    address = region if isinstance(region, int) else region.data_ptr()
    assert can_copy(planes), [plane.stride() for plane in planes]
    if not num_tokens:
        return
    before = 0
    for plane in planes:
        size = plane.element_size()
        row, stride, layer_stride = (
            size * n for n in (math.prod(plane.shape[2:]), plane.stride(1), plane.stride(0) if len(plane) > 1 else 0)
        )
        offsets = (row, stride, layer_stride, before, token_bytes, address, plane.data_ptr())
        word = math.gcd(8, *offsets)
        block = min(triton.next_power_of_2(row // word), 256)
        tokens = max(1, min(_TILE_BYTES // (block * word), 64))
        _copy_rows_kernel[(triton.cdiv(num_tokens, tokens), len(plane))](
            as_words(plane, word), indexes_N, region if isinstance(region, int) else as_words(region, word),
            num_tokens, layer_stride // word,
            ROW_STRIDE=stride // word, ROW=row // word, TOKEN=token_bytes // word, BEFORE=before // word,
            CHUNK=CHUNK_TOKENS, TOKENS=tokens, BLOCK=block, IS_GATHER=is_gather, IS_ADDRESS=isinstance(region, int),
            ALIGNED=math.gcd(16, address), num_warps=4,
        )  # fmt: skip
        before += row * len(plane)


def as_words(tensor: torch.Tensor, word: int) -> torch.Tensor:
    """The same memory, of words of so many bytes; only its address is used."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[:1, :1].reshape(-1)
    return flat.view(torch.uint8)[: flat.numel() * flat.element_size() // word * word].view(_WORDS[word])
