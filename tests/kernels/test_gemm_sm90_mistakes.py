"""That the emulation of Hopper's GEMMs finds mistakes: each is made in the kernels' sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from support.gemm_sm90_emulator import EmulatedGemmSm90, is_there, random_numbers, square_sums_by_tile
from support.rounding import gated_tolerance, gemm_tolerance, is_within, sum_tolerance

from radixmesh.kernels.gemm_sm90.gemm import gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import GemmConfig, Variant, variant_of
from radixmesh.kernels.inverse_rms import inverse_rms_reference

pytestmark = pytest.mark.skipif(not is_there(), reason="the emulation is built with g++")


@dataclass(frozen=True)
class _Case:
    """A GEMM in which a mistake is looked for. eps: of a gated GEMM's norm; others leave partial sums of squares."""

    tile: int = 128
    split_k: int = 2
    stages: int = 2
    multicast: int = 1
    num_rows: int = 16
    num_out: int = 128
    num_in: int = 640
    eps: float | None = None
    row_tile: int | None = None

    @property
    def variant(self) -> Variant:
        config = GemmConfig(
            tile=self.tile, split_k=self.split_k, stages=self.stages, multicast=self.multicast, row_tile=self.row_tile
        )
        return variant_of(config, self.num_rows, self.eps is not None, torch.bfloat16)

    def is_right(self, folder: Path, source: str, num_seeds: int) -> bool:
        kernel = EmulatedGemmSm90(self.variant, folder, source)
        x_TK, w_NK = (
            random_numbers(self.num_rows, self.num_in),
            random_numbers(self.num_out, self.num_in) * self.num_in**-0.5,
        )
        # Rows of other sizes, which a norm tells from each other.
        x_TK *= 1 + torch.arange(self.num_rows)[:, None]
        try:
            return all(self._is_right(kernel, x_TK, w_NK, seed) for seed in range(num_seeds))
        except RuntimeError:
            return False

    def _is_right(self, kernel: EmulatedGemmSm90, x_TK: torch.Tensor, w_NK: torch.Tensor, seed: int) -> bool:
        if self.eps is not None:
            found_TF = kernel.run(x_TK, w_NK, eps=self.eps, seed=seed)
            expected_TF = gate_up_silu_reference(x_TK, w_NK, self.eps)
            tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, inverse_rms_reference(x_TK, self.eps))
            return is_within(found_TF, expected_TF, tolerance_TF)
        square_sums = torch.full((self.variant.num_tiles(self.num_out), self.num_rows), float("nan"))
        found_TN = kernel.run(x_TK, w_NK, square_sums_out=square_sums, seed=seed)
        expected_TN, rtol = linear_reference(x_TK, w_NK), 2 * sum_tolerance(self.tile, 1.0)
        return is_within(found_TN, expected_TN, gemm_tolerance(x_TK, w_NK, expected_TN)) and torch.allclose(
            square_sums, square_sums_by_tile(found_TN, self.tile), rtol=rtol, atol=0.0
        )


