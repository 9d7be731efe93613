"""GEMV kernels on a GPU: every shape and configuration against torch, and all GEMMs of a decode step.

    PYTHONPATH=src python bench/gpu/gemv.py --output bench/results/h200-gemv.json

Shapes are those of Llama-3.2-3B. Every launch reads the weights of another layer, so that no cache helps; launches are
captured in a CUDA graph and timed by events. Prints JSON: microseconds a launch and TB/s of weights read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
from torch.nn import functional

from radixmesh.kernels.gemv import (
    GemvConfig,
    Shape,
    default_config,
    gate_up_silu,
    gate_up_silu_reference,
    linear,
    linear_reference,
)
from radixmesh.kernels.rms_norm import rms_norm
from radixmesh.kernels.silu_mul import silu_mul

_HIDDEN, _QKV, _MLP, _VOCAB = 3072, 5120, 8192, 128256
_EPS = 1e-5
_REPLAYS = 8


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    shape: Shape
    is_normed: bool
    has_norm_weight: bool
    has_residual: bool
    configs: tuple[GemvConfig, ...]


def _configs(*pairs: tuple[int, int] | tuple[int, int, int]) -> tuple[GemvConfig, ...]:
    return tuple(GemvConfig(rows=p[0], num_warps=p[1], max_registers=p[2] if len(p) > 2 else None) for p in pairs)


_CASES = (
    _Case("qkv", Shape(_QKV, _HIDDEN, False), True, False, False, _configs((4, 4), (2, 4), (8, 4), (2, 2), (4, 4, 80))),
    _Case("o", Shape(_HIDDEN, _HIDDEN, False), False, False, True, _configs((4, 4), (2, 4), (8, 4), (2, 2), (4, 2))),
    _Case(
        "gate_up", Shape(_MLP, _HIDDEN, True), True, False, False, _configs((2, 4), (1, 4), (4, 4), (1, 2), (2, 4, 96))
    ),
    _Case("down", Shape(_HIDDEN, 8192, False), False, False, True, _configs((2, 8), (1, 4), (2, 4), (4, 8), (1, 8))),
    _Case("lm_head", Shape(_VOCAB, _HIDDEN, False), True, True, False, _configs((4, 4), (2, 4), (8, 4), (4, 2))),
)


@dataclass(frozen=True, slots=True)
class _Operands:
    """Of one GEMM at M rows: a weight a layer, and what is fused."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    norm: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor


def main() -> None:
    args = _arguments()
    started = time.monotonic()
    layers = {case.name: _weights(case, args.layers) for case in _CASES}
    results = []
    for case in _CASES:
        for num_rows in args.rows:
            results.append(_measure(case, layers[case.name], num_rows))
            print(json.dumps(results[-1]), file=sys.stderr)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv),
        "layers": args.layers,
        "gemm": results,
        "step": _measure_step(layers),
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report, indent=1)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="weights that are read in turn")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="all configurations at 1 row only")
    parser.add_argument("--output", help="where the report is written")
    return parser.parse_args()


def _measure(case: _Case, weights: list[torch.Tensor], num_rows: int) -> dict[str, object]:
    operands = _operands(case, weights, num_rows)
    num_bytes = weights[0].numel() * weights[0].element_size()

    def figures(run: Callable[[int], object]) -> dict[str, float]:
        micros = _micros(run, len(weights))
        return {"us": round(micros, 2), "tb_s": round(num_bytes / micros / 1e6, 3)}

    default = default_config(case.shape, 2)
    configs = case.configs if num_rows == 1 else (default,)
    rows = [{**_named(config), **figures(_ours(case, operands, config, False))} for config in configs]
    best = min(range(len(rows)), key=lambda index: rows[index]["us"])
    return {
        "name": case.name,
        "rows": num_rows,
        "max_error": _error(case, operands, default),
        "torch_gemm_alone": figures(lambda layer: functional.linear(operands.x, weights[layer])),
        "configs": rows,
        "best": _named(configs[best]),
        "best_with_pdl": figures(_ours(case, operands, configs[best], True)),
    }


def _ours(case: _Case, operands: _Operands, config: GemvConfig, use_pdl: bool) -> Callable[[int], object]:
    def run(layer: int) -> object:
        x, weight, norm, out = operands.x, operands.weights[layer], operands.norm, operands.out
        if case.shape.is_gated:
            return gate_up_silu(x, weight, norm, _EPS, out=out, use_pdl=use_pdl, config=config)
        residual, eps = operands.residual, _EPS if case.is_normed else None
        return linear(x, weight, None, residual, norm, eps, out=out, use_pdl=use_pdl, config=config)

    return run


