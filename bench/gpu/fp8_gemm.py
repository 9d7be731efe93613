"""GEMMs with FP8 weights on a GPU: of one row in each configuration, of more through torch's library and our kernel.

    PYTHONPATH=src python bench/gpu/fp8_gemm.py --output bench/results/h200-fp8-products.json

Shapes are those of Llama-3.2-3B. Every launch reads the weights of another layer, so that no cache helps; launches are
captured in a CUDA graph and timed by events. Prints JSON: microseconds a launch, TB/s of weights read, TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from torch.nn import functional

from radixmesh.kernels.fp8.gemv import default_config, fp8_gate_up_silu, fp8_gemv
from radixmesh.kernels.fp8.linear import TileConfig, default_tile, fp8_linear
from radixmesh.kernels.fp8.quantize_rows import norm_quantize, quantize_rows
from radixmesh.kernels.fp8.quantized import QuantizedMatrix, QuantizedRows, quantize_matrix, quantize_rows_reference
from radixmesh.kernels.fp8.silu_quantize import silu_quantize
from radixmesh.kernels.gemv import GemvConfig, Shape

_EPS = 1e-5
_REPLAYS = 6
# Of all layers; enough that none is found in the cache.
_ROTATED_BYTES = 400 << 20
_MATRICES = {"qkv": (5120, 3072), "o": (3072, 3072), "gate_up": (16384, 3072), "down": (3072, 8192)}
_NORMED = ("qkv", "gate_up")
_FEW = ((4, 2), (2, 2), (8, 2), (4, 4), (8, 4), (2, 4))
_TILES = (
    TileConfig(rows=16, columns=32, num_warps=4, num_stages=6),
    TileConfig(rows=16, columns=64, num_warps=4, num_stages=5),
    TileConfig(rows=32, columns=64, num_warps=4, num_stages=5),
    TileConfig(rows=64, columns=32, num_warps=4, num_stages=5),
    TileConfig(rows=64, columns=64, num_warps=4, num_stages=4),
    TileConfig(rows=64, columns=128, num_warps=4, num_stages=4),
    TileConfig(rows=128, columns=64, num_warps=4, num_stages=4),
    TileConfig(rows=128, columns=128, num_warps=8, num_stages=3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 64, 256, 2048])
    parser.add_argument("--output", help="where the report is written")
    args = parser.parse_args()
    started = time.monotonic()
    few, many = [], []
    for name, shape in _MATRICES.items():
        for is_grouped in (False, True):
            layers = _layers(shape, is_grouped)
            few.append(_one_row(name, layers))
            print(json.dumps(few[-1]), file=sys.stderr, flush=True)
            for num_rows in args.rows:
                many.append(_rows(name, layers, num_rows))
                print(json.dumps(many[-1]), file=sys.stderr, flush=True)
            del layers
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv),
        "one_row": few,
        "rows": many,
        "around": [_around(num_rows) for num_rows in args.rows],
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)


def _one_row(name: str, layers: Sequence[QuantizedMatrix]) -> dict[str, object]:
    num_out, num_in = layers[0].shape
    is_gated = name == "gate_up"
    shape = Shape(num_out // 2 if is_gated else num_out, num_in, is_gated)
    x, norm = _random(1, num_in), _random(num_in) if name in _NORMED else None
    residual = None if name in _NORMED else _random(1, num_out)
    eps = None if norm is None else _EPS

    def run(config: GemvConfig) -> Callable[[QuantizedMatrix], object]:
        if is_gated:
            return lambda w: fp8_gate_up_silu(x, w, norm, eps, use_pdl=True, config=config)
        return lambda w: fp8_gemv(x, w, None, residual, norm, eps, use_pdl=True, config=config)

    figures = {
        f"{rows}x{warps}": _figures(run(GemvConfig(rows=rows, num_warps=warps)), layers, 1) for rows, warps in _FEW
    }
    chosen = default_config(shape)
    return {
        "name": name,
        "is_grouped": layers[0].is_grouped,
        "default": f"{chosen.rows}x{chosen.num_warps}",
        "best": min(figures, key=lambda key: figures[key]["us"]),
        "configs": figures,
    }


def _rows(name: str, layers: Sequence[QuantizedMatrix], num_rows: int) -> dict[str, object]:
    num_out, num_in = layers[0].shape
    is_grouped = layers[0].is_grouped
    x_TK = _random(num_rows, num_in)
    rows = quantize_rows_reference(x_TK, is_grouped=is_grouped)
    plain = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) for _ in range(_num_layers(2, layers))]
    found: dict[str, object] = {"name": name, "is_grouped": is_grouped, "rows": num_rows}
    if not is_grouped:
        found["bf16"] = _figures(lambda w: functional.linear(x_TK, w), plain, num_rows)
    found["library"] = _library(rows, layers, num_rows)
    ours = {}
    for tile in _TILES:
        # Tiles that most rows of would be nothing are of no use, nor are many small ones.
        if tile.rows >= 4 * max(num_rows, 16) or num_rows > 64 * tile.rows:
            continue
        key = f"{tile.rows}x{tile.columns}x{tile.num_warps}x{tile.num_stages}"
        ours[key] = _figures(lambda w, tile=tile: _ours(rows, w, tile), layers, num_rows)
    chosen = default_tile(num_rows, num_out)
    return found | {
        "default": f"{chosen.rows}x{chosen.columns}x{chosen.num_warps}x{chosen.num_stages}",
        "ours_by_default": _figures(lambda w: _ours(rows, w, None), layers, num_rows),
        "best": min(ours, key=lambda key: ours[key]["us"]),
        "ours": ours,
    }


def _ours(rows: QuantizedRows, w: QuantizedMatrix, tile: TileConfig | None) -> torch.Tensor:
    return fp8_linear(rows, w, torch.bfloat16, use_pdl=True, config=tile)


def _library(rows: QuantizedRows, layers: Sequence[QuantizedMatrix], num_rows: int) -> dict[str, object]:
    """torch._scaled_mm, by channels or by blocks where it takes them; else why not."""

    def run(w: QuantizedMatrix) -> torch.Tensor:
        return torch._scaled_mm(
            rows.data_PK,
            w.data_NK.t(),
            scale_a=rows.scales_PG,
            scale_b=w.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=not rows.is_grouped,
        )

    try:
        got, want = run(layers[0]).float(), _ours(rows, layers[0], None).float()
        error = round(float((got - want).norm() / want.norm()), 5)
        return {**_figures(run, layers, num_rows), "off": error}
    except (RuntimeError, ValueError) as error:
        return {"refused": str(error)[:200]}


def _around(num_rows: int) -> dict[str, object]:
    """The kernels that are launched between the GEMMs."""
    x, delta, norm = _random(num_rows, 3072), _random(num_rows, 3072), _random(3072)
    gate_up = _random(num_rows, 16384)
    found: dict[str, object] = {"rows": num_rows}
    for is_grouped in (False, True):
        kind = "block" if is_grouped else "channel"
        runs: dict[str, Callable[[object], object]] = {
            "quantize": lambda _, g=is_grouped: quantize_rows(x, is_grouped=g, use_pdl=True),
            "add_norm": lambda _, g=is_grouped: norm_quantize(
                x, norm, _EPS, delta_TD=delta, is_grouped=g, use_pdl=True
            ),
            "silu": lambda _, g=is_grouped: silu_quantize(gate_up, is_grouped=g, use_pdl=True),
        }
        found[kind] = {name: round(_micros(run, [None] * 16), 2) for name, run in runs.items()}
    return found


def _figures(run: Callable[..., object], layers: Sequence[object], num_rows: int) -> dict[str, float]:
    micros = _micros(run, layers)
    first = layers[0]
    data = first.data_NK if isinstance(first, QuantizedMatrix) else first
    assert isinstance(data, torch.Tensor)
    num_flops = 2 * num_rows * data.numel()
    return {
        "us": round(micros, 2),
        "tb_s": round(data.nbytes / micros / 1e6, 3),
        "tflop_s": round(num_flops / micros / 1e6, 1),
    }


def _micros(run: Callable[..., object], layers: Sequence[object]) -> float:
    """Microseconds a launch: the fastest replay of a graph that runs every layer once."""
    run(layers[0])  # Compiles.
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(layers[0])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in layers:
                run(layer)
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(layers))
    return min(times)


def _layers(shape: tuple[int, int], is_grouped: bool) -> list[QuantizedMatrix]:
    count = -(-_ROTATED_BYTES // (shape[0] * shape[1]))
    return [quantize_matrix(_random(*shape) * shape[1] ** -0.5, is_grouped=is_grouped) for _ in range(count)]


def _num_layers(itemsize: int, layers: Sequence[QuantizedMatrix]) -> int:
    return max(2, len(layers) // itemsize)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
