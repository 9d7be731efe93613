"""Rows with their picks, packed so that one collective carries them to other ranks, and sums that came back.

A packed row, int32 words:

    features of the row | slots [A] | weights [A], float32 | padding up to 32 bytes

Rows that came are read where they lie, as a strided view: padding keeps them aligned. Legend: T rows of this rank, R
rows that came, A picks of a row, D hidden size, N ranks, C rows of each rank with padding, W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixmesh.kernels.moe.route import Routes

_WORD_BYTES = 4
# So that vectors of rows that lie at such strides are loaded whole, also of 2 bytes a number.
_ALIGNED_WORDS = 8
_BLOCK = 1024


def packed_words(hidden: int, itemsize: int, num_picks: int) -> int:
    """Words of a packed row."""
    num_bytes = hidden * itemsize
    assert num_bytes % _WORD_BYTES == 0, (hidden, itemsize)
    return -(-(num_bytes // _WORD_BYTES + 2 * num_picks) // _ALIGNED_WORDS) * _ALIGNED_WORDS


@triton.jit(do_not_specialize=["num_rows"])
def _pack_kernel(
    x_ptr, slots_ptr, weights_ptr, out_ptr, num_rows, x_stride, FEATURES: tl.constexpr, A: tl.constexpr,
    W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    is_row = row < num_rows
    words = tl.arange(0, BLOCK)
    for start in range(0, FEATURES, BLOCK):
        mask = start + words < FEATURES
        features = tl.load(x_ptr + row * x_stride + start + words, mask=mask & is_row, other=0)
        tl.store(out_ptr + row * W + start + words, features, mask=mask)
    picks = tl.arange(0, BLOCK_A)
    mask = picks < A
    # Rows of padding pick nobody.
    slots = tl.load(slots_ptr + row * A + picks, mask=mask & is_row, other=-1)
    weights = tl.load(weights_ptr + row * A + picks, mask=mask & is_row, other=0)
    tl.store(out_ptr + row * W + FEATURES + picks, slots, mask=mask)
    tl.store(out_ptr + row * W + FEATURES + A + picks, weights, mask=mask)


def pack_rows(x_TD: torch.Tensor, routes: Routes, num_rows: int) -> torch.Tensor:
    """int32 [num_rows, W]; rows beyond those of x pick nobody, with slot -1, and hold anything."""
    assert x_TD.stride(1) == 1 and len(x_TD) <= num_rows, (x_TD.stride(), num_rows)
    num_picks, words = routes.expert_ids_TA.shape[1], _words_of(x_TD, routes)
    packed = torch.empty(num_rows, words, dtype=torch.int32, device=x_TD.device)
    x_TX = _as_words(x_TD)
    if num_rows:
        _pack_kernel[(num_rows,)](
            x_TX, routes.expert_ids_TA, _bits(routes.weights_TA), packed, len(x_TD), x_TX.stride(0),
            FEATURES=x_TX.shape[1], A=num_picks, W=words, BLOCK_A=triton.next_power_of_2(num_picks),
            BLOCK=min(_BLOCK, triton.next_power_of_2(x_TX.shape[1])), num_warps=4,
        )  # fmt: skip
    return packed


def pack_rows_reference(x_TD: torch.Tensor, routes: Routes, num_rows: int) -> torch.Tensor:
    """The same as `pack_rows`, in torch."""
    num_picks, x_TX = routes.expert_ids_TA.shape[1], _as_words(x_TD)
    packed = torch.zeros(num_rows, _words_of(x_TD, routes), dtype=torch.int32, device=x_TD.device)
    features, count = x_TX.shape[1], len(x_TD)
    packed[:, features : features + num_picks] = -1
    packed[:count, :features] = x_TX
    packed[:count, features : features + num_picks] = routes.expert_ids_TA
    packed[:count, features + num_picks : features + 2 * num_picks] = _bits(routes.weights_TA)
    return packed


def packed_rows(packed_RW: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """[R, D]: the rows, a view."""
    return packed_RW.view(dtype)[:, :hidden]


@triton.jit(do_not_specialize=["num_pairs", "first_slot", "num_held"])
def _own_routes_kernel(
    slots_ptr, given_ptr, ids_ptr, weights_ptr, num_pairs, first_slot, num_held, SLOTS_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, A: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    at = (pairs // A).to(tl.int64) * W + pairs % A
    slots = tl.load(slots_ptr + at + SLOTS_AT, mask=mask, other=-1) - first_slot
    weights = tl.load(given_ptr + at + WEIGHTS_AT, mask=mask, other=0)
    is_own = (slots >= 0) & (slots < num_held)
    tl.store(ids_ptr + pairs, tl.where(is_own, slots, num_held), mask=mask)
    tl.store(weights_ptr + pairs, tl.where(is_own, weights, 0), mask=mask)


def own_routes(packed_RW: torch.Tensor, num_features: int, num_picks: int, rank: int, num_held: int) -> Routes:
    """Picks of packed rows as a rank sees them that has the slots [rank x num_held, (rank + 1) x num_held): counted
    from its first one, and num_held with weight 0 where they are another's. num_features: words ahead of the picks."""
    num_rows, words = packed_RW.shape
    own = _empty_routes(num_rows, num_picks, packed_RW.device)
    num_pairs = num_rows * num_picks
    if num_pairs:
        _own_routes_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
            packed_RW, packed_RW, own.expert_ids_TA, _bits(own.weights_TA), num_pairs, rank * num_held, num_held,
            SLOTS_AT=num_features, WEIGHTS_AT=num_features + num_picks, A=num_picks, W=words, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return own


