"""The GEMM of few rows from registers: the kernel's own source, with its primitives emulated, against torch."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import support
import torch
from support.gemm_sm90_emulator import is_there, random_numbers
from support.rounding import excess, gated_tolerance, gemm_tolerance

from radixmesh.kernels.gemm_sm90.gemm import gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import FEW_ROWS, FewRows, GemmConfig, takes_few_rows, variant_of
from radixmesh.kernels.inverse_rms import inverse_rms_reference

pytestmark = pytest.mark.skipif(not is_there(), reason="the emulation is built with g++")


def _emulated(folder: Path, variant: FewRows) -> ctypes.CDLL:
    constants, kernel, library = folder / "constants.h", folder / "kernel.cu", folder / "emulated.so"
    constants.write_text(variant.constants())
    kernel.write_text(variant.kernel_source().replace((_FOLDER / "ptx.cuh").read_text(), ""))
    source = Path(next(iter(support.__path__))) / "few_rows_emulator.cpp"
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-include", str(constants)]
    command = ["g++", *options, f'-DKERNEL_FILE="{kernel}"', str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(library))


_FOLDER = Path(variant_of.__code__.co_filename).parent


def _variant(dtype: torch.dtype, *, is_gated: bool, **changes: int) -> FewRows:
    variant = variant_of(FEW_ROWS, 8, is_gated, dtype)
    assert isinstance(variant, FewRows)
    of_variant = {name: changes.pop(name) for name in ("tile", "stages") if name in changes}
    return replace(variant, tiling=replace(variant.tiling, **changes), **of_variant)


def _run(
    library: ctypes.CDLL,
    variant: FewRows,
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    residual_TN: torch.Tensor | None,
    eps: float = -1.0,
) -> torch.Tensor:
    num_out = len(w_NK) // (1 + variant.is_gated)
    out_TN = torch.full((len(x_TK), num_out), float("nan"), dtype=x_TK.dtype)
    if residual_TN is not None:
        out_TN.copy_(residual_TN)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (w_NK, x_TK, out_TN)]
    sizes = [int(residual_TN is not None), len(x_TK), num_out, x_TK.shape[1]]
    library.emulate(*pointers, *sizes, ctypes.c_float(eps))
    return out_TN


@pytest.mark.parametrize(
    ("num_rows", "num_in", "dtype", "tiling"),
    [
        (5, 2048, torch.bfloat16, {}),
        (8, 1024, torch.float16, {"tile": 16, "stages": 8}),
        (1, 3072, torch.bfloat16, {"warps": 4}),
        (3, 1024, torch.bfloat16, {"warps": 4, "batch": 2, "stages": 3}),
        (2, 768, torch.bfloat16, {"tile": 48, "stages": 2}),
        # More slots than steps.
        (4, 512, torch.bfloat16, {"tile": 16, "stages": 5}),
    ],
)
def test_few_rows_are_torchs(
    tmp_path: Path, num_rows: int, num_in: int, dtype: torch.dtype, tiling: dict[str, int]
) -> None:
    variant = _variant(dtype, is_gated=False, **tiling)
    num_out = 3 * variant.tile
    config = GemmConfig(tile=variant.tile, split_k=1, stages=variant.stages, registers=variant.tiling)
    assert takes_few_rows(config, num_rows, num_out, num_in)
    x_TK, w_NK = random_numbers(num_rows, num_in, dtype=dtype), random_numbers(num_out, num_in, dtype=dtype)
    residual_TN = random_numbers(num_rows, num_out, dtype=dtype)
    library = _emulated(tmp_path, variant)
    for added_TN in (None, residual_TN):
        expected_TN = linear_reference(x_TK, w_NK, added_TN)
        found_TN = _run(library, variant, x_TK, w_NK, added_TN)
        assert excess(found_TN, expected_TN, gemm_tolerance(x_TK, w_NK, expected_TN, added_TN)) <= 1


@pytest.mark.parametrize("eps", [-1.0, 1e-5])
@pytest.mark.parametrize("tiling", [{}, {"tile": 16, "batch": 2}, {"warps": 4, "stages": 2}])
def test_gate_and_up_of_few_rows_are_torchs(tmp_path: Path, tiling: dict[str, int], eps: float) -> None:
    num_rows, num_in, num_out = 3, 1024, 48
    variant = _variant(torch.bfloat16, is_gated=True, **tiling)
    x_TK = random_numbers(num_rows, num_in)
    w_NK = random_numbers(2 * num_out, num_in) * num_in**-0.5
    expected_TF = gate_up_silu_reference(x_TK, w_NK, None if eps < 0 else eps)
    scale_T1 = torch.ones(num_rows, 1) if eps < 0 else inverse_rms_reference(x_TK, eps)
    tolerance_TF = gated_tolerance(x_TK, w_NK, expected_TF, scale_T1)
    found_TF = _run(_emulated(tmp_path, variant), variant, x_TK, w_NK, None, eps)
    assert excess(found_TF, expected_TF, tolerance_TF) <= 1
