"""The routed MLP of one layer for very few rows on a GPU, from the residual to the residual: in few launches, and part
by part.

    PYTHONPATH=src python bench/gpu/moe_rows.py > moe-rows.json

Shapes, weights and timing as in moe.py, with the norm, the router and an MLP beside the experts. Every launch has other
rows and another MLP beside, so that no cache holds what is read. Prints JSON: microseconds a layer, and TB/s of all
weights that are read, for each configuration with and without PDL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_timing import micros

from radixmesh.kernels import gemv
from radixmesh.kernels.moe.grouped_gemm import routed_experts
from radixmesh.kernels.moe.route import RouterRule, route
from radixmesh.kernels.moe.router_logits import router_logits, router_logits_reference
from radixmesh.kernels.moe.row_experts import (
    RowExpertsConfig,
    RowNorm,
    SharedWeights,
    row_experts,
    row_experts_reference,
)
from radixmesh.kernels.rms_norm import rms_norm
from radixmesh.kernels.silu_mul import silu_mul

_SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 0, RouterRule(num_picks=8, is_normalised=True)),
    "deepseek-v2-lite": (2048, 1408, 64, 2, RouterRule(num_picks=6)),
}
_CONFIGS = tuple(
    RowExpertsConfig(gate_up_columns=sizes[0], gate_up_warps=sizes[1], down_columns=sizes[2], down_warps=sizes[3])
    for sizes in ((2, 4, 2, 2), (2, 2, 2, 2), (1, 2, 2, 1), (2, 2, 1, 1), (2, 4, 2, 1), (2, 2, 4, 1))
)
_TURNS, _EPS = 8, 1e-6


class _Layer(NamedTuple):
    """x [turns, T, D]; experts: gate and up, down."""

    x: torch.Tensor
    norm: RowNorm
    w_router_ED: torch.Tensor
    rule: RouterRule
    experts: tuple[torch.Tensor, torch.Tensor]
    shared: list[SharedWeights] | None

    def shared_of(self, turn: int) -> SharedWeights | None:
        return None if self.shared is None else self.shared[turn % len(self.shared)]

    def fused(self, turn: int, *, use_pdl: bool, config: RowExpertsConfig | None = None) -> torch.Tensor:
        x_TD = self.x[turn]
        logits_TE = router_logits(x_TD, self.w_router_ED, *self.norm, use_pdl=use_pdl)
        routes = route(logits_TE, self.rule, use_pdl=use_pdl)
        return row_experts(
            x_TD,
            routes,
            *self.experts,
            norm=self.norm,
            shared=self.shared_of(turn),
            residual_TD=x_TD,
            use_pdl=use_pdl,
            config=config,
        )

    def in_parts(self, turn: int, *, use_pdl: bool) -> torch.Tensor:
        x_TD, shared = self.x[turn], self.shared_of(turn)
        normed_TD = rms_norm(x_TD, *self.norm, use_pdl=use_pdl)
        routes = route(router_logits(normed_TD, self.w_router_ED, use_pdl=use_pdl), self.rule)
        if shared is not None:
            gated_TF = silu_mul(gemv.linear(normed_TD, shared.w_gate_up, use_pdl=use_pdl), eps=_EPS, use_pdl=use_pdl)
            x_TD = gemv.linear(gated_TF, shared.w_down, residual_TN=x_TD, use_pdl=use_pdl)
        return routed_experts(normed_TD, routes, *self.experts, residual_TD=x_TD)

    def wanted(self, turn: int) -> torch.Tensor:
        x_TD = self.x[turn]
        routes = route(router_logits_reference(x_TD, self.w_router_ED, *self.norm), self.rule)
        return row_experts_reference(
            x_TD, routes, *self.experts, norm=self.norm, shared=self.shared_of(turn), residual_TD=x_TD.clone()
        )


def main() -> None:
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "command": " ".join(sys.argv)}
    for name, sizes in _SHAPES.items():
        layer = _create(*sizes)
        _check(layer)
        report[name] = _measure(layer)
        print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)
        del layer
    print(json.dumps(report, indent=1))


def _measure(layer: _Layer) -> dict[str, object]:
    (num_experts, hidden, mlp), shared = layer.experts[1].shape, layer.shared_of(0)
    wide = layer.rule.num_picks * mlp + (0 if shared is None else shared.w_down.shape[1])
    nbytes = 6 * hidden * wide + 4 * num_experts * hidden
    times: dict[str, float] = {}
    for use_pdl in (False, True):
        label = ", PDL" if use_pdl else ""
        times[f"parts{label}"] = micros(partial(layer.in_parts, use_pdl=use_pdl), _TURNS)
        for config in (None, *_CONFIGS) if use_pdl else (None,):
            key = "default" if config is None else "/".join(map(str, astuple(config)))
            times[key + label] = micros(partial(layer.fused, config=config, use_pdl=use_pdl), _TURNS)
    return {
        "us": {key: round(us, 2) for key, us in times.items()},
        "tb_s": {key: round(nbytes / us * 1e-6, 3) for key, us in times.items()},
        "parts_us": {key: round(micros(run, _TURNS), 2) for key, run in _parts(layer).items()},
    }


def _parts(layer: _Layer) -> dict[str, Callable[[int], object]]:
    hidden = layer.experts[1].shape[1]
    logits_TE = router_logits(layer.x[0], layer.w_router_ED, *layer.norm)
    routes = route(logits_TE, layer.rule)

    def experts(turn: int) -> object:
        return row_experts(layer.x[turn], routes, *layer.experts, shared=layer.shared_of(turn))

    parts: dict[str, Callable[[int], object]] = {
        "router_logits": lambda turn: router_logits(layer.x[turn], layer.w_router_ED, *layer.norm),
        "route": lambda turn: route(logits_TE, layer.rule),
        "row_experts": experts,
    }
    for num_rows in (2, 32, 256, 512, 8192):
        rows_TD = _random(num_rows, hidden)
        for where, logits in (("", router_logits), (" in torch", router_logits_reference)):
            parts[f"router_logits{where}, {num_rows} rows"] = partial(_logits, logits, rows_TD, layer.w_router_ED)
    return parts


def _logits(of: Callable[..., object], x_TD: torch.Tensor, w_ED: torch.Tensor, turn: int) -> object:
    return of(x_TD, w_ED)


def _create(hidden: int, mlp: int, num_experts: int, num_parts: int, rule: RouterRule) -> _Layer:
    wide = num_parts * mlp
    shared = [
        SharedWeights(_random(2 * wide, hidden).mul_(hidden**-0.5), _random(hidden, wide).mul_(mlp**-0.5))
        for _ in range(4)
    ]
    return _Layer(
        x=_random(_TURNS, 1, hidden),
        norm=RowNorm(_random(hidden).abs_(), _EPS),
        w_router_ED=torch.randn(num_experts, hidden, device="cuda").mul_(hidden**-0.5),
        rule=rule,
        experts=(
            _random(num_experts, 2 * mlp, hidden).mul_(hidden**-0.5),
            _random(num_experts, hidden, mlp).mul_(mlp**-0.5),
        ),
        shared=shared if num_parts else None,
    )


def _check(layer: _Layer) -> None:
    """Raises RuntimeError unless the few launches give what torch does, with and without PDL; and so do the logits."""
    for use_pdl in (False, True):
        for turn in range(2):
            got, want = layer.fused(turn, use_pdl=use_pdl).float(), layer.wanted(turn).float()
            error = float((got - want).norm() / want.norm())
            if not error < 0.01:
                raise RuntimeError(f"a row differs from torch's by {error:.3g}, PDL {use_pdl}")
    for num_rows in (2, 40, 1100):
        x_TD = _random(num_rows, layer.w_router_ED.shape[1])
        want = x_TD.double() @ layer.w_router_ED.double().t()
        error = float((router_logits(x_TD, layer.w_router_ED).sum(dim=0) - want).abs().max())
        if not error < 1e-4:
            raise RuntimeError(f"logits of {num_rows} rows differ from torch's by {error:.3g}")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