_CASES = {
    "alone": _Case(split_k=1),
    "blocks": _Case(split_k=1, tile=256, num_out=256),
    "parts": _Case(),
    "uneven": _Case(split_k=4, tile=64, num_rows=48, num_out=64),
    "neighbours": _Case(tile=64, multicast=2),
    "gated": _Case(split_k=1, tile=128, num_out=256, eps=1e-5),
    "gated neighbours": _Case(split_k=1, tile=64, multicast=2, eps=1e-5),
    "gated parts and neighbours": _Case(tile=64, multicast=2, num_rows=32, eps=1e-5),
    "row tiles": _Case(split_k=1, tile=48, num_rows=70, num_out=48, row_tile=64),
    "row tiles of two groups": _Case(split_k=1, tile=48, num_rows=128, num_out=48, row_tile=128),
    "row tiles of neighbours": _Case(split_k=1, tile=48, multicast=2, num_rows=100, num_out=48, row_tile=64),
}
_RELEASE = "if (index > 0 && index - 1 + kStages < share.num_blocks) release(share, before);"
_RELEASE_EARLY = "if (index + kStages < share.num_blocks) release(share, stage);"
_READ_PARITY = "before = kStages - 1;\n  u32 parity = 0;"
_EARLY_ROWS = (
    "  griddepcontrol_wait();\n",
    "  if (is_producer) produce(share, &w_map, &x_map, early), share.num_blocks = early = 0;\n"
    "  griddepcontrol_wait();\n",
)
_NEXT = "  griddepcontrol_launch_dependents();\n  griddepcontrol_wait();\n"
_RING_SYNC = "  // The ring is no longer read.\n  sync_consumers();\n"
_SUMS_SYNC = "  // Own sums and squares are there.\n  sync_consumers();\n"
_NUM_BANDS = "num_bands = first_band(share.part + 1) - first_band(share.part);"
_TOLD = "share.part * kMulticast + lane));"
_ROW_TILED_RELEASE = _RELEASE.replace("share.num", "sizes.num").replace("share", "cta")
_ROW_TILED_RELEASE_EARLY = _RELEASE_EARLY.replace("share.num", "sizes.num").replace("share", "cta")
_ROW_TILED_EARLY = "  const int early = is_producer ? load_early(cta, sizes, &w_map) : 0;\n"
_ROW_TILED_ROWS = "  if (is_producer) produce(cta, sizes, &w_map, &x_map, early);\n"
_ROW_TILED_WAIT = "  griddepcontrol_wait();\n  griddepcontrol_launch_dependents();\n"
_LEAVE = "  leave_sums(cta, sums);\n"
_SQUARE_SUMS_SYNC = "    sync_consumers();\n    store_square_sums("
_SENT_WAIT = "  if (kSplitK > 1 || (kMulticast > 1 && sums_squares(sizes))) barrier_wait(sent_barrier(share), 0);\n"


@pytest.mark.full
@pytest.mark.parametrize("case", _CASES)
def test_cases_without_mistakes_are_right(tmp_path: Path, case: str) -> None:
    assert _CASES[case].is_right(tmp_path, _CASES[case].variant.kernel_source(), 10)


