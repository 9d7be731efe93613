"""An experiment: gate and up projections and the SwiGLU between them as one kernel, for 64 to 512 rows on one GPU.

    PYTHONPATH=src python bench/gpu/gate_up.py --output bench/results/h200-gate-up.json

Shapes are those of Llama-3.2-3B, every launch reads the weights of another layer, all in CUDA graphs, in turns. Against
it: cuBLAS as torch calls it, and the same with the project's SiLU kernel behind it. Prints JSON: microseconds a layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from radixmesh.daemons.worker.cuda.timed_graph import TimedGraph
from radixmesh.kernels.silu_mul import silu_mul, silu_mul_reference

_HIDDEN, _MLP, _LAYERS, _ROUNDS = 3072, 8192, 28, 6


class Config(NamedTuple):
    """A program's tile: rows x features (as many of gate as of up), K features a stage."""

    rows: int
    features: int
    depth: int
    stages: int
    warps: int


CONFIGS = (
    Config(64, 64, 128, 4, 4),
    Config(64, 64, 64, 8, 4),
    Config(128, 64, 64, 6, 8),
    Config(128, 64, 128, 3, 8),
    Config(128, 128, 64, 4, 8),
    Config(128, 128, 64, 3, 8),
    Config(256, 64, 64, 4, 8),
)


@triton.jit
def gate_up_kernel(
    x_desc,
    w_desc,
    out_desc,
    T,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Programs that share weights run side by side.
    row_tiles = tl.cdiv(T, ROWS)
    row = (tl.program_id(0) % row_tiles) * ROWS
    feature = (tl.program_id(0) // row_tiles) * FEATURES
    gate = tl.zeros((ROWS, FEATURES), tl.float32)
    up = tl.zeros((ROWS, FEATURES), tl.float32)
    for k in tl.range(0, K, DEPTH):
        x = x_desc.load([row, k])
        gate = tl.dot(x, w_desc.load([feature, k]).T, gate)
        up = tl.dot(x, w_desc.load([F + feature, k]).T, up)
    # Rounded as the product and the operations of `silu_mul` are.
    dtype = out_desc.dtype
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out_desc.store([row, feature], (activated * up.to(dtype).to(tl.float32)).to(dtype))


class _Fused:
    """Launches of one configuration over all layers' weights [2F, K]."""

    def __init__(self, config: Config, x_TK: torch.Tensor, weights: list[torch.Tensor], out_TF: torch.Tensor) -> None:
        self._config, self._num_rows = config, len(x_TK)
        self._x = TensorDescriptor.from_tensor(x_TK, [config.rows, config.depth])
        self._weights = [TensorDescriptor.from_tensor(w, [config.features, config.depth]) for w in weights]
        self._out = TensorDescriptor.from_tensor(out_TF, [config.rows, config.features])

    def __call__(self, layer: int) -> None:
        config = self._config
        grid = (triton.cdiv(self._num_rows, config.rows) * (_MLP // config.features),)
        gate_up_kernel[grid](
            self._x,
            self._weights[layer],
            self._out,
            self._num_rows,
            F=_MLP,
            K=_HIDDEN,
            ROWS=config.rows,
            FEATURES=config.features,
            DEPTH=config.depth,
            num_warps=config.warps,
            num_stages=config.stages,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--output", help="where the report is written")
    args = parser.parse_args()
    stream = torch.cuda.Stream()
    weights = [_random(2 * _MLP, _HIDDEN).mul_(_HIDDEN**-0.5) for _ in range(_LAYERS)]
    results = [_measure(num_rows, weights, stream) for num_rows in args.rows]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv),
        "results": results,
    }
    text = json.dumps(report, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)


def _measure(num_rows: int, weights: list[torch.Tensor], stream: torch.cuda.Stream) -> dict[str, object]:
    x_TK, gate_up_T2F, out_TF = _random(num_rows, _HIDDEN), _random(num_rows, 2 * _MLP), _random(num_rows, _MLP)

    def product(layer: int) -> None:
        torch.mm(x_TK, weights[layer].t(), out=gate_up_T2F)

    def two(layer: int) -> None:
        product(layer)
        silu_mul(gate_up_T2F, out_TF)

    runs: dict[str, Callable[[int], None]] = {"torch_product_alone": product, "torch_and_silu": two}
    errors: dict[str, object] = {}
    product(0)
    expected_TF = silu_mul_reference(gate_up_T2F).float()
    for config in CONFIGS:
        if config.rows > max(num_rows, 64):
            continue
        name = "x".join(map(str, config))
        run = _Fused(config, x_TK, weights, out_TF)
        try:
            run(0)
        except Exception as error:  # A configuration that does not compile or launch here is a result, too.
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        errors[name] = round(float((out_TF.float() - expected_TF).abs().max() / expected_TF.abs().max()), 5)
        runs[name] = run
    torch.cuda.synchronize()
    graphs = {
        name: TimedGraph([lambda at=at, run=run: run(at) for at in range(_LAYERS)], stream)
        for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            times[name].append(graph.micros())
    best_us = {name: round(min(each), 2) for name, each in times.items()}
    return {"rows": num_rows, "us": best_us, "max_error": errors}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
