"""Products of 2 to 256 rows with big weights: as fast as the weights can be read, with what surrounds them fused.

T rows, K features in, N features out, F mlp features.

The weight is the tall operand of the tensor core and x the flat one (w x^T), so that few rows waste little. Tiles of
both pass through shared memory several steps ahead of their use. Outputs too few for all multiprocessors are split
along K: each program leaves its sums in a workspace, and the one that arrives last adds all of them, always in the
same order, so that results do not depend on who it was.

The factor of an RMSNorm can be applied to the finished sums: w (x r) = r (w x), with r the row's factor. It is found
from the tiles of x as they pass, or faster from sums of squares that the product before left. The norm's own weight
then has to be in `w` already.

With programmatic dependent launch a program asks for its first weights, which no kernel writes, before the kernel
ahead has ended, and lets the kernel behind it begin as soon as it may itself read x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from radixmesh.kernels.hopper import has_gdc
from radixmesh.kernels.product_config import (
    MAX_ROWS,
    ProductConfig,
    ProductShape,
    ProductWorkspace,
    default_config,
    num_multiprocessors,
)


@triton.jit
def _prefetch(w_ptr, rows, first_k, last_k, K, ROWS: tl.constexpr, FEATURES: tl.constexpr, THREADS: tl.constexpr):
    """Has FEATURES of each row brought to the L2 cache, from first_k on and before last_k; each thread asks for some.

    The instruction takes one address at a time: a warp's 32 take half a microsecond, in the shadow of the kernel ahead.
    """
    PIECES: tl.constexpr = THREADS // ROWS if THREADS > ROWS else 1
    WIDTH: tl.constexpr = FEATURES // PIECES
    ITEM: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    end = tl.minimum(last_k, K)
    at = (
        tl.minimum(first_k + tl.arange(0, PIECES) * WIDTH, tl.maximum(end - WIDTH, first_k))[None, :]
        + rows[:, None] * 0
    )
    num_bytes = tl.minimum(WIDTH, end - at) * ITEM
    addresses = w_ptr.to(tl.int64) + (rows.to(tl.int64)[:, None] * K + at) * ITEM
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [addresses, num_bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _tile(
    source, x_stride, first, last, first_k, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
    USE_TMA: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_K] of a matrix, from row `first`; rows from `last` on are anything, features from K on are 0."""
    if USE_TMA:
        tile = source.load([first, first_k])
    else:
        rows = tl.minimum(first + tl.arange(0, ROWS), last - 1).to(tl.int64)
        features = first_k + tl.arange(0, BLOCK_K)
        at = source + rows[:, None] * x_stride + features[None, :]
        if IS_EVEN:
            tile = tl.load(at, eviction_policy=EVICT)
        else:
            tile = tl.load(at, mask=(features < K)[None, :], other=0.0, eviction_policy=EVICT)
    return tile


