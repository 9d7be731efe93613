"""Products of 2 to 256 rows on a GPU: our kernel in several configurations against cuBLAS, then chains of 28 layers.

    PYTHONPATH=src python bench/gpu/skinny.py --output bench/results/h200-skinny.json

Shapes are those of Llama-3.2-3B, data is random and normal, every launch reads the weights of another layer, so that
they come from memory; launches are captured in CUDA graphs. cuBLAS is timed with the kernel behind it that the fused
one replaces. Kernels are compiled by many processes first. Prints JSON: microseconds a launch,
the best configuration of each matrix and number of rows, and the one that the defaults choose.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
import triton
from torch.nn import functional

from radixmesh.kernels.product import (
    num_square_parts,
    product,
    product_reference,
    product_silu,
    product_silu_reference,
)
from radixmesh.kernels.product_config import ProductConfig, ProductShape, ProductWorkspace, default_config
from radixmesh.kernels.silu_mul import silu_mul

_HIDDEN, _MLP, _EPS, _NUM_SMS = 3072, 8192, 1e-5, 132
_SQUARE_PARTS = 24
_DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class _Matrix:
    """num_out: of gate or up alone if it is gated."""

    name: str
    num_out: int
    num_in: int
    is_gated: bool = False
    has_residual: bool = False
    num_copies: int = 28

    def shape(self, num_rows: int) -> ProductShape:
        return ProductShape(num_rows=num_rows, num_out=self.num_out, num_in=self.num_in, is_gated=self.is_gated)


_MATRICES = (
    _Matrix("qkv", 5120, _HIDDEN),
    _Matrix("o", _HIDDEN, _HIDDEN, has_residual=True),
    _Matrix("gate_up", _MLP, _HIDDEN, is_gated=True),
    _Matrix("down", _HIDDEN, _MLP, has_residual=True),
    _Matrix("lm_head", 128256, _HIDDEN, num_copies=2),
)

# (block_n, block_k, stages, warps, uses the copy engine) by rows of a tile; gated ones have two tiles of block_n.
_PLAIN: dict[int, tuple[tuple[int, int, int, int, bool], ...]] = {
    16: ((64, 128, 5, 4, True), (64, 128, 5, 4, False), (128, 64, 6, 4, True), (128, 128, 5, 4, True)),
    32: ((128, 64, 5, 4, True), (128, 64, 5, 4, False), (64, 128, 4, 4, True), (128, 128, 5, 4, True)),
    64: ((128, 64, 4, 8, True), (128, 64, 4, 4, True), (128, 64, 4, 8, False), (256, 64, 5, 8, True)),
    128: ((128, 64, 3, 8, True), (128, 64, 3, 4, True), (256, 64, 4, 8, True), (64, 64, 4, 4, True)),
    256: ((128, 64, 4, 8, True), (64, 64, 5, 8, True)),
}
_GATED: dict[int, tuple[tuple[int, int, int, int, bool], ...]] = {
    16: ((64, 64, 6, 4, True), (64, 64, 6, 4, False), (64, 128, 5, 4, True)),
    32: ((64, 64, 5, 4, True), (64, 64, 5, 4, False), (64, 128, 4, 4, True)),
    64: ((64, 64, 4, 8, True), (64, 64, 4, 4, True), (64, 64, 4, 8, False), (128, 64, 5, 8, True)),
    128: ((64, 64, 3, 8, True), (128, 64, 4, 8, True), (64, 64, 6, 8, True)),
    256: ((64, 64, 4, 8, True),),
}


def main() -> None:
    args = _arguments()
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    jobs = {
        _job(matrix, config, False) for matrix in _MATRICES for rows in args.rows for config in _configs(matrix, rows)
    }
    jobs |= {_job(matrix, _configs(matrix, rows)[0], True) for matrix in _MATRICES[:4] for rows in args.rows}
    jobs |= {
        _job(matrix, _with_prefetch(rows, steps)[matrix.name], False)
        for matrix in _MATRICES[:4]
        for rows in args.rows
        for steps in (0, 16)
    }
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        failures = [failure for failure in pool.map(_compile, sorted(jobs, key=str)) if failure]
    compiled_s = time.monotonic() - started
    _log(f"{len(jobs)} kernels in {compiled_s:.1f} s, {len(failures)} failed {failures[:3]}")
    weights = {matrix.name: _weights(matrix) for matrix in _MATRICES}
    workspace = ProductWorkspace(_DEVICE)
    products = [
        _measure(matrix, weights[matrix.name], num_rows, workspace) for matrix in _MATRICES for num_rows in args.rows
    ]
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv),
        "failed_to_compile": failures,
        "chains": [_measure_chain(weights, num_rows, products, workspace) for num_rows in args.rows],
        "summary": [_summary(found) for found in products],
        "products": products,
        "compiled_s": round(compiled_s, 1),
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    for line in (*report["summary"], *report["chains"]):
        print(json.dumps(line))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 192, 256])
    parser.add_argument("--processes", type=int, default=14, help="that compile at a time")
    parser.add_argument("--output", help="where the report is written")
    return parser.parse_args()


def _configs(matrix: _Matrix, num_rows: int) -> list[ProductConfig]:
    """The default first; tiles of as many rows as there are, of 192 and 256 also of half; splits that fill one or two
    programs a multiprocessor."""
    tiles = _GATED if matrix.is_gated else _PLAIN
    sizes = [next(size for size in tiles if size >= num_rows)]
    if num_rows > 128:
        sizes.append(128)
    found = [default_config(matrix.shape(num_rows), _NUM_SMS)]
    for size in sizes:
        for block_n, block_k, stages, warps, use_tma in tiles[size]:
            config = ProductConfig(
                rows=size, block_n=block_n, block_k=block_k, num_stages=stages, num_warps=warps, use_tma=use_tma
            )
            num_tiles = -(-matrix.num_out // block_n) * -(-num_rows // size)
            most = max(1, matrix.num_in // block_k // 4)
            splits = {min(most, max(1, _NUM_SMS // num_tiles)), min(most, max(1, 2 * _NUM_SMS // num_tiles))}
            found += [replace(config, num_splits=count) for count in sorted(splits)]
    return list(dict.fromkeys(found))[:10]


def _job(matrix: _Matrix, config: ProductConfig, on_the_fly: bool) -> tuple[bool, bool, bool, ProductConfig]:
    """What distinguishes compiled kernels: splits only in whether there are any."""
    return matrix.is_gated, matrix.has_residual, on_the_fly, replace(config, num_splits=min(config.num_splits, 2))


def _compile(job: tuple[bool, bool, bool, ProductConfig]) -> str | None:
    """Runs the kernels of a job on a small product, once each: they then are in the cache on disk."""
    is_gated, has_residual, on_the_fly, config = job
    matrix = _Matrix("", 256, 1024, is_gated, has_residual)
    try:
        workspace = ProductWorkspace(_DEVICE, num_bytes=8 << 20)
        # A weight that several tiles of rows read is not told to leave the cache.
        for num_rows in (128, 256) if config.rows == 128 else (config.rows,):
            operands = _Operands(matrix, _weights(matrix, 1), num_rows)
            _ours(matrix, operands, workspace, config, on_the_fly=on_the_fly)(0)
        torch.cuda.synchronize()
    except Exception as error:  # A configuration that does not fit is a result, too.
        return f"{job}: {type(error).__name__} {str(error)[:200]}"
    return None


class _Operands:
    """Of a product of num_rows rows."""

    def __init__(self, matrix: _Matrix, weights: list[torch.Tensor], num_rows: int) -> None:
        self.x = _random(num_rows, matrix.num_in)
        self.weights = weights
        self.residual = _random(num_rows, matrix.num_out)
        self.out = torch.empty_like(self.residual)
        squares = self.x.float().pow(2).sum(1, keepdim=True).T / _SQUARE_PARTS
        self.squares = squares.repeat(_SQUARE_PARTS, 1).contiguous()


def _ours(
    matrix: _Matrix,
    operands: _Operands,
    workspace: ProductWorkspace,
    config: ProductConfig,
    *,
    use_pdl: bool = True,
    on_the_fly: bool = False,
) -> Callable[[int], object]:
    x, out, residual = operands.x, operands.out, operands.residual
    squares = None if on_the_fly else operands.squares
    squares_out: torch.Tensor | None = torch.empty(-(-matrix.num_out // config.block_n), x.shape[0], device=_DEVICE)
    if on_the_fly:
        squares_out = None

    def run(layer: int) -> object:
        weight = operands.weights[layer]
        if matrix.is_gated:
            return product_silu(
                x,
                weight,
                workspace,
                norm_eps=_EPS,
                squares_PT=squares,
                out=out,
                use_pdl=use_pdl,
                config=config,
            )
        if matrix.has_residual:
            return product(
                x, weight, workspace, residual_TN=residual, squares_out_PT=squares_out, out=out, use_pdl=use_pdl,
                config=config,
            )  # fmt: skip
        return product(x, weight, workspace, norm_eps=_EPS, squares_PT=squares, out=out, use_pdl=use_pdl, config=config)

    return run


def _theirs(matrix: _Matrix, operands: _Operands) -> Callable[[int], object]:
    """cuBLAS, which adds to the residual itself, and the gate's kernel, which applies the row's norm factor."""

    def run(layer: int) -> object:
        weight = operands.weights[layer]
        if matrix.has_residual:
            return operands.residual.addmm_(operands.x, weight.t())
        result = functional.linear(operands.x, weight)
        return silu_mul(result, unnormed_TD=operands.x, eps=_EPS, use_pdl=True) if matrix.is_gated else result

    return run


def _measure(
    matrix: _Matrix, weights: list[torch.Tensor], num_rows: int, workspace: ProductWorkspace
) -> dict[str, object]:
    operands = _Operands(matrix, weights, num_rows)
    configs = _configs(matrix, num_rows)
    runs: dict[str, Callable[[int], object]] = {
        "cublas": _theirs(matrix, operands),
        "cublas_product": lambda layer: functional.linear(operands.x, operands.weights[layer]),
    }
    errors: dict[str, float] = {}
    for index, config in enumerate(configs):
        run = _ours(matrix, operands, workspace, config)
        try:
            run(0)
            torch.cuda.synchronize()
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            _log(f"{matrix.name} {num_rows} {config}: {str(error)[:100]}")
            continue
        errors[str(index)] = _error(matrix, operands)
        runs[str(index)] = run
    if "0" in runs:
        runs["default_without_pdl"] = _ours(matrix, operands, workspace, configs[0], use_pdl=False)
    micros = _micros(runs, len(weights))
    num_bytes = weights[0].numel() * 2
    ours = sorted(
        (
            {
                "us": micros[i],
                "tb_s": round(num_bytes / micros[i] / 1e6, 2),
                "error": errors[i],
                **asdict(configs[int(i)]),
            }
            for i in errors
        ),
        key=lambda row: row["us"],
    )
    found = {
        "name": matrix.name,
        "rows": num_rows,
        "cublas_with_kernels_us": micros["cublas"],
        "cublas_us": micros["cublas_product"],
        "default_us": micros.get("0"),
        "default_without_pdl_us": micros.get("default_without_pdl"),
        "tflop_s": round(2 * num_rows * weights[0].numel() / ours[0]["us"] / 1e6, 1) if ours else None,
        "configs": ours,
        "default": asdict(configs[0]),
    }
    _log(json.dumps(_summary(found)))
    return found


def _summary(found: dict[str, object]) -> dict[str, object]:
    """One line a matrix and number of rows."""
    best = found["configs"][0] if found["configs"] else {}
    line = {
        key: found[key]
        for key in ("name", "rows", "cublas_with_kernels_us", "cublas_us", "default_us", "default_without_pdl_us")
    }
    return {
        **line,
        "best_us": best.get("us"),
        "tb_s": best.get("tb_s"),
        "tflop_s": found["tflop_s"],
        "error": max((row["error"] for row in found["configs"]), default=None),
        "best": _short(best),
        "default": _short(found["default"]),
    }


def _short(config: dict[str, object]) -> str:
    if not config:
        return "none"
    kind = "tma" if config["use_tma"] else "cp"
    return "r{rows} n{block_n} k{block_k} s{num_splits} st{num_stages} w{num_warps} ".format(**config) + kind


def _error(matrix: _Matrix, operands: _Operands) -> float:
    """Largest difference from float32 in units of the result's largest value."""
    weight = operands.weights[0]
    if matrix.is_gated:
        expected = product_silu_reference(operands.x, weight, _EPS)
    else:
        has_residual = matrix.has_residual
        residual, eps = (operands.residual, None) if has_residual else (None, _EPS)
        expected = product_reference(operands.x, weight, None, residual, eps)
    return round(float((operands.out.float() - expected.float()).abs().max() / expected.float().abs().max()), 5)


