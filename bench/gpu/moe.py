"""Routed experts of one layer on a GPU: the whole and each part, by number of rows, in several configurations.

    PYTHONPATH=src python bench/gpu/moe.py --output bench/results/h200-moe-kernels.json

Shapes are those of Qwen3-30B-A3B and DeepSeek-V2-Lite (its shared experts apart), in bf16, with random weights and
logits: every launch routes other rows, so that the experts that are hit change and no cache holds them. Launches are
captured in a CUDA graph and timed by events. Prints JSON: microseconds a layer, TB/s of the weights of the experts that
are hit, TFLOP/s of the pairs that there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_timing import micros

from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig, default_config
from radixmesh.kernels.moe.group_rows import group_rows
from radixmesh.kernels.moe.grouped_gemm import (
    down,
    gate_up_silu,
    routed_experts,
    routed_experts_reference,
)
from radixmesh.kernels.moe.route import RouterRule, Routes, route


class _Shape(NamedTuple):
    hidden: int
    mlp: int
    num_experts: int
    rule: RouterRule


_SHAPES = {
    "qwen3-30b-a3b": _Shape(2048, 768, 128, RouterRule(num_picks=8, is_normalised=True)),
    "deepseek-v2-lite": _Shape(2048, 1408, 64, RouterRule(num_picks=6)),
}
# Columns, depth, warps, stages of a program, and whether TMA loads its weights, if not False.
_Block = tuple[int, int, int, int] | tuple[int, int, int, int, bool]
_SMALL = ((32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (32, 256, 4, 3))
_LARGE = ((64, 64, 4, 4), (128, 64, 8, 3), (64, 64, 8, 3), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3))
_BY_TMA = (
    (128, 64, 8, 3, True),
    (128, 64, 8, 4, True),
    (256, 64, 8, 3, True),
    (64, 64, 8, 4, True),
    (128, 128, 8, 2, True),
)


class _Layer:
    """Weights of a layer, and routed rows for launches in turn."""

    def __init__(self, shape: _Shape, num_rows: int, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.shape, self.num_rows = shape, num_rows
        self.w_gate_up, self.w_down = weights
        self.num_pairs = num_rows * shape.rule.num_picks
        self.num_turns = 8 if num_rows <= 64 else 3
        self.x = [_random(num_rows, shape.hidden) for _ in range(self.num_turns)]
        self.logits = [_random(num_rows, shape.num_experts) for _ in range(self.num_turns)]
        self.routes = [route(logits, shape.rule) for logits in self.logits]

    def num_hit(self) -> float:
        """Experts that are hit, on average."""
        return sum(len(routes.expert_ids_TA.unique()) for routes in self.routes) / self.num_turns

    def whole(self, config: ExpertsConfig, *, use_pdl: bool = False) -> Callable[[int], object]:
        def run(turn: int) -> object:
            routes = route(self.logits[turn], self.shape.rule, use_pdl=use_pdl)
            return routed_experts(self.x[turn], routes, self.w_gate_up, self.w_down, config=config, use_pdl=use_pdl)

        return run

    def parts(self, config: ExpertsConfig) -> dict[str, Callable[[int], object]]:
        experts, tile_rows = self.shape.num_experts, config.tile_rows
        tiles = [group_rows(routes.expert_ids_TA, experts, tile_rows) for routes in self.routes]
        gated = [
            gate_up_silu(x, of, self.num_pairs, self.w_gate_up, config.gate_up)
            for x, of in zip(self.x, tiles, strict=True)
        ]
        return {
            "route": lambda turn: route(self.logits[turn], self.shape.rule),
            "group": lambda turn: group_rows(self.routes[turn].expert_ids_TA, experts, tile_rows),
            "gate_up": lambda turn: gate_up_silu(
                self.x[turn], tiles[turn], self.num_pairs, self.w_gate_up, config.gate_up
            ),
            "down": lambda turn: down(gated[turn], tiles[turn], self.num_pairs, self.w_down, config.down),
        }

    def figures(self, us: float) -> dict[str, float]:
        hidden, mlp, *_ = self.shape
        nbytes, flop = 6 * hidden * mlp * self.num_hit(), 6 * hidden * mlp * self.num_pairs
        return {"us": round(us, 2), "tb_s": round(nbytes / us * 1e-6, 3), "tflop_s": round(flop / us * 1e-6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 64, 256, 512, 4096])
    parser.add_argument("--shapes", nargs="*", default=list(_SHAPES), choices=_SHAPES)
    parser.add_argument("--budget-s", type=float, default=150.0, help="for trying configurations")
    parser.add_argument("--output", help="where the report is written")
    args = parser.parse_args()
    started = time.monotonic()
    deadline = started + args.budget_s
    rows = []
    for name in args.shapes:
        shape = _SHAPES[name]
        weights = _weights(shape)
        _check(shape, weights)
        for num_rows in args.rows:
            rows.append({"shape": name, **_measure(_Layer(shape, num_rows, weights), deadline)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        del weights
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(sys.argv),
        "rows": rows,
        "seconds": round(time.monotonic() - started, 1),
    }
    text = json.dumps(report, indent=1)
    if args.output:
        Path(args.output).write_text(text + "\n", encoding="utf-8")
    print(text)


def _measure(layer: _Layer, deadline: float) -> dict[str, object]:
    """The default configuration, each part of it, and the best of those that there is time to try."""
    default = default_config(layer.num_pairs, layer.shape.num_experts)
    parts = {name: micros(run, layer.num_turns) for name, run in layer.parts(default).items()}
    tried: dict[str, dict[str, float]] = {}
    best = default
    for tile_rows in _tile_rows(layer):
        blocks = _tried_blocks(layer, tile_rows, deadline)
        if blocks:
            tried[str(tile_rows)] = {
                f"{part} {'/'.join(map(str, block))}": round(us, 2) for (part, block), us in blocks.items()
            }
            chosen = {
                part: min(
                    (block for of, block in blocks if of == part), key=lambda block, part=part: blocks[part, block]
                )
                for part in ("gate_up", "down")
            }
            config = ExpertsConfig(
                tile_rows=tile_rows, **{part: GroupedConfig(*block) for part, block in chosen.items()}
            )
            if micros(layer.whole(config), layer.num_turns) < micros(layer.whole(best), layer.num_turns):
                best = config
    return {
        "rows": layer.num_rows,
        "experts_hit": round(layer.num_hit(), 1),
        "default": {"config": str(default), **layer.figures(micros(layer.whole(default), layer.num_turns))},
        "best": {"config": str(best), **layer.figures(micros(layer.whole(best), layer.num_turns))},
        "default_pdl": layer.figures(micros(layer.whole(default, use_pdl=True), layer.num_turns)),
        "parts_us": {name: round(us, 2) for name, us in parts.items()},
        "tried_us": tried,
    }


def _tile_rows(layer: _Layer) -> tuple[int, ...]:
    average = layer.num_pairs / layer.shape.num_experts
    return (16,) if average <= 4 else (16, 32) if average <= 16 else (32, 64) if average <= 48 else (64, 128)


def _tried_blocks(layer: _Layer, tile_rows: int, deadline: float) -> dict[tuple[str, _Block], float]:
    """Microseconds of a part in a block; those that the GPU has no room for are left out."""
    times_us: dict[tuple[str, _Block], float] = {}
    for block in _SMALL if tile_rows <= 32 else _LARGE if tile_rows <= 64 else (*_BY_TMA, *_LARGE):
        if time.monotonic() > deadline:
            break
        config = GroupedConfig(*block)
        try:
            parts = layer.parts(ExpertsConfig(tile_rows=tile_rows, gate_up=config, down=config))
            for part in ("gate_up", "down"):
                times_us["gate_up" if part == "gate_up" else "down", block] = micros(parts[part], layer.num_turns)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            print(f"{block}: {error}"[:200], file=sys.stderr, flush=True)
    return {key: us for key, us in times_us.items() if ("down", key[1]) in times_us}


def _weights(shape: _Shape) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, mlp, num_experts, _ = shape
    w_gate_up = _random(num_experts, 2 * mlp, hidden).mul_(hidden**-0.5)
    return w_gate_up, _random(num_experts, hidden, mlp).mul_(mlp**-0.5)


def _check(shape: _Shape, weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raises RuntimeError unless a few rows are what torch computes, in each default configuration."""
    for num_rows in (1, 40, 300, 1200):
        x = _random(num_rows, shape.hidden)
        routes = route(_random(num_rows, shape.num_experts), shape.rule)
        got = routed_experts(x, routes, *weights)[-24:].float()
        want = routed_experts_reference(x[-24:], Routes(*(part[-24:] for part in routes)), *weights).float()
        error = float((got - want).norm() / want.norm())
        if not error < 0.01:
            raise RuntimeError(f"{num_rows} rows differ from torch's by {error:.3g}")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
