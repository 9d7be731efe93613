"""Products of few rows for Hopper: the kernels' own sources, with their primitives emulated, against torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from support.product90_emulator import EmulatedProduct90, is_there

from radixmesh.kernels.product90 import gate_up_silu_reference, linear_reference
from radixmesh.kernels.product90_candidates import candidates
from radixmesh.kernels.product90_variants import ProductConfig, Variant, variant_of

pytestmark = pytest.mark.skipif(not is_there(), reason="the emulation is built with g++")

_BF16, _F16 = torch.bfloat16, torch.float16
# A variant takes two seconds to build: the daily suite has one of each kind.
_FULL = pytest.mark.full


def _random(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _squares_by_tiles(found_TN: torch.Tensor, tile: int) -> torch.Tensor:
    """Sums over each tile of columns, [tiles, T]."""
    padded = torch.nn.functional.pad(found_TN.float(), (0, -found_TN.shape[1] % tile))
    return padded.square().unflatten(1, (-1, tile)).sum(dim=2).t()


# Ragged rows, features out within a tile and k blocks; more blocks than stages; clusters with uneven parts.
@pytest.mark.parametrize(
    ("tile", "stages", "split", "shared", "num_rows", "num_out", "num_in", "dtype", "is_added"),
    [
        (64, 3, 1, 1, 9, 72, 200, _BF16, False),
        pytest.param(64, 2, 4, 1, 3, 136, 520, _F16, True, marks=_FULL),
        pytest.param(128, 4, 1, 1, 64, 128, 384, _BF16, True, marks=_FULL),
        (128, 4, 3, 1, 50, 200, 712, _BF16, True),
        (256, 3, 2, 1, 97, 264, 264, _F16, False),
        (64, 3, 1, 4, 40, 200, 520, _BF16, True),
        pytest.param(128, 2, 2, 2, 61, 392, 712, _BF16, True, marks=_FULL),
        pytest.param(128, 3, 8, 1, 8, 136, 520, _BF16, True, marks=_FULL),
    ],
)
def test_products_are_torchs(
    tmp_path: Path,
    tile: int,
    stages: int,
    split: int,
    shared: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    is_added: bool,
) -> None:
    config = ProductConfig(tile=tile, split=split, stages=stages, shared=shared)
    variant = variant_of(config, num_rows, False, dtype)
    kernel = EmulatedProduct90(variant, tmp_path)
    assert kernel.shared_bytes == variant.shared_bytes
    x_TK, w_NK = _random(num_rows, num_in, dtype=dtype), _random(num_out, num_in, dtype=dtype)
    residual_TN = _random(num_rows, num_out, dtype=dtype) if is_added else None
    found = [kernel.run(x_TK, w_NK, residual_TN=residual_TN, seed=seed) for seed in range(3)]
    assert _error(found[0], linear_reference(x_TK, w_NK, residual_TN)) < 1e-2
    # The order of sums does not depend on who comes first.
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(
    ("tile", "split", "shared", "num_rows", "num_mlp", "num_in", "eps", "dtype"),
    [
        (128, 1, 1, 64, 136, 392, 1e-5, _BF16),
        pytest.param(64, 4, 1, 5, 40, 1000, 1e-6, _F16, marks=_FULL),
        (128, 2, 1, 30, 64, 256, None, _BF16),
        pytest.param(128, 2, 2, 30, 200, 456, 1e-5, _BF16, marks=_FULL),
        (64, 2, 4, 30, 200, 456, 1e-5, _BF16),
        pytest.param(256, 2, 1, 20, 136, 328, 1e-5, _F16, marks=_FULL),
        pytest.param(128, 2, 2, 230, 128, 264, 1e-5, _BF16, marks=_FULL),
    ],
)
def test_gate_and_up_are_torchs(
    tmp_path: Path,
    tile: int,
    split: int,
    shared: int,
    num_rows: int,
    num_mlp: int,
    num_in: int,
    eps: float | None,
    dtype: torch.dtype,
) -> None:
    variant = variant_of(ProductConfig(tile=tile, split=split, stages=3, shared=shared), num_rows, True, dtype)
    kernel = EmulatedProduct90(variant, tmp_path)
    x_TK, w_2FK = _random(num_rows, num_in, dtype=dtype), _random(2 * num_mlp, num_in, dtype=dtype) * num_in**-0.5
    found = kernel.run(x_TK, w_2FK, eps=-1.0 if eps is None else eps)
    assert _error(found, gate_up_silu_reference(x_TK, w_2FK, eps)) < 1e-2


# Rows in tiles of their own; ragged in all ways.
@pytest.mark.parametrize(
    ("tile", "row_tile", "stages", "shared", "num_rows", "num_out", "num_in", "dtype", "is_added"),
    [
        pytest.param(80, 64, 3, 1, 70, 168, 328, _BF16, True, marks=_FULL),
        (96, 64, 4, 2, 130, 104, 712, _F16, False),
        (48, 128, 2, 1, 136, 88, 520, _BF16, True),
        pytest.param(64, 64, 3, 4, 250, 72, 456, _BF16, True, marks=_FULL),
    ],
)
def test_products_in_tiles_of_rows_are_torchs(
    tmp_path: Path,
    tile: int,
    row_tile: int,
    stages: int,
    shared: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    is_added: bool,
) -> None:
    config = ProductConfig(tile=tile, split=1, stages=stages, shared=shared, row_tile=row_tile)
    variant = variant_of(config, num_rows, False, dtype)
    kernel = EmulatedProduct90(variant, tmp_path)
    assert kernel.shared_bytes == variant.shared_bytes
    x_TK, w_NK = _random(num_rows, num_in, dtype=dtype), _random(num_out, num_in, dtype=dtype)
    residual_TN = _random(num_rows, num_out, dtype=dtype) if is_added else None
    found = [kernel.run(x_TK, w_NK, residual_TN=residual_TN, seed=seed) for seed in range(2)]
    assert _error(found[0], linear_reference(x_TK, w_NK, residual_TN)) < 1e-2
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ProductConfig(tile=64, split=1, stages=3), marks=_FULL),
        ProductConfig(tile=128, split=3, stages=2),
        pytest.param(ProductConfig(tile=64, split=2, stages=3, shared=4), marks=_FULL),
        ProductConfig(tile=96, split=1, stages=3, shared=2, row_tile=64),
    ],
    ids=str,
)
def test_squares_of_results_are_left_by_tiles(tmp_path: Path, config: ProductConfig) -> None:
    """Of the numbers as they are stored; rows and columns that are not there have none."""
    num_rows, num_out, num_in = 70, 200, 456
    variant = variant_of(config, num_rows, False, _BF16)
    num_tiles = variant.num_tiles(num_out)
    assert num_tiles == -(-num_out // config.tile)
    squares = torch.full((num_tiles + 1, num_rows), -1.0)
    x_TK, w_NK, before_TN = _random(num_rows, num_in), _random(num_out, num_in), _random(num_rows, num_out)
    found = EmulatedProduct90(variant, tmp_path).run(x_TK, w_NK, residual_TN=before_TN, squares_out=squares)
    torch.testing.assert_close(squares[:-1], _squares_by_tiles(found, config.tile), rtol=1e-5, atol=0.0)
    assert bool((squares[-1] == -1.0).all())


@pytest.mark.parametrize(
    ("num_rows", "config"),
    [
        pytest.param(9, ProductConfig(tile=128, split=1, stages=3), marks=_FULL),
        pytest.param(9, ProductConfig(tile=64, split=2, stages=3, shared=2), marks=_FULL),
        pytest.param(130, ProductConfig(tile=128, split=1, stages=3), marks=_FULL),
        (130, ProductConfig(tile=64, split=2, stages=3, shared=2)),
    ],
    ids=str,
)
def test_squares_that_were_left_make_the_norm(tmp_path: Path, num_rows: int, config: ProductConfig) -> None:
    num_mlp, num_in = 72, 328
    kernel = EmulatedProduct90(variant_of(config, num_rows, True, _BF16), tmp_path)
    x_TK, w_2FK = _random(num_rows, num_in), _random(2 * num_mlp, num_in) * num_in**-0.5
    # Not x's: it is these that count.
    squares = torch.rand(5, num_rows) * num_in
    found = kernel.run(x_TK, w_2FK, eps=1e-5, squares=squares)
    factor_T1 = (squares.sum(dim=0) / num_in + 1e-5).rsqrt()[:, None]
    gate_TF, up_TF = ((x_TK.float() @ w_2FK.float().t()) * factor_T1).chunk(2, dim=1)
    assert _error(found, torch.nn.functional.silu(gate_TF) * up_TF) < 1e-2


@dataclass(frozen=True)
class _Case:
    """What a mistake is looked for in. eps: of a gated product's norm; what is not gated leaves its squares."""

    tile: int = 128
    split: int = 2
    stages: int = 2
    shared: int = 1
    num_rows: int = 16
    num_out: int = 128
    num_in: int = 640
    eps: float | None = None
    row_tile: int | None = None

    @property
    def variant(self) -> Variant:
        config = ProductConfig(
            tile=self.tile, split=self.split, stages=self.stages, shared=self.shared, row_tile=self.row_tile
        )
        return variant_of(config, self.num_rows, self.eps is not None, _BF16)

    def is_right(self, folder: Path, source: str, num_seeds: int) -> bool:
        kernel = EmulatedProduct90(self.variant, folder, source)
        x_TK, w_NK = _random(self.num_rows, self.num_in), _random(self.num_out, self.num_in) * self.num_in**-0.5
        # Rows of other sizes, which a norm tells from each other.
        x_TK *= 1 + torch.arange(self.num_rows)[:, None]
        try:
            return all(self._is_right(kernel, x_TK, w_NK, seed) for seed in range(num_seeds))
        except RuntimeError:
            return False

    def _is_right(self, kernel: EmulatedProduct90, x_TK: torch.Tensor, w_NK: torch.Tensor, seed: int) -> bool:
        if self.eps is not None:
            found_TF = kernel.run(x_TK, w_NK, eps=self.eps, seed=seed)
            return _error(found_TF, gate_up_silu_reference(x_TK, w_NK, self.eps)) < 1e-2
        squares = torch.full((self.variant.num_tiles(self.num_out), self.num_rows), float("nan"))
        found_TN = kernel.run(x_TK, w_NK, squares_out=squares, seed=seed)
        return _error(found_TN, linear_reference(x_TK, w_NK)) < 1e-2 and torch.allclose(
            squares, _squares_by_tiles(found_TN, self.tile), rtol=1e-5, atol=0.0
        )