def _measure_chain(
    weights: dict[str, list[torch.Tensor]],
    num_rows: int,
    products: Iterable[dict[str, object]],
    workspace: ProductWorkspace,
) -> dict[str, object]:
    """Milliseconds of all of a step's products but the last, 28 layers: ours, and cuBLAS with the gates' kernels."""
    names = ("qkv", "o", "gate_up", "down")
    layers = list(zip(*(weights[name] for name in names), strict=True))
    fields = asdict(ProductConfig(rows=16, block_n=64, block_k=64))
    best = {
        found["name"]: ProductConfig(**{key: found["configs"][0][key] for key in fields})
        for found in products
        if found["rows"] == num_rows and found["configs"]
    }
    runs = {"cublas": _their_chain(layers, num_rows)}
    for name, configs, use_pdl, on_the_fly in (
        ("default", {}, True, False),
        ("default_without_pdl", {}, False, False),
        ("default_on_the_fly", {}, True, True),
        ("default_prefetch_0", _with_prefetch(num_rows, 0), True, False),
        ("default_prefetch_16", _with_prefetch(num_rows, 16), True, False),
        ("best", best, True, False),
    ):
        run = _our_chain(layers, num_rows, workspace, configs, use_pdl, on_the_fly)
        try:
            run(0)
            torch.cuda.synchronize()
            runs[name] = run
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            _log(f"chain {name} {num_rows}: {str(error)[:100]}")
    micros = _micros(runs, 1)
    num_bytes = sum(weight.numel() * 2 for layer in layers for weight in layer)
    line: dict[str, object] = {"chain": num_rows, **{f"{name}_ms": round(us / 1e3, 4) for name, us in micros.items()}}
    fastest = min((us for name, us in micros.items() if name != "cublas"), default=float("inf"))
    line["best_tb_s"] = round(num_bytes / fastest / 1e6, 2)
    _log(json.dumps(line))
    return line


