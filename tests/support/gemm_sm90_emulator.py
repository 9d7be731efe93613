"""The sm90 GEMM kernels on a CPU: their own sources, built with g++ around emulated primitives."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from radixmesh.kernels.gemm_sm90.variants import RowTiled, SmallM, Variant

_HERE = Path(__file__).parent


def is_there() -> bool:
    return shutil.which("g++") is not None


class EmulatedGemmSm90:
    """One variant, built in `folder`. `source`: of the kernel, for tests that break it."""

    def __init__(self, variant: Variant, folder: Path, source: str | None = None) -> None:
        self._is_gated = isinstance(variant, SmallM) and variant.is_gated
        folder.mkdir(parents=True, exist_ok=True)
        constants, kernel, library = folder / "constants.h", folder / "kernel.cu", folder / "emulated.so"
        constants.write_text(variant.constants())
        kernel.write_text(variant.kernel_source() if source is None else source)
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-w",
            "-shared",
            "-fPIC",
            "-include",
            str(constants),
        ]
        if isinstance(variant, RowTiled):
            command.append("-DROW_TILED")
        command += [f'-DKERNEL_FILE="{kernel}"', str(_HERE / "gemm_sm90_emulator.cpp"), "-o", str(library)]
        subprocess.run(command, check=True, timeout=120)
        self._library = ctypes.CDLL(str(library))

    @property
    def shared_bytes(self) -> int:
        return int(self._library.shared_bytes())

    def run(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        *,
        residual_TN: torch.Tensor | None = None,
        eps: float = -1.0,
        square_sums: torch.Tensor | None = None,
        square_sums_out: torch.Tensor | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """[T, N]; raises RuntimeError with what the kernel did wrong. square_sums: as `GemmSm90` has them."""
        (num_rows, num_in), num_out = x_TK.shape, w_NK.shape[0] // (1 + self._is_gated)
        assert num_out % 8 == 0 and num_in % 8 == 0, (num_out, num_in)
        out_TN = torch.full((num_rows, num_out), float("nan"), dtype=x_TK.dtype)
        if residual_TN is not None:
            out_TN.copy_(residual_TN)
        message = ctypes.create_string_buffer(200)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (w_NK, x_TK, out_TN)]
        sizes = [int(residual_TN is not None), num_rows, num_out, num_in]
        given = (
            ctypes.c_void_p(None if square_sums is None else square_sums.data_ptr()),
            0 if square_sums is None else len(square_sums),
        )
        left = ctypes.c_void_p(None if square_sums_out is None else square_sums_out.data_ptr())
        eps_ = ctypes.c_float(eps)
        if self._library.emulate(ctypes.c_uint(seed), *pointers, *sizes, eps_, *given, left, message, len(message)):
            raise RuntimeError(message.value.decode())
        return out_TN


def random_numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def square_sums_by_tile(found_TN: torch.Tensor, tile: int) -> torch.Tensor:
    """Sums over each tile of columns, [tiles, T]."""
    padded = torch.nn.functional.pad(found_TN.float(), (0, -found_TN.shape[1] % tile))
    return padded.square().unflatten(1, (-1, tile)).sum(dim=2).t()
