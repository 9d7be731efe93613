"""GEMMs of a few rows, with weights in registers (kernels/gemm_sm90/few_rows.cu): are they right, and how fast?

    python bench/gpu/few_rows.py --results bench/results/h200-few-rows.json

For each matrix of a shape and each tiling: the largest error against torch, over what rounding allows (1: all of it),
and microseconds of a launch, beside those of the GEMV kernels at one row and of the other GEMMs with PDL that a
worker's autotuner tries. Then layers without their attention, kernel behind kernel: with GEMVs, with the other GEMMs,
and with these, the fastest of each in its place. Every launch reads the weights of another layer. --results: file of
what is known so far. --replace: the same with other code in the kernel's source, OLD=>NEW each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from gpu.graph_timing import micros
from gpu.kept import Kept
from gpu.mesh import gpu_name
from gpu.shapes import SHAPES

from radixmesh.kernels import gemv
from radixmesh.kernels.gemm_sm90.candidates import candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import GemmSm90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.gemm_sm90.variants import (
    FEW_ROWS_CONFIGS,
    GemmConfig,
    RegisterTiling,
    takes_few_rows,
    variant_of,
)

_EPS = 1e-5
_DTYPE = torch.bfloat16
# Rows at which tilings are chosen: 4 drafts.
_CHOSEN_AT = 5
_FINALISTS = 4


def tilings() -> list[GemmConfig]:
    """Those that the autotuner tries, and some beside them."""
    tried = ((8, 16, 4, 2, 2), (8, 48, 3, 1, 2), (4, 48, 7, 1, 2), (4, 64, 5, 1, 2), (4, 32, 9, 1, 2), (4, 32, 6, 1, 3))
    others = [
        GemmConfig(
            tile=tile,
            split_k=1,
            stages=stages,
            registers=RegisterTiling(warps=warps, batch=batch, resident=resident),
        )
        for warps, tile, stages, batch, resident in tried
    ]
    return [*FEW_ROWS_CONFIGS, *others]


class Matrix(NamedTuple):
    """weights: of as many layers, [N, K] each, gate above up if gated. is_added: the result is added to a residual."""

    name: str
    weights: Sequence[torch.Tensor]
    is_gated: bool = False
    is_added: bool = False

    @property
    def num_out(self) -> int:
        """Of gate or up alone."""
        return len(self.weights[0]) // (1 + self.is_gated)

    @property
    def num_in(self) -> int:
        return self.weights[0].shape[1]

    def tb_s(self, us: float) -> float:
        return round(self.weights[0].nbytes / us / 1e6, 3)


class Places(NamedTuple):
    """Rows [T, features] that a layer's GEMMs read and write."""

    hidden: torch.Tensor
    qkv: torch.Tensor
    heads: torch.Tensor
    gated: torch.Tensor
    logits: torch.Tensor

    def of(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output."""
        return {
            "qkv": (self.hidden, self.qkv),
            "o": (self.heads, self.hidden),
            "gate_up": (self.hidden, self.gated),
            "down": (self.gated, self.hidden),
            "head": (self.hidden, self.logits),
        }[matrix.name]


def matrices(shape: str, num_layers: int, device: str) -> list[Matrix]:
    sizes = SHAPES[shape]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    hidden, mlp, heads, kv_heads, head_dim, vocab = (int(str(sizes.get(name, 128))) for name in names)

    def weights(num_out: int, num_in: int, count: int = num_layers) -> list[torch.Tensor]:
        made = [torch.empty(num_out, num_in, dtype=_DTYPE, device=device) for _ in range(count)]
        return [weight.normal_(0.0, num_in**-0.5) for weight in made]

    return [
        Matrix("qkv", weights((heads + 2 * kv_heads) * head_dim, hidden)),
        Matrix("o", weights(hidden, heads * head_dim), is_added=True),
        Matrix("gate_up", weights(2 * mlp, hidden), is_gated=True),
        Matrix("down", weights(hidden, mlp), is_added=True),
        # One is larger than any cache.
        Matrix("head", weights(vocab, hidden, 1)),
    ]


def places(of: Sequence[Matrix], num_rows: int, device: str) -> Places:
    by_name = {matrix.name: matrix for matrix in of}
    sizes = [by_name["qkv"].num_in, *(by_name[name].num_out for name in ("qkv",)), by_name["o"].num_in]
    sizes += [by_name["gate_up"].num_out, by_name["head"].num_out]
    return Places(*(torch.randn(num_rows, size, dtype=_DTYPE, device=device) for size in sizes))


class Launches:
    """One matrix after the other, each by what computes it there."""

    def __init__(self, kernel: GemmSm90, of: Places) -> None:
        self._kernel, self.of = kernel, of
        self._square_sums: torch.Tensor | None = None

    def gemv(self, matrix: Matrix, layer: int) -> None:
        (x_TK, out_TN), weight = self.of.of(matrix), matrix.weights[layer % len(matrix.weights)]
        if matrix.is_gated:
            gemv.gate_up_silu(x_TK, weight, None, _EPS, out=out_TN, use_pdl=True)
        else:
            residual = out_TN if matrix.is_added else None
            eps = None if matrix.is_added else _EPS
            gemv.linear(x_TK, weight, None, residual, None, eps, out=out_TN, use_pdl=True)

    def gemm(self, config: GemmConfig, matrix: Matrix, layer: int) -> None:
        (x_TK, out_TN), weight = self.of.of(matrix), matrix.weights[layer % len(matrix.weights)]
        kernel = self._kernel
        if matrix.is_gated:
            given = self._square_sums if config.registers is None else None
            kernel.gate_up_silu(x_TK, weight, config, eps=_EPS, out=out_TN, square_sums=given)
            return
        # The output projection's are of the rows that gate and up read next.
        self._square_sums = kernel.new_square_sums(x_TK, weight, config) if matrix.name == "o" else None
        residual = out_TN if matrix.is_added else None
        kernel.linear(x_TK, weight, config, residual_TN=residual, out=out_TN, square_sums_out=self._square_sums)

    def layer(self, chosen: Callable[[Matrix], GemmConfig | None], layers: Sequence[Matrix], layer: int) -> None:
        """None: a GEMV."""
        for matrix in layers:
            config = chosen(matrix)
            if config is None:
                self.gemv(matrix, layer)
            else:
                self.gemm(config, matrix, layer)


def excess(kernel: GemmSm90, config: GemmConfig, matrix: Matrix, num_rows: int) -> float:
    """Largest error over the allowed one: 1% of the largest result, that of roundings of inputs of random sign."""
    weight = matrix.weights[0]
    x_TK = torch.randn(num_rows, matrix.num_in, dtype=_DTYPE, device=weight.device)
    before_TN = torch.randn(num_rows, matrix.num_out, dtype=_DTYPE, device=weight.device)
    if matrix.is_gated:
        out_TN = torch.full_like(before_TN, float("nan"))
        kernel.gate_up_silu(x_TK, weight, config, eps=_EPS, out=out_TN)
        expected = gate_up_silu_reference(x_TK, weight, _EPS)
    else:
        out_TN = before_TN.clone()
        kernel.linear(x_TK, weight, config, residual_TN=out_TN, out=out_TN)
        expected = linear_reference(x_TK, weight, before_TN)
    error = (out_TN.float() - expected.float()).abs().max() / expected.float().abs().max()
    return round(float(error) / 0.01, 3)


def measure(args: argparse.Namespace, kept: Kept, device: str = "cuda") -> None:
    started = time.monotonic()
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{gpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        shape=args.shape,
    )
    of = matrices(args.shape, args.layers, device)
    kernel = new_kernel()
    few = {
        matrix.name: [
            config for config in tilings() if takes_few_rows(config, _CHOSEN_AT, len(matrix.weights[0]), matrix.num_in)
        ]
        for matrix in of
    }
    others = {
        m.name: candidates(_CHOSEN_AT, m.num_out, m.num_in, is_gated=m.is_gated, count=args.candidates) for m in of
    }
    kernel.prepare(
        variant_of(config, _CHOSEN_AT, matrix.is_gated, _DTYPE)
        for matrix in of
        for config in (*few[matrix.name], *others[matrix.name])
    )
    kept.note(compiled_s=round(time.monotonic() - started, 1))
    at = {num_rows: Launches(kernel, places(of, num_rows, device)) for num_rows in {1, *args.rows, _CHOSEN_AT}}
    alone: dict[str, object] = {}
    ranked: dict[str, list[GemmConfig]] = {}
    for matrix in of:
        count = max(4, len(matrix.weights))
        wrong = {
            str(config): [excess(kernel, config, matrix, num_rows) for num_rows in args.rows]
            for config in few[matrix.name]
        }
        us = {}
        for config in (*few[matrix.name], *others[matrix.name]):
            us[config] = micros(partial(at[_CHOSEN_AT].gemm, config, matrix), count)
        most = max(at)
        at_most = {config: micros(partial(at[most].gemm, config, matrix), count) for config in few[matrix.name]}
        ordered = sorted(us, key=lambda config, us=us: us[config])
        ours = [config for config in ordered if config.registers is not None]
        theirs = [config for config in ordered if config.registers is None]
        ranked[matrix.name], ranked[f"{matrix.name} others"] = ours[:_FINALISTS], theirs[:_FINALISTS]
        gemv_us = micros(partial(at[1].gemv, matrix), count)
        by_rows = {rows: micros(partial(at[rows].gemm, ours[0], matrix), count) for rows in sorted(at)}
        alone[matrix.name] = {
            "worst_excess": max(max(each) for each in wrong.values()),
            "gemv_1_row": {"us": round(gemv_us, 2), "tb_s": matrix.tb_s(gemv_us)},
            "others": {str(config): round(us[config], 2) for config in theirs},
            "others_best_tb_s": matrix.tb_s(us[theirs[0]]),
            "best": {str(rows): {"us": round(each, 2), "tb_s": matrix.tb_s(each)} for rows, each in by_rows.items()},
            "few_rows": {str(config): round(us[config], 2) for config in ours},
            f"few_rows_at_{most}": {str(config): round(at_most[config], 2) for config in ours},
        }
        kept.note(alone=alone, seconds=round(time.monotonic() - started, 1))
        print(json.dumps({matrix.name: alone[matrix.name]}), file=sys.stderr, flush=True)
    layers, count = of[:-1], 2 * args.layers
    chains: dict[str, object] = {
        "gemv_1_row": round(micros(partial(at[1].layer, lambda matrix: None, layers), count), 2)
    }
    for name, suffix in (("others", " others"), ("few_rows", "")):
        chosen = {matrix.name: ranked[matrix.name + suffix][0] for matrix in layers}
        for matrix in layers:
            chosen[matrix.name] = _fastest(at[_CHOSEN_AT], layers, chosen, matrix, ranked[matrix.name + suffix], count)
        chains[name] = {
            "chosen": {matrix: str(config) for matrix, config in chosen.items()},
            **{
                str(rows): round(micros(partial(at[rows].layer, lambda m, c=chosen: c[m.name], layers), count), 2)
                for rows in sorted(at)
            },
        }
        kept.note(layer_us=chains, seconds=round(time.monotonic() - started, 1))
    print(json.dumps(chains), file=sys.stderr, flush=True)
    replaced: dict[str, object] = {}
    for replacement in args.replace:
        changed = new_kernel(*replacement.split("=>"))
        others_at = {rows: Launches(changed, launches.of) for rows, launches in at.items()}
        replaced[replacement] = {
            "worst_excess": max(excess(changed, chosen[m.name], m, _CHOSEN_AT) for m in layers),
            "layer_us": {
                str(rows): round(micros(partial(each.layer, lambda m, c=chosen: c[m.name], layers), count), 2)
                for rows, each in sorted(others_at.items())
            },
            "alone_us": {
                m.name: round(micros(partial(others_at[_CHOSEN_AT].gemm, chosen[m.name], m), count), 2) for m in layers
            },
        }
        kept.note(replaced=replaced, seconds=round(time.monotonic() - started, 1))
    print(json.dumps(replaced), file=sys.stderr, flush=True)


def _fastest(
    launches: Launches,
    layers: Sequence[Matrix],
    chosen: dict[str, GemmConfig],
    matrix: Matrix,
    options: Sequence[GemmConfig],
    count: int,
) -> GemmConfig:
    """In its place in the layer."""
    us = {
        config: micros(partial(launches.layer, lambda m, c=config: c if m is matrix else chosen[m.name], layers), count)
        for config in options
    }
    return min(us, key=lambda config: us[config])


def new_kernel(old: str = "", new: str = "") -> GemmSm90:
    nvrtc = Nvrtc()
    return GemmSm90(CudaDriver(), lambda source: nvrtc.cubin(source.replace(old, new) if old else source))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 5, 8])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=8, help="of the other GEMMs, for each matrix")
    parser.add_argument("--replace", nargs="*", default=[], metavar="OLD=>NEW")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with Kept(args.results) as kept, torch.inference_mode():
        measure(args, kept)


if __name__ == "__main__":
    main()