# Name, case, the kernel's text, what stands in its place in the mutant.
_MISTAKES = [
    # The ring.
    ("a stage is released while it is read", "alone", _RELEASE, _RELEASE_EARLY),
    ("GEMMs are not waited for", "alone", "    wgmma_wait<1>();\n", ""),
    ("more GEMMs are left under way", "alone", "wgmma_wait<1>()", "wgmma_wait<2>()"),
    ("the last GEMMs are not waited for", "alone", "  wgmma_wait<0>();\n", ""),
    ("the last GEMMs but one are waited for", "alone", "wgmma_wait<0>()", "wgmma_wait<1>()"),
    ("a warp releases what its lanes read", "alone", "  sync_warp();\n", ""),
    ("a stage is not released", "alone", _RELEASE, _RELEASE.replace("index > 0", "index > 1")),
    ("a phase is not waited for", "alone", "barrier_wait(full_barrier(share, stage), parity);", ""),
    ("boxes overwrite what is read", "alone", "    barrier_wait(empty_barrier(share, stage), parity);\n", ""),
    ("too few bytes are expected at first", "alone", "index), kStageBytes);", "index), kWeightBytes);"),
    ("too few bytes are expected later", "alone", "stage), kStageBytes);", "stage), kWeightBytes);"),
    ("a producer takes a phase for the other", "alone", "u32 parity = 0;  // Of", "u32 parity = 1;  // Of"),
    ("a consumer takes a phase for the other", "alone", _READ_PARITY, _READ_PARITY.replace("0;", "1;")),
    ("phases are taken for the same", "alone", "      parity ^= 1;\n", ""),
    ("barriers are not there yet", "alone", "  sync_threads();\n", ""),
    # PDL: the previous and the next kernel.
    ("previous kernels are not waited for", "alone", "  griddepcontrol_wait();\n", ""),
    ("rows come before they are written", "alone", _EARLY_ROWS[0], _EARLY_ROWS[1]),
    (
        "the next kernel begins too early",
        "alone",
        "  griddepcontrol_wait();\n  griddepcontrol_launch_dependents();\n",
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
    ("fewer than all call the ring free", "parts", "free_barrier(share), kSplitK);", "free_barrier(share), 1);"),
    ("others' sums are not there yet", "parts", _SENT_WAIT, ""),
    ("own sums are not there yet", "parts", _SUMS_SYNC, ""),
    ("too many numbers are expected", "parts", "(kSplitK - 1) * num_bands", "kSplitK * num_bands"),
    ("too few numbers are expected", "parts", "kBlocks * kConsumers * 16", "kBlocks * kConsumers * 8"),
    ("as many bands are expected of all", "uneven", _NUM_BANDS, "num_bands = kMaxBands;"),
    ("a band's owner is another", "uneven", "((band + 1) * kSplitK - 1) / kBands", "band * kSplitK / kBands"),
    ("parts send to the same address", "uneven", "(part < owner ? part : part - 1)", "0"),
    ("a band is sent elsewhere", "uneven", "(band - first_band(owner)) * kBandBytes", "0"),
    ("others' barriers are not there yet", "parts", "  if (kClusterCtas > 1) cluster_wait();\n", ""),
    # Neighbours that share rows.
    ("neighbours are not told", "neighbours", "} else if (lane < kMulticast) {", "} else if (lane < 1) {"),
    ("other parts' neighbours are told", "neighbours", _TOLD, _TOLD.replace("share.part * kMulticast + ", "")),
    ("a neighbour overwrites what is read", "neighbours", "kConsumers / 32 * kMulticast", "kConsumers / 32"),
    (
        "the neighbour's rows land elsewhere",
        "neighbours",
        "to + share.neighbour * kMulticastRows * kTileK * 2",
        "to",
    ),
    (
        "a neighbour loads the other's rows",
        "neighbours",
        "column, share.neighbour * kMulticastRows",
        "column, 0",
    ),
    ("rows go to other parts' neighbours", "neighbours", " << share.part * kMulticast);", ");"),
    ("neighbours' barriers are not there yet", "neighbours", "  if (kClusterCtas > 1) cluster_wait();\n", ""),
    (
        "neighbours call the ring free",
        "neighbours",
        "part * kMulticast + share.neighbour));",
        "part * kMulticast));",
    ),
    (
        "sums go to neighbours",
        "neighbours",
        "rank = owner * kMulticast + share.neighbour",
        "rank = owner * kMulticast",
    ),
    # Gate, up and the norm.
    ("other features' gate and up", "gated", "share.tile * (kColumns / 8)", "share.tile * (kTileN / 8)"),
    ("gate is taken for up", "gated", "silu(sums[i][j].x * factors[i][0])", "silu(sums[i][j].z * factors[i][0])"),
    ("up is taken for gate", "gated", "(sums[i][j].w * factors[i][1])", "(sums[i][j].y * factors[i][1])"),
    ("a part of a row's squares", "gated", "mask < 8; mask *= 2", "mask < 4; mask *= 2"),
    ("other warps' squares are not there yet", "gated", _SUMS_SYNC, ""),
    ("squares are not waited for", "gated neighbours", "(kMulticast > 1 && sums_squares(sizes))", "false"),
    (
        "squares of the neighbour's rows",
        "gated neighbours",
        "rows + (share.neighbour * kMulticastRows + row)",
        "rows + (row)",
    ),
    ("squares are sent to too few", "gated parts and neighbours", "rank >= kClusterCtas", "rank >= kMulticast"),
    (
        "squares land elsewhere",
        "gated parts and neighbours",
        "share.neighbour * kMulticastRows + row) * 4",
        "row) * 4",
    ),
    ("parts' squares land at one address", "gated parts and neighbours", "(share.part * kRows + share", "(share"),
    (
        "too few squares are expected",
        "gated parts and neighbours",
        "(kClusterCtas - 1) * kMulticastRows",
        "kMulticastRows",
    ),
    ("squares and sums are not there yet", "gated parts and neighbours", _SENT_WAIT, ""),
    ("squares are read that boxes overwrite", "gated parts and neighbours", _RELEASE, _RELEASE_EARLY),
    # Squares that are left.
    ("other warps' pieces are not there yet", "alone", _SQUARE_SUMS_SYNC, "    store_square_sums("),
    (
        "a part of the columns' squares",
        "uneven",
        "row_square_sums += sum_of_squares(packed.x)",
        "row_square_sums = sum_of_squares(packed.x)",
    ),
    ("other parts' squares lie elsewhere", "parts", "piece.row + c - first_band(share.part) * 8", "piece.row + c"),
    # Tiles of rows.
    ("a stage is released while it is read", "row tiles", _ROW_TILED_RELEASE, _ROW_TILED_RELEASE_EARLY),
    (
        "a stage is not released",
        "row tiles",
        _ROW_TILED_RELEASE,
        _ROW_TILED_RELEASE.replace("index > 0", "index > 1"),
    ),
    ("GEMMs are not waited for", "row tiles", "    wgmma_wait<1>();\n", ""),
    ("the last GEMMs are not waited for", "row tiles", "  wgmma_wait<0>();\n", ""),
    ("a warp releases what its lanes read", "row tiles", "  sync_warp();\n", ""),
    ("a phase is not waited for", "row tiles", "barrier_wait(full_barrier(cta, stage), parity);", ""),
    ("boxes overwrite what is read", "row tiles", "    barrier_wait(empty_barrier(cta, stage), parity);\n", ""),
    ("barriers are not there yet", "row tiles", "  sync_threads();\n", ""),
    ("previous kernels are not waited for", "row tiles", "  griddepcontrol_wait();\n", ""),
    (
        "rows come before they are written",
        "row tiles",
        _ROW_TILED_EARLY + _ROW_TILED_WAIT + _ROW_TILED_ROWS,
        _ROW_TILED_EARLY + _ROW_TILED_ROWS + _ROW_TILED_WAIT,
    ),
    ("the other group's rows", "row tiles of two groups", " + group * 64 * kTileK * 2, weights", ", weights"),
    ("another tile's rows", "row tiles", "index * kTileK, cta.row,", "index * kTileK, 0,"),
    ("sums overwrite what others read", "row tiles", _RING_SYNC, ""),
    ("the other group reads what sums overwrite", "row tiles of two groups", _RING_SYNC, ""),
    ("other warps' sums are not there yet", "row tiles", _LEAVE + "  sync_consumers();\n", _LEAVE),
    ("other warps' pieces are not there yet", "row tiles", _SQUARE_SUMS_SYNC, "    store_square_sums("),
    (
        "neighbours are not told",
        "row tiles of neighbours",
        "} else if (lane < kMulticast) {",
        "} else if (lane < 1) {",
    ),
    ("a neighbour overwrites what is read", "row tiles of neighbours", "kWarps * kMulticast", "kWarps"),
    ("the neighbour's weights land elsewhere", "row tiles of neighbours", "stage) + first * kTileK * 2", "stage)"),
    ("a neighbour loads the other's weights", "row tiles of neighbours", "cta.column + first", "cta.column"),
    ("neighbours' barriers are not there yet", "row tiles of neighbours", "    cluster_wait();\n", ""),
]


def test_the_text_of_each_mistake_is_in_its_kernel() -> None:
    """Without compiling: the tests below run seldom, and a renamed variable must not switch them off meanwhile."""
    stale = [what for what, case, right, _ in _MISTAKES if right not in _CASES[case].variant.kernel_source()]
    assert not stale


@pytest.mark.full
@pytest.mark.parametrize(("what", "case", "right", "wrong"), _MISTAKES)
def test_the_emulation_finds_mistakes(tmp_path: Path, what: str, case: str, right: str, wrong: str) -> None:
    source = _CASES[case].variant.kernel_source()
    assert not _CASES[case].is_right(tmp_path, source.replace(right, wrong), 20), what