_CASES = {
    "alone": _Case(split=1),
    "blocks": _Case(split=1, tile=256, num_out=256),
    "parts": _Case(),
    "uneven": _Case(split=4, tile=64, num_rows=48, num_out=64),
    "neighbours": _Case(tile=64, shared=2),
    "gated": _Case(split=1, tile=128, num_out=256, eps=1e-5),
    "gated neighbours": _Case(split=1, tile=64, shared=2, eps=1e-5),
    "gated parts and neighbours": _Case(tile=64, shared=2, num_rows=32, eps=1e-5),
    "row tiles": _Case(split=1, tile=48, num_rows=70, num_out=48, row_tile=64),
    "row tiles of two groups": _Case(split=1, tile=48, num_rows=128, num_out=48, row_tile=128),
    "row tiles of neighbours": _Case(split=1, tile=48, shared=2, num_rows=100, num_out=48, row_tile=64),
}
_RELEASE = "if (index > 0 && index - 1 + kStages < share.num_blocks) release(share, before);"
_RELEASE_EARLY = "if (index + kStages < share.num_blocks) release(share, stage);"
_READ_PARITY = "before = kStages - 1;\n  u32 parity = 0;"
_EARLY_ROWS = (
    "  wait_for_kernels_ahead();\n",
    "  if (is_producer) produce(share, &w_map, &x_map, early), share.num_blocks = early = 0;\n"
    "  wait_for_kernels_ahead();\n",
)
_NEXT = "  let_next_kernel_begin();\n  wait_for_kernels_ahead();\n"
_RING_SYNC = "  // The ring is no longer read.\n  sync_consumers();\n"
_SUMS_SYNC = "  // Own sums and squares are there.\n  sync_consumers();\n"
_NUM_BANDS = "num_bands = first_band(share.part + 1) - first_band(share.part);"
_TOLD = "share.part * kShared + lane));"
_WIDE_RELEASE = _RELEASE.replace("share.num", "sizes.num").replace("share", "place")
_WIDE_RELEASE_EARLY = _RELEASE_EARLY.replace("share.num", "sizes.num").replace("share", "place")
_WIDE_EARLY = "  const int early = is_producer ? load_early(place, sizes, &w_map) : 0;\n"
_WIDE_ROWS = "  if (is_producer) produce(place, sizes, &w_map, &x_map, early);\n"
_WIDE_WAIT = "  wait_for_kernels_ahead();\n  let_next_kernel_begin();\n"
_LEAVE = "  leave_sums(place, sums);\n"
_SQUARES_SYNC = "    sync_consumers();\n    store_squares("
_SENT_WAIT = "  if (kParts > 1 || (kShared > 1 && is_squaring(sizes))) barrier_wait(sent_barrier(share), 0);\n"