def _error(case: _Case, operands: _Operands, config: GemvConfig) -> float:
    """Largest difference from torch in units of the result's largest value."""
    actual = torch.empty_like(operands.out)
    x, weight, norm = operands.x, operands.weights[0], operands.norm
    if case.shape.is_gated:
        gate_up_silu(x, weight, norm, _EPS, out=actual, config=config)
        expected = gate_up_silu_reference(x, weight, norm, _EPS)
    else:
        eps = _EPS if case.is_normed else None
        linear(x, weight, None, operands.residual, norm, eps, out=actual, config=config)
        expected = linear_reference(x, weight, None, operands.residual, norm, eps)
    return round(float((actual.float() - expected.float()).abs().max() / expected.float().abs().max()), 5)


def _measure_step(layers: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    """Milliseconds of all GEMMs of a decode step of one row, norms and gates included, attention not."""
    x = torch.randn(1, _HIDDEN, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(_HIDDEN, device="cuda", dtype=torch.bfloat16)
    num_layers = len(layers["qkv"])

    def ours(use_pdl: bool) -> Callable[[int], object]:
        def run(_: int) -> object:
            hidden = x.clone()
            for qkv, o, gate_up, down in zip(*(layers[name] for name in ("qkv", "o", "gate_up", "down")), strict=True):
                heads = linear(hidden, qkv, None, None, None, _EPS, use_pdl=use_pdl)[:, :_HIDDEN]
                linear(heads, o, None, hidden, out=hidden, use_pdl=use_pdl)
                gated = gate_up_silu(hidden, gate_up, None, _EPS, use_pdl=use_pdl)
                linear(gated, down, None, hidden, out=hidden, use_pdl=use_pdl)
            return linear(hidden, layers["lm_head"][0], None, None, norm, _EPS, use_pdl=use_pdl)

        return run

    def theirs(_: int) -> object:
        hidden = x.clone()
        for qkv, o, gate_up, down in zip(*(layers[name] for name in ("qkv", "o", "gate_up", "down")), strict=True):
            heads = functional.linear(rms_norm(hidden, norm, _EPS), qkv)[:, :_HIDDEN]
            hidden = hidden + functional.linear(heads, o)
            gated = silu_mul(functional.linear(rms_norm(hidden, norm, _EPS), gate_up))
            hidden = hidden + functional.linear(gated, down)
        return functional.linear(rms_norm(hidden, norm, _EPS), layers["lm_head"][0])

    num_bytes = sum(w.numel() * 2 for name in ("qkv", "o", "gate_up", "down") for w in layers[name])
    num_bytes += layers["lm_head"][0].numel() * 2
    figures = {"layers": float(num_layers), "weights_gb": round(num_bytes / 1e9, 3)}
    for name, run in (("ours", ours(False)), ("ours_pdl", ours(True)), ("torch", theirs)):
        micros = _micros(run, 1)
        figures[f"{name}_ms"] = round(micros / 1e3, 4)
        figures[f"{name}_tb_s"] = round(num_bytes / micros / 1e6, 3)
    return figures


def _micros(run: Callable[[int], object], num_layers: int) -> float:
    """Microseconds a launch: the fastest replay of a graph that runs every layer once."""
    run(0)  # Compiles.
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(num_layers):
                run(layer)
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_layers)
    return min(times)


def _weights(case: _Case, num_layers: int) -> list[torch.Tensor]:
    # One lm_head is larger than any cache.
    count = 2 if case.name == "lm_head" else num_layers
    num_out = case.shape.num_out * (1 + case.shape.is_gated)
    shape = (num_out, case.shape.num_in)
    scale = case.shape.num_in**-0.5
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale) for _ in range(count)]


def _operands(case: _Case, weights: list[torch.Tensor], num_rows: int) -> _Operands:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    shape = case.shape
    return _Operands(
        x=random(num_rows, shape.num_in),
        weights=weights,
        norm=random(shape.num_in) if case.has_norm_weight else None,
        residual=random(num_rows, shape.num_out) if case.has_residual else None,
        out=random(num_rows, shape.num_out),
    )


def _named(config: GemvConfig) -> dict[str, object]:
    return asdict(config)


if __name__ == "__main__":
    main()
