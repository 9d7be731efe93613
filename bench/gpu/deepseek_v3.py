"""A layer of DeepSeek-V3 at full width, alone on a GPU, with random FP8 weights: attention, router and experts by rows.

    PYTHONPATH=src python bench/gpu/deepseek_v3.py --processes 12 --output bench/results/h200-deepseek-v3-layer.json

Rows are those of a decode step, each with so many cached tokens. Launches are captured in a CUDA graph and timed by
events; each routes other rows, so that the experts that are hit change. The report has microseconds beside the least
that reading weights and latents takes at the memory's peak (4.8 TB/s), or the operations take at the tensor cores'
(1,979 TFLOP/s in FP8, 989 in bf16), and configurations of the grouped GEMMs, as many as there was time for.
With --processes, these are compiled by so many processes first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_timing import micros

from radixmesh.daemons.worker.cuda.attention.backend import StepAttention
from radixmesh.daemons.worker.cuda.experts import Fp8Experts
from radixmesh.daemons.worker.cuda.fp8.gemm import TritonFp8Gemm, tried_library
from radixmesh.daemons.worker.cuda.fp8.ops import TritonFp8Ops
from radixmesh.daemons.worker.cuda.linear import Fp8Linear, Norm, Residual
from radixmesh.daemons.worker.cuda.model.mla import LatentQuery, MlaAttention
from radixmesh.daemons.worker.cuda.model.routed_mlp import RoutedMlp, SharedExpert
from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.kernels.attention.decode_attention import plan_decode
from radixmesh.kernels.attention.mla_decode import mla_decode, mla_decode_workspace
from radixmesh.kernels.fp8.quantize_rows import quantize_rows
from radixmesh.kernels.fp8.quantized import FP8, FP8_MAX, GROUP, QuantizedMatrix, QuantizedRows
from radixmesh.kernels.mla_rows import LatentNorm
from radixmesh.kernels.moe.experts_config import GroupedConfig
from radixmesh.kernels.moe.fp8_grouped_gemm import (
    fp8_down,
    fp8_gate_up_silu,
    fp8_routed_experts,
    fp8_routed_experts_reference,
)
from radixmesh.kernels.moe.group_rows import ExpertTiles, group_rows
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import RouterRule, Routes
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles

_HIDDEN, _MLP, _EXPERTS, _PICKS = 7168, 2048, 256, 8
_HEADS, _QUERY, _RANK, _NOPE, _ROPE, _VALUE = 128, 1536, 512, 128, 64, 128
_LATENT = _RANK + _ROPE
_PICKED = {"num_picks": _PICKS, "num_groups": 8, "num_picked_groups": 4, "group_best": 2}
_RULE = RouterRule(is_sigmoid=True, is_normalised=True, weight_scale=2.5, **_PICKED)
_MEMORY_TB_S, _FP8_TFLOP_S, _BF16_TFLOP_S = 4.8, 1979.0, 989.0
_TURNS = 4
# Slots of a tile, then warps and stages of gate and up, and columns, warps and stages of down.
_TILES = {1: (16,), 32: (16,), 128: (16, 32), 512: (32, 64)}
_GATE_UP = ((4, 3), (4, 4), (4, 5), (8, 3), (8, 4))
_DOWN = ((64, 4, 4), (64, 4, 6), (64, 4, 8), (128, 4, 4), (128, 4, 5), (128, 8, 4))

Record = dict[str, object]
Launch = Callable[[int], object]


class _Decodes(StepAttention):
    """Each row attends to its own sequence, whose length is the same in all."""

    def __init__(self, num_rows: int, length: int) -> None:
        self.lens_T = torch.full((num_rows,), length, device="cuda", dtype=torch.int32)
        self.slots_T = torch.arange(num_rows, device="cuda", dtype=torch.int32)
        order = torch.randperm(num_rows * length, device="cuda").int()
        self.tables = order.view(num_rows, length)
        self.target = KvTarget(self.lens_T - 1, self.slots_T, self.tables, 1)
        self._workspace = mla_decode_workspace(num_rows, _HEADS, _RANK, "cuda", torch.bfloat16)
        plan_decode(self.lens_T, self._workspace)

    def attend(self, query_THd: torch.Tensor, keys_SKd: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        latents_SC, scale = keys_SKd.squeeze(1), (_NOPE + _ROPE) ** -0.5
        return mla_decode(
            query_THd, latents_SC, self.tables, self.slots_T, self.lens_T, 1, scale, self._workspace, use_pdl=True
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: MlaAttention
    mlp: RoutedMlp
    experts: QuantizedExperts
    ops: TritonOps

    @classmethod
    def create(cls, num_tokens: int) -> _Layer:
        ops = TritonOps(use_pdl=True)
        gemm = TritonFp8Gemm(use_pdl=True)
        fp8 = TritonFp8Ops(ops, tried_library(gemm, torch.device("cuda")), use_pdl=True)

        def linear(num_out: int, num_in: int) -> Fp8Linear:
            data = _fp8(num_out, num_in)
            scales = _scales(-(-num_out // GROUP), -(-num_in // GROUP), num_in=num_in)
            return Fp8Linear(fp8, QuantizedMatrix(data, scales, GROUP, True))

        experts = _experts(_EXPERTS)
        angles = torch.rand(num_tokens, _ROPE // 2, device="cuda")
        attention = MlaAttention(
            norm=Norm(_ones(_HIDDEN), 1e-6),
            w_in=linear(_QUERY + _LATENT, _HIDDEN),
            query=LatentQuery(norm_Q=_ones(_QUERY), eps=1e-6, w_query=linear(_HEADS * (_NOPE + _ROPE), _QUERY)),
            latent_norm=LatentNorm(_ones(_RANK), 1e-6, True),
            w_expand_HER=_random(_HEADS, _NOPE + _VALUE, _RANK).mul_(_RANK**-0.5),
            nope_dim=_NOPE,
            w_out=linear(_HIDDEN, _HEADS * _VALUE),
            angles=RopeAngles(angles.cos(), angles.sin()),
            latents_S1C=_random(num_tokens, 1, _LATENT),
            ops=ops,
        )
        mlp = RoutedMlp(
            norm_D=_ones(_HIDDEN),
            eps=1e-6,
            w_router_ED=torch.randn(_EXPERTS, _HIDDEN, device="cuda") * _HIDDEN**-0.5,
            rule=_RULE,
            experts=Fp8Experts(fp8, experts),
            shared=SharedExpert(gate_up=linear(2 * _MLP, _HIDDEN), down=linear(_HIDDEN, _MLP), w_gate_1D=None),
            ops=ops,
            b_router_E=torch.zeros(_EXPERTS, device="cuda"),
        )
        return cls(attention, mlp, experts, ops)


def _measure(layer: _Layer, num_rows: int, length: int, deadline: float) -> Record:
    """The parts of a layer, the whole, and the best configuration of the experts."""
    rows = [_random(num_rows, _HIDDEN) for _ in range(_TURNS)]
    step = _Decodes(num_rows, length)
    mlp, ops = layer.mlp, layer.ops

    def attention(turn: int) -> object:
        layer.attention.run(Residual(rows[turn]), step.target, step)
        return rows[turn]

    def routed(turn: int) -> Routes:
        normed_TD = ops.rms_norm(rows[turn], mlp.norm_D, mlp.eps)
        return ops.route(ops.router_logits(normed_TD, mlp.w_router_ED), _RULE, mlp.b_router_E)

    def whole(turn: int) -> object:
        residual = Residual(rows[turn])
        layer.attention.run(residual, step.target, step)
        mlp.run(residual)
        return residual.rows()

    def shared(turn: int) -> object:
        residual = Residual(rows[turn])
        assert mlp.shared is not None
        mlp.shared.down.add_gated_to(residual, mlp.shared.gate_up.multiplied(rows[turn]), mlp.eps)
        return residual.rows()

    routes = [routed(turn) for turn in range(_TURNS)]
    hit = sum(len(of.expert_ids_TA.unique()) for of in routes) / _TURNS
    expert_bytes, expert_flop = 3 * _HIDDEN * _MLP, 6 * _HIDDEN * _MLP
    projections = _HIDDEN * (_QUERY + _LATENT) + _QUERY * _HEADS * (_NOPE + _ROPE) + _HEADS * _VALUE * _HIDDEN
    expansions = _HEADS * (_NOPE + _VALUE) * _RANK
    pairs = num_rows * length
    attention_us = max(
        (projections + 2 * expansions + 2 * _LATENT * pairs) / _MEMORY_TB_S * 1e-6,
        2 * num_rows * projections / _FP8_TFLOP_S * 1e-6
        + 2 * (num_rows * expansions + (_LATENT + _RANK) * _HEADS * pairs) / _BF16_TFLOP_S * 1e-6,
    )
    experts_us = max(hit * expert_bytes / _MEMORY_TB_S * 1e-6, num_rows * _PICKS * expert_flop / _FP8_TFLOP_S * 1e-6)
    shared_us = max(expert_bytes / _MEMORY_TB_S * 1e-6, num_rows * expert_flop / _FP8_TFLOP_S * 1e-6)
    router_us = 4 * _HIDDEN * _EXPERTS / _MEMORY_TB_S * 1e-6
    experts = _part(lambda turn: fp8_routed_experts(rows[turn], routes[turn], layer.experts, use_pdl=True), experts_us)
    record: Record = {
        "rows": num_rows,
        "kv": length,
        "experts_hit": round(hit, 1),
        "attention": _part(attention, attention_us),
        "router": _part(routed, router_us),
        "shared_expert": _part(shared, shared_us),
        "experts": experts,
        "layer": _part(whole, attention_us + router_us + shared_us + experts_us),
    }
    return record | {"experts_by_config_us": _tried(layer.experts, rows, routes, num_rows, deadline)}


def _tried(
    experts: QuantizedExperts, rows: list[torch.Tensor], routes: list[Routes], num_rows: int, deadline: float
) -> Record:
    """Of grouped GEMMs alone, by tile and configuration."""
    times: Record = {}
    quantized = [quantize_rows(of, is_grouped=True) for of in rows]
    for tile_rows in _TILES[num_rows]:
        tiles = [group_rows(of.expert_ids_TA, _EXPERTS, tile_rows) for of in routes]
        for part in (*_GATE_UP, *_DOWN):
            if time.monotonic() > deadline:
                return times
            name = f"{'gate_up' if len(part) == 2 else 'down'} {tile_rows}: {'/'.join(map(str, part))}"
            try:
                times[name] = round(micros(_grouped(experts, quantized, tiles, num_rows * _PICKS, part), _TURNS), 1)
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                times[name] = f"{type(error).__name__}: {error}"[:100]
    return times


def _grouped(
    experts: QuantizedExperts,
    rows: list[QuantizedRows],
    tiles: list[ExpertTiles],
    num_pairs: int,
    part: tuple[int, ...],
) -> Launch:
    """Gate and up in (warps, stages), or down in (columns, warps, stages)."""
    if len(part) == 2:
        config = GroupedConfig(GROUP, GROUP, *part)
        return lambda turn: fp8_gate_up_silu(rows[turn], tiles[turn], num_pairs, experts, config)
    first = GroupedConfig(GROUP, GROUP, 4, 3)
    gated = [fp8_gate_up_silu(x, of, num_pairs, experts, first) for x, of in zip(rows, tiles, strict=True)]
    config = GroupedConfig(part[0], GROUP, *part[1:])
    return lambda turn: fp8_down(gated[turn], tiles[turn], num_pairs, experts, config, torch.bfloat16)


def _part(run: Launch, least_us: float) -> Record:
    try:
        us = micros(run, _TURNS)
    except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"us": round(us, 1), "least_us": round(least_us, 1), "share": round(least_us / us, 3)}


def _check(experts: QuantizedExperts) -> float:
    """Largest error of a few rows against torch's, relative. Raises RuntimeError where it is not FP8's."""
    worst = 0.0
    for num_rows in (1, 32, 512):
        x_TD = _random(num_rows, _HIDDEN)
        ids_TA = torch.rand(num_rows, _EXPERTS, device="cuda").argsort(dim=1)[:, :_PICKS].int().contiguous()
        routes = Routes(ids_TA, torch.rand(num_rows, _PICKS, device="cuda"))
        got = fp8_routed_experts(x_TD, routes, experts)[-4:].float()
        want = fp8_routed_experts_reference(x_TD[-4:], Routes(*(part[-4:] for part in routes)), experts).float()
        worst = max(worst, float((got - want).norm() / want.norm()))
    if not worst < 0.05:
        raise RuntimeError(f"experts differ from torch's by {worst:.3g}")
    return worst


def _compile(index: int, count: int) -> None:
    """This process's share of the grouped GEMMs, with few experts: kernels are the same for any number of them."""
    experts = _experts(_PICKS)
    ids_TA = torch.arange(_PICKS, device="cuda", dtype=torch.int32)[None]
    rows = quantize_rows(_random(1, _HIDDEN), is_grouped=True)
    work = list(itertools.product(sorted({t for tiles in _TILES.values() for t in tiles}), (*_GATE_UP, *_DOWN)))
    for tile_rows, part in work[index::count]:
        tiles = group_rows(ids_TA, _PICKS, tile_rows)
        try:
            _grouped(experts, [rows], [tiles], _PICKS, part)(0)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            print(f"{tile_rows} {part}: {error}"[:160], file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128, 512], choices=sorted(_TILES))
    parser.add_argument("--kv", type=int, default=2048, help="cached tokens of a row")
    parser.add_argument("--processes", type=int, default=0, help="that compile configurations first")
    parser.add_argument("--budget-s", type=float, default=60.0, help="from the start, for trying configurations")
    parser.add_argument("--share", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--output", help="where the report is written")
    args = parser.parse_args()
    if args.share is not None:
        _compile(*args.share)
        return
    started = time.monotonic()
    command = [sys.executable, __file__, "--share"]
    helpers = [subprocess.Popen([*command, str(index), str(args.processes)]) for index in range(args.processes)]
    layer = _Layer.create(max(args.rows) * args.kv)
    error = _check(layer.experts)
    for helper in helpers:
        helper.wait()
    report: Record = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "command": " ".join(["python", *sys.argv]),
        "error_of_experts": error,
        "ready_s": round(time.monotonic() - started, 1),
    }
    rows: list[Record] = []
    for num_rows in args.rows:
        rows.append(_measure(layer, num_rows, args.kv, started + args.budget_s))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if args.output:
            done = {"rows": rows, "gib": torch.cuda.max_memory_allocated() / 2**30}
            seconds = round(time.monotonic() - started, 1)
            Path(args.output).write_text(json.dumps(report | done | {"seconds": seconds}) + "\n", encoding="utf-8")


def _experts(num_experts: int) -> QuantizedExperts:
    experts = QuantizedExperts.empty(num_experts, _HIDDEN, _MLP, torch.device("cuda"))
    for expert in range(num_experts):
        experts.w_gate_up_E2FD[expert].view(torch.uint8).copy_(_fp8(2 * _MLP, _HIDDEN).view(torch.uint8))
        experts.w_down_EDF[expert].view(torch.uint8).copy_(_fp8(_HIDDEN, _MLP).view(torch.uint8))
    for scales, num_in in ((experts.gate_up_scales_E2HG, _HIDDEN), (experts.down_scales_EGH, _MLP)):
        scales.copy_(_scales(*scales.shape, num_in=num_in))
    return experts


def _fp8(num_out: int, num_in: int) -> torch.Tensor:
    return (torch.randn(num_out, num_in, device="cuda") * 100).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _scales(*shape: int, num_in: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda").uniform_(0.5, 1.5) * (num_in**-0.5 / 100)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