def own_routes_reference(
    packed_RW: torch.Tensor, num_features: int, num_picks: int, rank: int, num_held: int
) -> Routes:
    """The same as `own_routes`, in torch."""
    slots_RA = packed_RW[:, num_features : num_features + num_picks] - rank * num_held
    weights_RA = packed_RW[:, num_features + num_picks : num_features + 2 * num_picks].contiguous()
    is_own_RA = (slots_RA >= 0) & (slots_RA < num_held)
    own_RA = torch.where(is_own_RA, weights_RA.view(torch.float32), 0.0)
    return Routes(torch.where(is_own_RA, slots_RA, num_held).int(), own_RA)


def own_picks(routes: Routes, rank: int, num_held: int) -> Routes:
    """As `own_routes`, of picks that are not packed; the given ones name slots of all ranks."""
    slots_TA, weights_TA = routes
    assert slots_TA.dtype == torch.int32 and slots_TA.is_contiguous() and weights_TA.is_contiguous(), slots_TA.dtype
    (num_rows, num_picks), num_pairs = slots_TA.shape, slots_TA.numel()
    own = _empty_routes(num_rows, num_picks, slots_TA.device)
    if num_pairs:
        _own_routes_kernel[(triton.cdiv(num_pairs, _BLOCK),)](
            slots_TA, _bits(weights_TA), own.expert_ids_TA, _bits(own.weights_TA), num_pairs, rank * num_held, num_held,
            SLOTS_AT=0, WEIGHTS_AT=0, A=num_picks, W=num_picks, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return own


def own_picks_reference(routes: Routes, rank: int, num_held: int) -> Routes:
    """The same as `own_picks`, in torch."""
    slots_TA = routes.expert_ids_TA - rank * num_held
    is_own_TA = (slots_TA >= 0) & (slots_TA < num_held)
    own_TA = torch.where(is_own_TA, routes.weights_TA, 0.0)
    return Routes(torch.where(is_own_TA, slots_TA, num_held).int(), own_TA)


def _empty_routes(num_rows: int, num_picks: int, device: torch.device) -> Routes:
    """Not filled."""
    return Routes(
        torch.empty(num_rows, num_picks, dtype=torch.int32, device=device),
        torch.empty(num_rows, num_picks, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["room"])
def _add_parts_kernel(
    parts_ptr, residual_ptr, room, residual_stride, N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D
    at = residual_ptr + row * residual_stride + columns
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for rank in tl.static_range(N):
        total += tl.load(parts_ptr + (rank * room + row) * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(residual_ptr.dtype.element_ty), mask=mask)


def add_parts(parts_NCD: torch.Tensor, residual_TD: torch.Tensor) -> None:
    """Adds the first T rows of each rank's part to the residual in place, in the order of the ranks, in float32."""
    num_ranks, room, hidden = parts_NCD.shape
    assert parts_NCD.is_contiguous() and residual_TD.stride(1) == 1 and len(residual_TD) <= room, residual_TD.shape
    if len(residual_TD):
        block = min(_BLOCK, triton.next_power_of_2(hidden))
        _add_parts_kernel[(len(residual_TD), triton.cdiv(hidden, block))](
            parts_NCD, residual_TD, room, residual_TD.stride(0), N=num_ranks, D=hidden, BLOCK=block, num_warps=4
        )


def add_parts_reference(parts_NCD: torch.Tensor, residual_TD: torch.Tensor) -> None:
    """The same as `add_parts`, in torch."""
    sum_TD = residual_TD.float()
    for part_CD in parts_NCD:
        sum_TD += part_CD[: len(sum_TD)]
    residual_TD.copy_(sum_TD)


def _words_of(x_TD: torch.Tensor, routes: Routes) -> int:
    ids_TA, weights_TA = routes
    assert ids_TA.dtype == torch.int32 and ids_TA.is_contiguous(), ids_TA.dtype
    assert weights_TA.dtype == torch.float32 and weights_TA.is_contiguous(), weights_TA.dtype
    return packed_words(x_TD.shape[1], x_TD.element_size(), ids_TA.shape[1])


def _as_words(x_TD: torch.Tensor) -> torch.Tensor:
    """int32, of rows whose features are contiguous and lie at whole words."""
    return (x_TD if x_TD.is_contiguous() else x_TD.contiguous()).view(torch.int32)


def _bits(weights: torch.Tensor) -> torch.Tensor:
    return weights.view(torch.int32)
