"""PDL kernel on compute capability 9.0, and a check against torch before its first use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from radixmesh.daemons.worker.cuda.gemm.pdl_gemm import GemmEpilogue, PdlKernel, PdlShape
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90, accepts, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import GemmConfig, variant_of

_EPS = 1e-5
_MAX_ERROR = 0.01
# split_k by number of rows of the small GEMMs.
_CHECKED = {5: 1, 37: 2, 64: 3}


class Sm90Kernel(PdlKernel):
    """Launches on the current stream; RuntimeError where the compiler or the driver refuses."""

    def __init__(self, kernel: GemmSm90) -> None:
        self._kernel = kernel

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> bool:
        return accepts(x_TK, w_NK, out, is_gated)

    def prepare(self, needed: Iterable[tuple[PdlShape, GemmConfig]]) -> None:
        self._kernel.prepare(
            variant_of(config, shape.num_rows, shape.use is GemmEpilogue.GATED, shape.dtype) for shape, config in needed
        )

    def load(self, shape: PdlShape, config: GemmConfig) -> None:
        self._kernel.load(variant_of(config, shape.num_rows, shape.use is GemmEpilogue.GATED, shape.dtype))

    def linear(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        config: GemmConfig,
        *,
        residual_TN: torch.Tensor | None,
        out: torch.Tensor,
        square_sums_out: torch.Tensor | None = None,
    ) -> None:
        self._kernel.linear(x_TK, w_NK, config, residual_TN=residual_TN, out=out, square_sums_out=square_sums_out)

    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor, config: GemmConfig) -> torch.Tensor:
        return self._kernel.new_square_sums(x_TK, w_NK, config)

    def gate_up_silu(
        self,
        x_TK: torch.Tensor,
        w_2FK: torch.Tensor,
        config: GemmConfig,
        *,
        eps: float,
        out: torch.Tensor,
        square_sums: torch.Tensor | None = None,
    ) -> None:
        self._kernel.gate_up_silu(x_TK, w_2FK, config, eps=eps, out=out, square_sums=square_sums)


def check_kernel(kernel: PdlKernel, dtype: torch.dtype, device: torch.device) -> None:
    """Computes small GEMMs (ragged, split-K, gated). Raises RuntimeError unless torch agrees."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    configs = {num_rows: GemmConfig(tile=128, split_k=split_k, stages=3) for num_rows, split_k in _CHECKED.items()}
    kernel.prepare(
        (PdlShape(num_rows, 272, 456, dtype, use), config)
        for (num_rows, config), use in itertools.product(configs.items(), (GemmEpilogue.ADDED, GemmEpilogue.GATED))
    )
    for num_rows, config in configs.items():
        x_TK, w_NK, before_TN = random(num_rows, 456), random(272, 456), random(num_rows, 272)
        added_TN, gated_TF = before_TN.clone(), random(num_rows, 136)
        kernel.linear(x_TK, w_NK, config, residual_TN=added_TN, out=added_TN)
        kernel.gate_up_silu(x_TK, w_NK, config, eps=_EPS, out=gated_TF)
        for found, expected in (
            (added_TN, linear_reference(x_TK, w_NK, before_TN)),
            (gated_TF, gate_up_silu_reference(x_TK, w_NK, _EPS)),
        ):
            error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
            if not error < _MAX_ERROR:
                raise RuntimeError(f"a small GEMM of {num_rows} rows differs from torch's by {error:.3g}")