def _with_prefetch(num_rows: int, steps: int) -> dict[str, ProductConfig]:
    """The defaults, but for how much is asked for before the kernel ahead has ended."""
    return {
        matrix.name: replace(default_config(matrix.shape(num_rows), _NUM_SMS), prefetch=steps) for matrix in _MATRICES
    }


def _our_chain(
    layers: list[tuple[torch.Tensor, ...]],
    num_rows: int,
    workspace: ProductWorkspace,
    configs: dict[str, ProductConfig],
    use_pdl: bool,
    on_the_fly: bool,
) -> Callable[[int], object]:
    qkv_out, gated, hidden = _random(num_rows, 5120), _random(num_rows, _MLP), _random(num_rows, _HIDDEN)
    squares: list[torch.Tensor | None] = [None, None]
    if not on_the_fly:
        parts = [_parts(name, num_rows, configs.get(name)) for name in ("o", "down")]
        squares = [torch.ones(count, num_rows, device=_DEVICE) for count in parts]
    after_o, after_down = squares

    def run(_: int) -> object:
        for qkv, o, gate_up, down in layers:
            product(
                hidden, qkv, workspace, norm_eps=_EPS, squares_PT=after_down, out=qkv_out, use_pdl=use_pdl,
                config=configs.get("qkv"),
            )  # fmt: skip
            product(
                qkv_out[:, :_HIDDEN], o, workspace, residual_TN=hidden, squares_out_PT=after_o, out=hidden,
                use_pdl=use_pdl, config=configs.get("o"),
            )  # fmt: skip
            product_silu(
                hidden, gate_up, workspace, norm_eps=_EPS, squares_PT=after_o, out=gated, use_pdl=use_pdl,
                config=configs.get("gate_up"),
            )  # fmt: skip
            product(
                gated, down, workspace, residual_TN=hidden, squares_out_PT=after_down, out=hidden, use_pdl=use_pdl,
                config=configs.get("down"),
            )  # fmt: skip
        return hidden

    return run