@_FULL
@pytest.mark.parametrize("case", _CASES)
def test_cases_without_mistakes_are_right(tmp_path: Path, case: str) -> None:
    assert _CASES[case].is_right(tmp_path, _CASES[case].variant.kernel_source(), 10)


@_FULL
@pytest.mark.parametrize(
    ("what", "case", "right", "wrong"),
    [
        # The ring.
        ("a stage is released while it is read", "alone", _RELEASE, _RELEASE_EARLY),
        ("products are not waited for", "alone", "    wgmma_wait<1>();\n", ""),
        ("more products are left under way", "alone", "wgmma_wait<1>()", "wgmma_wait<2>()"),
        ("the last products are not waited for", "alone", "  wgmma_wait<0>();\n", ""),
        ("the last products but one are waited for", "alone", "wgmma_wait<0>()", "wgmma_wait<1>()"),
        ("a warp releases what its lanes read", "alone", "  sync_warp();\n", ""),
        ("a stage is not released", "alone", _RELEASE, _RELEASE.replace("index > 0", "index > 1")),
        ("a phase is not waited for", "alone", "barrier_wait(full_barrier(share, stage), parity);", ""),
        ("boxes overwrite what is read", "alone", "    barrier_wait(empty_barrier(share, stage), parity);\n", ""),
        ("too few bytes are expected at first", "alone", "index), kStageBytes);", "index), kWeightBytes);"),
        ("too few bytes are expected later", "alone", "stage), kStageBytes);", "stage), kWeightBytes);"),
        ("who asks takes a phase for the other", "alone", "u32 parity = 0;  // Of", "u32 parity = 1;  // Of"),
        ("who reads takes a phase for the other", "alone", _READ_PARITY, _READ_PARITY.replace("0;", "1;")),
        ("phases are taken for the same", "alone", "      parity ^= 1;\n", ""),
        ("barriers are not there yet", "alone", "  sync_threads();\n", ""),
        # The kernels ahead and behind.
        ("kernels ahead are not waited for", "alone", "  wait_for_kernels_ahead();\n", ""),
        ("rows come before they are written", "alone", _EARLY_ROWS[0], _EARLY_ROWS[1]),
        (
            "the next kernel begins too early",
            "alone",
            "  wait_for_kernels_ahead();\n  let_next_kernel_begin();\n",
            _NEXT,
        ),
        # Operands.
        ("the groups of 8 rows are elsewhere", "alone", "(1024 >> 4) << 32", "(512 >> 4) << 32"),
        ("rows are read elsewhere along K", "alone", "descriptor(rows + k * 32)", "descriptor(rows + k * 64)"),
        ("weights are read elsewhere along K", "alone", "* kTileK * 2 + k * 32)", "* kTileK * 2 + k * 64)"),
        ("the other warpgroup's weights", "alone", "group * kBlocks * 64 * kTileK * 2", "0"),
        ("the other block's weights", "blocks", "weights + block * 64", "weights + block * 128"),
        ("warpgroups share a block", "blocks", "group * kBlocks * 64", "group * 64"),
        # Sums, within a CTA and between those that share K.
        ("sums overwrite what the other group reads", "alone", _RING_SYNC, ""),
        ("other warps' sums are not there yet", "alone", _SUMS_SYNC, ""),
        ("others' sums overwrite what is read", "parts", "    barrier_wait(free_barrier(share), 0);\n", ""),
        ("the ring is called free too early", "parts", _RING_SYNC, ""),
        ("fewer than all call the ring free", "parts", "free_barrier(share), kParts);", "free_barrier(share), 1);"),
        ("others' sums are not there yet", "parts", _SENT_WAIT, ""),
        ("own sums are not there yet", "parts", _SUMS_SYNC, ""),
        ("too many numbers are expected", "parts", "(kParts - 1) * num_bands", "kParts * num_bands"),
        ("too few numbers are expected", "parts", "kBlocks * kConsumers * 16", "kBlocks * kConsumers * 8"),
        ("as many bands are expected of all", "uneven", _NUM_BANDS, "num_bands = kMaxBands;"),
        ("a band's owner is another", "uneven", "((band + 1) * kParts - 1) / kBands", "band * kParts / kBands"),
        ("parts send to the same place", "uneven", "(part < owner ? part : part - 1)", "0"),
        ("a band is sent elsewhere", "uneven", "(band - first_band(owner)) * kBandBytes", "0"),
        ("others' barriers are not there yet", "parts", "  if (kClusterCtas > 1) cluster_wait();\n", ""),
        # Neighbours that share rows.
        ("neighbours are not told", "neighbours", "} else if (lane < kShared) {", "} else if (lane < 1) {"),
        ("other parts' neighbours are told", "neighbours", _TOLD, _TOLD.replace("share.part * kShared + ", "")),
        ("a neighbour overwrites what is read", "neighbours", "kConsumers / 32 * kShared", "kConsumers / 32"),
        ("the neighbour's rows land elsewhere", "neighbours", "to + share.neighbour * kSharedRows * kTileK * 2", "to"),
        ("a neighbour asks for the other's rows", "neighbours", "column, share.neighbour * kSharedRows", "column, 0"),
        ("rows go to other parts' neighbours", "neighbours", " << share.part * kShared);", ");"),
        ("neighbours' barriers are not there yet", "neighbours", "  if (kClusterCtas > 1) cluster_wait();\n", ""),
        ("neighbours call the ring free", "neighbours", "part * kShared + share.neighbour));", "part * kShared));"),
        ("sums go to neighbours", "neighbours", "rank = owner * kShared + share.neighbour", "rank = owner * kShared"),
        # Gate, up and the norm.
        ("other features' gate and up", "gated", "share.tile * (kColumns / 8)", "share.tile * (kTileN / 8)"),
        ("gate is taken for up", "gated", "silu(sums[i][j].x * factors[i][0])", "silu(sums[i][j].z * factors[i][0])"),
        ("up is taken for gate", "gated", "(sums[i][j].w * factors[i][1])", "(sums[i][j].y * factors[i][1])"),
        ("a part of a row's squares", "gated", "mask < 8; mask *= 2", "mask < 4; mask *= 2"),
        ("other warps' squares are not there yet", "gated", _SUMS_SYNC, ""),
        ("squares are not waited for", "gated neighbours", "(kShared > 1 && is_squaring(sizes))", "false"),
        (
            "squares of the neighbour's rows",
            "gated neighbours",
            "rows + (share.neighbour * kSharedRows + row)",
            "rows + (row)",
        ),
        ("squares are sent to too few", "gated parts and neighbours", "rank >= kClusterCtas", "rank >= kShared"),
        (
            "squares land elsewhere",
            "gated parts and neighbours",
            "share.neighbour * kSharedRows + row) * 4",
            "row) * 4",
        ),
        ("parts' squares land in one place", "gated parts and neighbours", "(share.part * kRows + share", "(share"),
        (
            "too few squares are expected",
            "gated parts and neighbours",
            "(kClusterCtas - 1) * kSharedRows",
            "kSharedRows",
        ),
        ("squares and sums are not there yet", "gated parts and neighbours", _SENT_WAIT, ""),
        ("squares are read that boxes overwrite", "gated parts and neighbours", _RELEASE, _RELEASE_EARLY),
        # Squares that are left.
        ("other warps' pieces are not there yet", "alone", _SQUARES_SYNC, "    store_squares("),
        (
            "a part of the columns' squares",
            "uneven",
            "row_squares += squares(packed.x)",
            "row_squares = squares(packed.x)",
        ),
        ("other parts' squares lie elsewhere", "parts", "piece.row + c - first_band(share.part) * 8", "piece.row + c"),
        # Tiles of rows.
        ("a stage is released while it is read", "row tiles", _WIDE_RELEASE, _WIDE_RELEASE_EARLY),
        ("a stage is not released", "row tiles", _WIDE_RELEASE, _WIDE_RELEASE.replace("index > 0", "index > 1")),
        ("products are not waited for", "row tiles", "    wgmma_wait<1>();\n", ""),
        ("the last products are not waited for", "row tiles", "  wgmma_wait<0>();\n", ""),
        ("a warp releases what its lanes read", "row tiles", "  sync_warp();\n", ""),
        ("a phase is not waited for", "row tiles", "barrier_wait(full_barrier(place, stage), parity);", ""),
        ("boxes overwrite what is read", "row tiles", "    barrier_wait(empty_barrier(place, stage), parity);\n", ""),
        ("barriers are not there yet", "row tiles", "  sync_threads();\n", ""),
        ("kernels ahead are not waited for", "row tiles", "  wait_for_kernels_ahead();\n", ""),
        (
            "rows come before they are written",
            "row tiles",
            _WIDE_EARLY + _WIDE_WAIT + _WIDE_ROWS,
            _WIDE_EARLY + _WIDE_ROWS + _WIDE_WAIT,
        ),
        ("the other group's rows", "row tiles of two groups", " + group * 64 * kTileK * 2, weights", ", weights"),
        ("another tile's rows", "row tiles", "index * kTileK, place.row,", "index * kTileK, 0,"),
        ("sums overwrite what others read", "row tiles", _RING_SYNC, ""),
        ("the other group reads what sums overwrite", "row tiles of two groups", _RING_SYNC, ""),
        ("other warps' sums are not there yet", "row tiles", _LEAVE + "  sync_consumers();\n", _LEAVE),
        ("other warps' pieces are not there yet", "row tiles", _SQUARES_SYNC, "    store_squares("),
        (
            "neighbours are not told",
            "row tiles of neighbours",
            "} else if (lane < kShared) {",
            "} else if (lane < 1) {",
        ),
        ("a neighbour overwrites what is read", "row tiles of neighbours", "kWarps * kShared", "kWarps"),
        ("the neighbour's weights land elsewhere", "row tiles of neighbours", "stage) + first * kTileK * 2", "stage)"),
        ("a neighbour asks for the other's weights", "row tiles of neighbours", "place.column + first", "place.column"),
        ("neighbours' barriers are not there yet", "row tiles of neighbours", "    cluster_wait();\n", ""),
    ],
)
def test_the_emulation_finds_mistakes(tmp_path: Path, what: str, case: str, right: str, wrong: str) -> None:
    source = _CASES[case].variant.kernel_source()
    assert right in source, what
    assert not _CASES[case].is_right(tmp_path, source.replace(right, wrong), 20), what


@pytest.mark.parametrize("num_rows", [1, 8, 64, 100, 256])
@pytest.mark.parametrize(
    ("num_out", "num_in", "is_gated"),
    [(5120, 3072, False), (3072, 8192, False), (14336, 4096, True), (128256, 2560, False), (72, 136, False)],
)
def test_candidates_fit_a_multiprocessor(num_rows: int, num_out: int, num_in: int, is_gated: bool) -> None:
    configs = candidates(num_rows, num_out, num_in, is_gated=is_gated)
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        variant = variant_of(config, num_rows, is_gated, _BF16)
        assert variant.shared_bytes * variant.a_multiprocessor <= 227 << 10 and variant.stages >= 2
        assert config.split <= -(-num_in // 64) and config.cluster <= 8
        # The accumulators leave registers for the rest.
        assert variant.sums_a_thread + 40 <= 65536 // (variant.num_threads * variant.a_multiprocessor)