@triton.jit
def _finish(
    acc, up, squares, bias_ptr, residual_ptr, out_ptr, squares_out_ptr, first_row, first_out, T, N, K, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, IS_GATED: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WRITES_SQUARES: tl.constexpr,
):  # fmt: skip
    """Stores a tile of finished sums [BLOCK_N, ROWS], with all that is fused."""
    n = first_out + tl.arange(0, BLOCK_N)
    t = first_row + tl.arange(0, ROWS)
    mask = (n < N)[:, None] & (t < T)[None, :]
    at = t.to(tl.int64)[None, :] * N + n[:, None]
    if HAS_NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        acc *= scale
    if IS_GATED:
        if HAS_NORM:
            up *= scale
        acc = acc / (1.0 + tl.exp(-acc)) * up
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        acc = acc.to(DTYPE).to(tl.float32) + tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    result = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, result, mask=mask)
    if WRITES_SQUARES:
        kept = tl.where(mask, result.to(tl.float32), 0.0)
        tl.store(squares_out_ptr + (first_out // BLOCK_N) * T + t, tl.sum(kept * kept, axis=0), mask=t < T)


@triton.jit
def _sum_parts(parts_ptr, first_part, num_parts, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE: tl.constexpr):
    """float32 [BLOCK_N, ROWS]: the sum of a tile's parts, in their order."""
    at = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    # .cg: other programs wrote them.
    total = tl.load(parts_ptr + first_part * STRIDE + at, cache_modifier=".cg")
    for part in range(1, num_parts):
        total += tl.load(parts_ptr + (first_part + part) * STRIDE + at, cache_modifier=".cg")
    return total


@triton.jit
def _sum_rows(ptr, num_parts, stride, first, last, ROWS: tl.constexpr):
    """float32 [ROWS]: the sum of num_parts vectors, 16 at a time; entries from `last` on are 0."""
    t = first + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for part in range(0, num_parts, 16):
        parts = part + tl.arange(0, 16)
        mask = (parts < num_parts)[:, None] & (t < last)[None, :]
        total += tl.sum(
            tl.load(ptr + parts[:, None] * stride + t[None, :], mask=mask, other=0.0, cache_modifier=".cg"), 0
        )
    return total


@triton.jit
def _seen(sums):
    """The same; nothing that computes them is under way any more."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["T", "num_splits", "row_tiles", "num_squares"])
def _product_kernel(
    x, w, w_ptr, bias_ptr, residual_ptr, out_ptr, squares_ptr, squares_out_ptr, parts_ptr, arrivals_ptr, x_stride,
    T, N, K, eps, num_splits, row_tiles, num_squares, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, IS_EVEN: tl.constexpr, IS_SPLIT: tl.constexpr,
    USE_TMA: tl.constexpr, PREFETCH: tl.constexpr, IS_GATED: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_SQUARES: tl.constexpr, WRITES_SQUARES: tl.constexpr,
    HAS_GDC: tl.constexpr, READ_ONCE: tl.constexpr,
):  # fmt: skip
    # Programs that share a tile of the weight are neighbours, then those that share a tile of the output.
    program = tl.program_id(0)
    row_tile = program % row_tiles
    split = (program // row_tiles) % num_splits
    out_tile = program // (row_tiles * num_splits)
    first_row, first_out = row_tile * ROWS, out_tile * BLOCK_N
    num_steps = tl.cdiv(K, BLOCK_K)
    first_step = split * num_steps // num_splits
    last_step = (split + 1) * num_steps // num_splits
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    EVICT: tl.constexpr = "evict_first" if READ_ONCE else ""
    if HAS_GDC:
        if PREFETCH > 0:
            if row_tile == 0:
                rows = tl.minimum(first_out + tl.arange(0, BLOCK_N), N - 1)
                FEATURES: tl.constexpr = PREFETCH * BLOCK_K
                first_k, last_k = first_step * BLOCK_K, last_step * BLOCK_K
                _prefetch(w_ptr, rows, first_k, last_k, K, BLOCK_N, FEATURES, tl.extra.cuda.num_threads())
                if IS_GATED:
                    _prefetch(w_ptr, N + rows, first_k, last_k, K, BLOCK_N, FEATURES, tl.extra.cuda.num_threads())
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    SUM_SQUARES: tl.constexpr = HAS_NORM and not HAS_SQUARES
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        k = step * BLOCK_K
        x_tile = _tile(x, x_stride, first_row, T, k, K, ROWS, BLOCK_K, IS_EVEN, USE_TMA, "evict_last")
        w_tile = _tile(w, K, first_out, N, k, K, BLOCK_N, BLOCK_K, IS_EVEN, USE_TMA, EVICT)
        acc = tl.dot(w_tile, x_tile.T, acc)
        if IS_GATED:
            up_tile = _tile(w, K, N + first_out, 2 * N, k, K, BLOCK_N, BLOCK_K, IS_EVEN, USE_TMA, EVICT)
            up = tl.dot(up_tile, x_tile.T, up)
        if SUM_SQUARES:
            x_f32 = x_tile.to(tl.float32)
            squares += tl.sum(x_f32 * x_f32, axis=1)
            if HAS_GDC:
                # Looking at the sums waits for the tensor core. The compiler counts one buffer fewer for a tile that
                # threads read too, and would have it overwritten while the tensor core may still read it.
                acc = _seen(acc)
                if IS_GATED:
                    up = _seen(up)

    if IS_SPLIT:
        # A part: the tile's sums, those of up, the rows' squares.
        WIDTH: tl.constexpr = BLOCK_N * ROWS
        STRIDE: tl.constexpr = WIDTH * (1 + IS_GATED) + ROWS
        out_index = out_tile * row_tiles + row_tile
        first_part = out_index * num_splits
        part_ptr = parts_ptr + (first_part + split) * STRIDE
        at = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(part_ptr + at, acc)
        if IS_GATED:
            tl.store(part_ptr + WIDTH + at, up)
        if SUM_SQUARES:
            tl.store(part_ptr + STRIDE - ROWS + tl.arange(0, ROWS), squares)
        # All threads' sums are written before the count says so; the count orders them for the last program.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + out_index, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.store(arrivals_ptr + out_index, 0)
            acc = _sum_parts(parts_ptr, first_part, num_splits, ROWS, BLOCK_N, STRIDE)
            if IS_GATED:
                up = _sum_parts(parts_ptr + WIDTH, first_part, num_splits, ROWS, BLOCK_N, STRIDE)
            if SUM_SQUARES:
                own_ptr = parts_ptr + first_part * STRIDE + STRIDE - ROWS
                squares = _sum_rows(own_ptr, num_splits, STRIDE, 0, ROWS, ROWS)
            elif HAS_NORM:
                squares = _sum_rows(squares_ptr, num_squares, T, first_row, T, ROWS)
            _finish(
                acc, up, squares, bias_ptr, residual_ptr, out_ptr, squares_out_ptr, first_row, first_out, T, N, K, eps,
                ROWS, BLOCK_N, DTYPE, IS_GATED, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, WRITES_SQUARES,
            )  # fmt: skip
    else:
        if HAS_SQUARES:
            squares = _sum_rows(squares_ptr, num_squares, T, first_row, T, ROWS)
        _finish(
            acc, up, squares, bias_ptr, residual_ptr, out_ptr, squares_out_ptr, first_row, first_out, T, N, K, eps,
            ROWS, BLOCK_N, DTYPE, IS_GATED, HAS_NORM, HAS_BIAS, HAS_RESIDUAL, WRITES_SQUARES,
        )  # fmt: skip


def product(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    workspace: ProductWorkspace,
    *,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    norm_eps: float | None = None,
    squares_PT: torch.Tensor | None = None,
    squares_out_PT: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """x @ w^T, [T, N], of 1 to MAX_ROWS rows; as given, times each row's RMSNorm factor, plus bias, plus residual.

    x and w of one dtype, bfloat16 or float16, features contiguous (rows of x may be strided) and K a multiple of 8;
    sums are float32. norm_eps: product rows are scaled by 1 / sqrt(mean(x^2) + eps) of the row of x. The product, with
    its bias, is rounded to the dtype before the residual (contiguous [T, N]) is added. `out` may be float32, and may
    be the residual itself. `use_pdl` as in `rms_norm`; the weight and the bias are nothing that a kernel writes.
    workspace: of the stream that this is launched on. config: overrides the default.

    squares_PT, float32, its sum over P each row's sum of squares, spares finding them from x; `squares_out_PT`
    (P = `num_square_parts` of the product) is where a product leaves those of its result for the next.
    """
    num_out, num_in = w_NK.shape
    shape = ProductShape(num_rows=x_TK.shape[0], num_out=num_out, num_in=num_in, is_gated=False)
    for other in (bias_N, residual_TN):
        assert other is None or (other.dtype == x_TK.dtype and other.is_contiguous()), other
    assert bias_N is None or bias_N.shape == (num_out,), bias_N.shape
    assert residual_TN is None or residual_TN.shape == (x_TK.shape[0], num_out), residual_TN.shape
    squares = (squares_PT, squares_out_PT)
    return _launch(x_TK, w_NK, workspace, shape, bias_N, residual_TN, norm_eps, squares, out, use_pdl, config)


def product_silu(
    x_TK: torch.Tensor,
    w_2FK: torch.Tensor,
    workspace: ProductWorkspace,
    *,
    norm_eps: float | None = None,
    squares_PT: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """silu(x @ gate^T) x (x @ up^T), [T, F]; w holds the F rows of gate, then those of up. Otherwise as `product`.

    Rounded to the dtype at the end alone.
    """
    assert w_2FK.shape[0] % 2 == 0, w_2FK.shape
    num_out, num_in = w_2FK.shape[0] // 2, w_2FK.shape[1]
    shape = ProductShape(num_rows=x_TK.shape[0], num_out=num_out, num_in=num_in, is_gated=True)
    squares = (squares_PT, None)
    return _launch(x_TK, w_2FK, workspace, shape, None, None, norm_eps, squares, out, use_pdl, config)


def num_square_parts(shape: ProductShape, device: torch.device, config: ProductConfig | None = None) -> int:
    """P of `squares_out_PT` of a product of that shape."""
    config = config or default_config(shape, num_multiprocessors(device))
    return triton.cdiv(shape.num_out, config.block_n)


def product_reference(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    residual_TN: torch.Tensor | None = None,
    norm_eps: float | None = None,
) -> torch.Tensor:
    """What `product` computes, in torch."""
    sums_TN = _float_product(x_TK, w_NK, norm_eps)
    if bias_N is not None:
        sums_TN = sums_TN + bias_N.float()
    product_TN = sums_TN.to(x_TK.dtype)
    return product_TN if residual_TN is None else product_TN + residual_TN


def product_silu_reference(x_TK: torch.Tensor, w_2FK: torch.Tensor, norm_eps: float | None = None) -> torch.Tensor:
    """What `product_silu` computes, in torch."""
    gate_TF, up_TF = _float_product(x_TK, w_2FK, norm_eps).chunk(2, dim=-1)
    return (functional.silu(gate_TF) * up_TF).to(x_TK.dtype)


def _float_product(x_TK: torch.Tensor, w_NK: torch.Tensor, norm_eps: float | None) -> torch.Tensor:
    x_f32 = x_TK.float()
    sums_TN = functional.linear(x_f32, w_NK.float())
    return sums_TN if norm_eps is None else sums_TN * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + norm_eps)


def _launch(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    workspace: ProductWorkspace,
    shape: ProductShape,
    bias_N: torch.Tensor | None,
    residual_TN: torch.Tensor | None,
    norm_eps: float | None,
    squares: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor | None,
    use_pdl: bool,
    config: ProductConfig | None,
) -> torch.Tensor:
    _check(x_TK, w_NK, shape)
    out = x_TK.new_empty(shape.num_rows, shape.num_out) if out is None else out
    assert out.shape == (shape.num_rows, shape.num_out) and out.is_contiguous(), (out.shape, out.stride())
    config = config or default_config(shape, num_multiprocessors(x_TK.device))
    row_tiles, out_tiles = triton.cdiv(shape.num_rows, config.rows), triton.cdiv(shape.num_out, config.block_n)
    num_splits = workspace.clamped_splits(config, shape)
    squares_PT, squares_out_PT = squares
    assert squares_PT is None or (squares_PT.shape[1] == shape.num_rows and squares_PT.is_contiguous()), (
        squares_PT.shape
    )
    if squares_out_PT is not None:
        assert squares_out_PT.shape == (out_tiles, shape.num_rows) and squares_out_PT.is_contiguous()
    x: torch.Tensor | TensorDescriptor = x_TK
    w: torch.Tensor | TensorDescriptor = w_NK
    if config.use_tma:
        x = TensorDescriptor.from_tensor(x_TK, [config.rows, config.block_k])
        w = TensorDescriptor.from_tensor(w_NK, [config.block_n, config.block_k])
    _product_kernel[(row_tiles * num_splits * out_tiles,)](
        x, w, w_NK, w_NK if bias_N is None else bias_N, w_NK if residual_TN is None else residual_TN, out,
        workspace.parts if squares_PT is None else squares_PT,
        workspace.parts if squares_out_PT is None else squares_out_PT, workspace.parts, workspace.arrivals,
        x_TK.stride(0), shape.num_rows, shape.num_out, shape.num_in, 0.0 if norm_eps is None else norm_eps,
        num_splits, row_tiles, 0 if squares_PT is None else squares_PT.shape[0], ROWS=config.rows,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, STAGES=config.num_stages,
        IS_EVEN=shape.num_in % config.block_k == 0, IS_SPLIT=num_splits > 1, USE_TMA=config.use_tma,
        PREFETCH=config.prefetch if use_pdl else 0, IS_GATED=shape.is_gated, HAS_NORM=norm_eps is not None,
        HAS_BIAS=bias_N is not None, HAS_RESIDUAL=residual_TN is not None,
        HAS_SQUARES=squares_PT is not None and norm_eps is not None, WRITES_SQUARES=squares_out_PT is not None,
        HAS_GDC=has_gdc(x_TK.device), READ_ONCE=row_tiles == 1, num_warps=config.num_warps,
        num_stages=config.num_stages, launch_pdl=use_pdl,
    )  # fmt: skip
    return out


def _check(x_TK: torch.Tensor, w_NK: torch.Tensor, shape: ProductShape) -> None:
    assert 1 <= shape.num_rows <= MAX_ROWS and x_TK.stride(1) == 1, (x_TK.shape, x_TK.stride())
    assert w_NK.shape[1] == x_TK.shape[1] and w_NK.is_contiguous(), (w_NK.shape, w_NK.stride(), x_TK.shape)
    assert w_NK.dtype == x_TK.dtype and x_TK.dtype in (torch.bfloat16, torch.float16), (w_NK.dtype, x_TK.dtype)
    # 16 bytes at a time.
    assert shape.num_in % 8 == 0 and x_TK.stride(0) % 8 == 0, (shape.num_in, x_TK.stride())
    assert x_TK.data_ptr() % 16 == 0 and w_NK.data_ptr() % 16 == 0