def _their_chain(layers: list[tuple[torch.Tensor, ...]], num_rows: int) -> Callable[[int], object]:
    x, heads = _random(num_rows, _HIDDEN), _random(num_rows, _HIDDEN)

    def run(_: int) -> object:
        hidden = x.clone()
        for qkv, o, gate_up, down in layers:
            functional.linear(hidden, qkv)
            # Attention gives a tensor of its own.
            hidden.addmm_(heads, o.t())
            gated = silu_mul(functional.linear(hidden, gate_up), unnormed_TD=hidden, eps=_EPS, use_pdl=True)
            hidden.addmm_(gated, down.t())
        return hidden

    return run


def _parts(name: str, num_rows: int, config: ProductConfig | None) -> int:
    matrix = next(matrix for matrix in _MATRICES if matrix.name == name)
    return num_square_parts(matrix.shape(num_rows), torch.device(_DEVICE), config)


def _micros(runs: dict[str, Callable[[int], object]], num_layers: int, repeats: int = 5) -> dict[str, float]:
    """Microseconds a launch: the fastest replay of a graph that runs every layer once; runs take turns."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    stream = torch.cuda.Stream()
    for name, run in runs.items():
        with torch.cuda.stream(stream):
            run(0)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for layer in range(num_layers):
                    run(layer)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / num_layers)
    return {name: round(min(found), 2) for name, found in times.items()}


def _weights(matrix: _Matrix, count: int | None = None) -> list[torch.Tensor]:
    num_out = matrix.num_out * (1 + matrix.is_gated)
    return [_random(num_out, matrix.num_in).mul_(matrix.num_in**-0.5) for _ in range(count or matrix.num_copies)]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
