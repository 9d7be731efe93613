"""GEMMs of FP8 rows with FP8 weights on the tensor cores. T rows, N features out, K features in.

Groups of 128 features in are summed apart, in float32, which tensor cores do not do by themselves; those that have
scales of their own are multiplied by them, whole rows have theirs applied in the end.
In the way of the block-scaled GEMMs of DeepSeek-V3 (2024), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixmesh.kernels.fp8.quantized import GROUP, QuantizedMatrix, QuantizedRows
from radixmesh.kernels.hopper import has_gdc

_SUPER_ROWS = 8  # Tiles of rows that share tiles of the weight while they are in the cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Rows and features out of a program."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# The number of rows is not compiled in: a kernel that was compiled for some serves others.
@triton.jit(do_not_specialize=["T", "x_scales_stride"])
def _fp8_linear_kernel(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, out_ptr, T, N, x_scales_stride, K: tl.constexpr,
    GROUP_ROWS: tl.constexpr, IS_GROUPED: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, SUPER_ROWS: tl.constexpr, HAS_GDC: tl.constexpr,
):  # fmt: skip
    if HAS_GDC:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + GROUP - 1) // GROUP
    # Programs go down some tiles of rows before the next tile of the weight.
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    super_tile = tl.program_id(0) // (SUPER_ROWS * tiles_n)
    first_t = super_tile * SUPER_ROWS
    num_t = tl.minimum(tiles_t - first_t, SUPER_ROWS)
    within = tl.program_id(0) % (SUPER_ROWS * tiles_n)
    tile_t = first_t + within % num_t
    tile_n = within // num_t
    rows = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Those beyond the end read the last one again and are not stored.
    from_rows = tl.minimum(rows, T - 1).to(tl.int64)
    from_columns = tl.minimum(columns, N - 1).to(tl.int64)
    features = tl.arange(0, GROUP)
    x_at = x_ptr + from_rows[:, None] * K + features[None, :]
    w_at = w_ptr + from_columns[None, :] * K + features[:, None]
    x_scales_at = x_scales_ptr + from_rows
    if IS_GROUPED:
        # A tile that lies within a block has one scale at a time.
        if GROUP_ROWS % BLOCK_N == 0:
            w_scales_at = w_scales_ptr + (tile_n * BLOCK_N) // GROUP_ROWS * CHUNKS
        else:
            w_scales_at = w_scales_ptr + from_columns // GROUP_ROWS * CHUNKS
    if HAS_GDC:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for chunk in range(CHUNKS):
        if K % GROUP == 0:
            x = tl.load(x_at + chunk * GROUP)
            w = tl.load(w_at + chunk * GROUP)
        else:
            is_in = chunk * GROUP + features < K
            x = tl.load(x_at + chunk * GROUP, mask=is_in[None, :], other=0.0)
            w = tl.load(w_at + chunk * GROUP, mask=is_in[:, None], other=0.0)
        if IS_GROUPED:
            x_scales = tl.load(x_scales_at + chunk * x_scales_stride)
            w_scales = tl.load(w_scales_at + chunk)
            if GROUP_ROWS % BLOCK_N == 0:
                sums += tl.dot(x, w) * (x_scales * w_scales)[:, None]
            else:
                sums += tl.dot(x, w) * (x_scales[:, None] * w_scales[None, :])
        else:
            sums = tl.dot(x, w, sums, max_num_imprecise_acc=GROUP)
    if not IS_GROUPED:
        x_scales = tl.load(x_scales_at)
        w_scales = tl.load(w_scales_ptr + from_columns // GROUP_ROWS)
        sums *= x_scales[:, None] * w_scales[None, :]
    mask = (rows < T)[:, None] & (columns < N)[None, :]
    out_at = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=mask)


def fp8_linear(
    x: QuantizedRows,
    w: QuantizedMatrix,
    dtype: torch.dtype,
    *,
    use_pdl: bool = False,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """x @ w^T, [T, N] in `dtype`, with sums in float32. Rows and matrix have the same groups along K.

    Which rows there are besides one changes none of its bits where `config` is the same. `use_pdl` as in `rms_norm`,
    and this kernel waits before it reads the rows.
    """
    num_rows, num_out, num_in = x.num_rows, w.shape[0], w.shape[1]
    assert x.data_PK.shape[1] == num_in and x.is_grouped == w.is_grouped, (w.shape, x.data_PK.shape)
    assert x.data_PK.is_contiguous() and x.scales_PG.t().is_contiguous(), x.scales_PG.stride()
    out = torch.empty(num_rows, num_out, dtype=dtype, device=x.data_PK.device)
    if num_rows:
        config = config or default_tile(num_rows, num_out)
        num_programs = triton.cdiv(num_rows, config.rows) * triton.cdiv(num_out, config.columns)
        _fp8_linear_kernel[(num_programs,)](
            x.data_PK, x.scales_PG, w.data_NK, w.scales, out, num_rows, num_out, x.scales_PG.stride(1), K=num_in,
            GROUP_ROWS=w.group_rows, IS_GROUPED=w.is_grouped, GROUP=GROUP, BLOCK_T=config.rows,
            BLOCK_N=config.columns, SUPER_ROWS=_SUPER_ROWS, HAS_GDC=has_gdc(out.device), num_warps=config.num_warps,
            num_stages=config.num_stages, launch_pdl=use_pdl,
        )  # fmt: skip
    return out


def fp8_linear_reference(x: QuantizedRows, w: QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Reference of `fp8_linear`, in torch."""
    return torch.nn.functional.linear(x.dequantized(), w.dequantized()).to(dtype)


def default_tile(num_rows: int, num_out: int) -> TileConfig:
    """Small tiles where there are few: an H200 has 132 multiprocessors to fill."""
    if num_rows <= 32:
        return TileConfig(
            rows=16 if num_rows <= 16 else 32, columns=32 if num_out < 8192 else 64, num_warps=4, num_stages=6
        )
    if num_rows <= 64:
        return TileConfig(rows=64, columns=32 if num_out < 8192 else 64, num_warps=4, num_stages=5)
    if num_rows <= 512 or triton.cdiv(num_rows, 128) * triton.cdiv(num_out, 128) < 128:
        return TileConfig(rows=64, columns=64 if num_out < 8192 else 128, num_warps=4, num_stages=4)
    return TileConfig(rows=128, columns=128, num_warps=8, num_stages=3)


def other_tiles(num_rows: int, num_out: int) -> tuple[TileConfig, ...]:
    """Tiles that may be faster than the default."""
    default = default_tile(num_rows, num_out)
    if num_rows <= 64:
        columns = 64 if default.columns == 32 else 32
        return (TileConfig(rows=default.rows, columns=columns, num_warps=4, num_stages=5),)
    if default.rows == 64:
        columns = 128 if default.columns == 64 else 64
        return (TileConfig(rows=64, columns=columns, num_warps=4, num_stages=4),)
    return (TileConfig(rows=64, columns=128, num_warps=4, num_stages=4),)
