"""Each kernel of a decode of DeepSeek-V2-Lite alone on a GPU: microseconds a launch, TB/s of what it has to read.

    PYTHONPATH=src python bench/gpu/moe_step.py --rows 256 > moe-step.json

In bf16 with random weights, 26 layers of routed experts of which as many are allocated as are needed for no cache to
hold them. Launches are captured in a CUDA graph and timed by events, without PDL and, where a kernel takes it, with PDL
behind a launch of itself. GEMMs are torch's: those that a worker tunes are not here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_timing import micros
from gpu.mla_cases import LATENT, RANK, ROPE, SCALE, Pool, rows_of

from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.kernels.attention.decode_attention import plan_decode
from radixmesh.kernels.attention.mla_decode import mla_decode, mla_decode_workspace
from radixmesh.kernels.mla_rows import LatentNorm, head_gemm, head_gemm_reference, mla_rows
from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig, default_config
from radixmesh.kernels.moe.group_rows import group_rows
from radixmesh.kernels.moe.grouped_gemm import combine, down, gate_up_silu, routed_experts
from radixmesh.kernels.moe.route import RouterRule, route
from radixmesh.kernels.moe.router_logits import router_logits
from radixmesh.kernels.moe.row_experts import SharedWeights
from radixmesh.kernels.moe.shared_mlp import shared_mlp
from radixmesh.kernels.rms_norm import rms_norm
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles
from radixmesh.kernels.sampling import sample
from radixmesh.kernels.sampling.sample import SampleScratch, SlotRows, TokenTarget, cut_of, sample_rows
from radixmesh.kernels.sampling.sample_params import Needs, SampleParams
from radixmesh.kernels.silu_mul import silu_mul

_HIDDEN, _MLP, _EXPERTS, _SHARED, _HEADS, _NOPE, _VALUE, _VOCAB = 2048, 1408, 64, 2816, 16, 128, 128, 102400
_RULE = RouterRule(num_picks=6)
_EPS = 1e-6


class Case(NamedTuple):
    """run(turn) launches it; nbytes: what one launch has to read and write."""

    name: str
    run: Callable[[int], object]
    nbytes: float
    turns: int = 8


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def dense(num_rows: int) -> Iterator[Case]:
    """GEMMs, and the norm and the activation between them."""
    x, norm = _random(num_rows, _HIDDEN), _random(_HIDDEN)
    row = 2 * num_rows * _HIDDEN
    for pdl in (False, True):
        yield Case(f"rms_norm pdl={pdl}", lambda _, pdl=pdl: rms_norm(x, norm, _EPS, use_pdl=pdl), 2 * row)
    sizes = {
        "w_in": (_HEADS * (_NOPE + ROPE) + LATENT, _HIDDEN),
        "w_out": (_HIDDEN, _HEADS * _VALUE),
        "shared gate_up": (2 * _SHARED, _HIDDEN),
        "shared down": (_HIDDEN, _SHARED),
        "head": (_VOCAB, _HIDDEN),
    }
    for name, (num_out, num_in) in sizes.items():
        turns = max(2, (160 << 20) // (2 * num_out * num_in))
        weights = [_random(num_out, num_in) for _ in range(turns)]
        rows_in, residual = _random(num_rows, num_in), _random(num_rows, num_out)
        nbytes = 2.0 * (num_out * num_in + num_rows * (num_in + num_out))
        yield Case(f"{name} torch", lambda turn, x=rows_in, w=weights: x @ w[turn].t(), nbytes, turns)
        if name in ("w_out", "shared down"):
            added = residual.clone()
            yield Case(
                f"{name} torch, added",
                lambda turn, x=rows_in, w=weights, out=added: out.addmm_(x, w[turn].t()),
                nbytes,
                turns,
            )
    expand = _random(_HEADS, _NOPE + _VALUE, RANK)
    q, attended = _random(num_rows, _HEADS, _NOPE + ROPE), _random(num_rows, _HEADS, RANK)
    out = _random(num_rows, _HEADS, LATENT)
    key, value = expand[:, :_NOPE].transpose(1, 2), expand[:, _NOPE:]
    nbytes = 2.0 * _HEADS * (_NOPE * RANK + num_rows * (_NOPE + RANK))
    yield Case("keys torch", lambda _: head_gemm_reference(q[..., :_NOPE], key, out[..., :RANK]), nbytes)
    yield Case("keys head_gemm", lambda _: head_gemm(q[..., :_NOPE], key, out[..., :RANK]), nbytes)
    yield Case("values torch", lambda _: head_gemm_reference(attended, value), nbytes)
    yield Case("values head_gemm", lambda _: head_gemm(attended, value), nbytes)


def latents(num_rows: int, lengths: list[int]) -> Iterator[Case]:
    """RoPE with the write of latents, and attention over them."""
    pool = Pool(1 << 20)
    q, kv = _random(num_rows, _HEADS, _NOPE + ROPE), _random(num_rows, LATENT)
    positions = torch.full((num_rows,), 300, device="cuda", dtype=torch.int32)
    slots = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    tables = torch.randperm(num_rows * 512, device="cuda").int().view(num_rows, 512)
    angles = RopeAngles(_random(512, ROPE // 2, dtype=torch.float32), _random(512, ROPE // 2, dtype=torch.float32))
    norm = LatentNorm(_random(RANK), _EPS, True)
    target = KvTarget(positions_T=positions, row_slots_T=slots, page_tables=tables, page_size=1)
    nbytes = 2.0 * num_rows * (2 * _HEADS * ROPE + 2 * LATENT)
    for pdl in (False, True):
        yield Case(
            f"mla_rows pdl={pdl}",
            lambda _, pdl=pdl: mla_rows(q, kv, norm, angles, target, pool.latents_SC, use_pdl=pdl),
            nbytes,
        )
    for length in lengths:
        query, row_slots, lens = rows_of(num_rows, _HEADS, length)
        scattered = pool.tables(num_rows, length)
        # Tokens of a row side by side, as they are of most prompts.
        num_tokens = num_rows * length
        in_order = torch.arange(num_tokens, device="cuda", dtype=torch.int32).view(num_rows, length)
        firsts = range(0, len(pool.latents_SC) - num_tokens + 1, num_tokens)
        aligned = [in_order + first for first in firsts][: len(scattered)]
        workspace = mla_decode_workspace(num_rows, _HEADS, RANK, "cuda")
        plan_decode(lens, workspace)
        for kind, of_turns in (("scattered", scattered), ("side by side", aligned)):
            yield Case(
                f"mla_decode {length} {kind}",
                lambda turn, q=query, tables=of_turns, slots=row_slots, lens=lens, of=workspace: mla_decode(
                    q, pool.latents_SC, tables[turn], slots, lens, 1, SCALE, of
                ),
                2.0 * LATENT * num_rows * length,
                len(of_turns),
            )


def experts(num_rows: int) -> Iterator[Case]:
    """Choice of experts, and their GEMMs."""
    x, turns = _random(num_rows, _HIDDEN), 4
    w_router = [_random(_EXPERTS, _HIDDEN, dtype=torch.float32) for _ in range(turns)]
    nbytes = 4.0 * _EXPERTS * _HIDDEN + 2 * num_rows * _HIDDEN
    for pdl in (False, True):
        yield Case(
            f"router_logits pdl={pdl}", lambda turn, pdl=pdl: router_logits(x, w_router[turn], use_pdl=pdl), nbytes, 4
        )
    logits = [_random(num_rows, _EXPERTS, dtype=torch.float32) for _ in range(turns)]
    routes = [route(of, _RULE) for of in logits]
    config = default_config(num_rows * _RULE.num_picks, _EXPERTS)
    tiles = [group_rows(of.expert_ids_TA, _EXPERTS, config.tile_rows) for of in routes]
    yield Case("route", lambda turn: route(logits[turn], _RULE), 4.0 * num_rows * _EXPERTS, turns)
    yield Case("group_rows", lambda turn: group_rows(routes[turn].expert_ids_TA, _EXPERTS, config.tile_rows), 0, turns)
    num_pairs = num_rows * _RULE.num_picks
    w_gate_up = [_random(_EXPERTS, 2 * _MLP, _HIDDEN).mul_(_HIDDEN**-0.5) for _ in range(2)]
    w_down = [_random(_EXPERTS, _HIDDEN, _MLP).mul_(_MLP**-0.5) for _ in range(2)]
    gated = [gate_up_silu(x, of, num_pairs, w_gate_up[0], config.gate_up) for of in tiles]
    results = down(gated[0], tiles[0], num_pairs, w_down[0], config.down)
    for pdl in (False, True):
        yield Case(
            f"experts gate_up pdl={pdl}",
            lambda turn, pdl=pdl: gate_up_silu(
                x, tiles[turn], num_pairs, w_gate_up[turn % 2], config.gate_up, use_pdl=pdl
            ),
            4.0 * _EXPERTS * _MLP * _HIDDEN,
            turns,
        )
        yield Case(
            f"experts down pdl={pdl}",
            lambda turn, pdl=pdl: down(gated[turn], tiles[turn], num_pairs, w_down[turn % 2], config.down, use_pdl=pdl),
            2.0 * _EXPERTS * _MLP * _HIDDEN,
            turns,
        )
        yield Case(
            f"routed_experts pdl={pdl}",
            lambda turn, pdl=pdl: routed_experts(x, routes[turn], w_gate_up[turn % 2], w_down[turn % 2], use_pdl=pdl),
            6.0 * _EXPERTS * _MLP * _HIDDEN,
            turns,
        )
    yield from _beside(x, w_router, w_gate_up, w_down)
    out = torch.empty_like(x)
    yield Case("combine", lambda _: combine(results, routes[0].weights_TA, x, out), 2.0 * num_pairs * _HIDDEN)
    gate_up = _random(num_rows, 2 * _SHARED)
    yield Case("shared silu_mul", lambda _: silu_mul(gate_up), 6.0 * num_rows * _SHARED)


def _beside(
    x: torch.Tensor, w_router: list[torch.Tensor], w_gate_up: list[torch.Tensor], w_down: list[torch.Tensor]
) -> Iterator[Case]:
    """A whole MLP with shared experts: GEMMs of torch ahead of the routed ones, and kernels of ours beside them."""
    shared = [
        SharedWeights(_random(2 * _SHARED, _HIDDEN).mul_(_HIDDEN**-0.5), _random(_HIDDEN, _SHARED).mul_(_SHARED**-0.5))
        for _ in range(4)
    ]
    norm, residual = _random(_HIDDEN), x.clone()
    nbytes = 6.0 * (_EXPERTS * _MLP + _SHARED) * _HIDDEN

    def in_order(turn: int) -> torch.Tensor:
        normed = rms_norm(x, norm, _EPS, use_pdl=True)
        routes = route(router_logits(normed, w_router[turn], use_pdl=True), _RULE, use_pdl=True)
        gated = silu_mul(normed @ shared[turn].w_gate_up.t())
        residual.addmm_(gated, shared[turn].w_down.t())
        return routed_experts(normed, routes, w_gate_up[turn % 2], w_down[turn % 2], residual_TD=residual, use_pdl=True)

    yield Case("mlp in order", in_order, nbytes, 4)
    for priority in (-1, 0):
        ops = TritonOps(use_pdl=True, side_stream=torch.cuda.Stream(priority=priority))

        def beside(turn: int, ops: TritonOps = ops) -> torch.Tensor:
            normed = ops.rms_norm(x, norm, _EPS)
            started = ops.start_mlp(normed, shared[turn])
            routes = ops.route(ops.router_logits(normed, w_router[turn]), _RULE)
            return ops.experts(
                normed, routes, w_gate_up[turn % 2], w_down[turn % 2], residual_TD=residual, beside=started
            )

        yield Case(f"mlp beside, priority {priority}", beside, nbytes, 4)
    for tile_rows, block in (
        (128, (64, 64, 8, 3)),
        (128, (64, 64, 8, 4)),
        (128, (32, 64, 4, 4)),
        (128, (32, 128, 8, 3)),
        (64, (64, 64, 4, 4)),
        (64, (64, 64, 4, 3)),
        (64, (32, 128, 4, 3)),
    ):
        config = ExpertsConfig(tile_rows=tile_rows, gate_up=GroupedConfig(*block), down=GroupedConfig(*block))
        yield Case(
            f"shared_mlp {tile_rows} {block}",
            lambda turn, config=config: shared_mlp(x, shared[turn], config, use_pdl=True),
            6.0 * _SHARED * _HIDDEN,
            4,
        )


def sampling(num_rows: int) -> Iterator[Case]:
    """Of a token from each row at temperature 1, by logits of some spread."""
    device = torch.device("cuda")
    params = SampleParams.allocate(num_rows, max_total_len=64, max_biases=1, max_suppressed=1, device=device)
    params.temperature_S[:] = 1.0
    params.seed_S.copy_(torch.randint(1 << 62, (num_rows + 1,), device=device))
    scratch = SampleScratch(num_rows, _VOCAB, device, has_penalties=False)
    slots = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    zeros = torch.zeros_like(slots)
    target = TokenTarget(
        ring_RT=zeros[None].clone(),
        ring_index_1=zeros[:1],
        last_tokens_S=torch.zeros(num_rows + 1, device="cuda").int(),
    )
    for spread in (1.0, 4.0):
        logits = [_random(num_rows, _VOCAB) * spread for _ in range(2)]
        for turn, of in enumerate(logits):
            rows = SlotRows(params, slots, zeros + 100 + turn)
            sample_rows(of, rows, scratch, target, Needs.NOISE)
        yield Case(
            f"sample {spread}",
            lambda turn, logits=logits: sample_rows(
                logits[turn], SlotRows(params, slots, zeros), scratch, target, Needs.NOISE
            ),
            4.0 * num_rows * _VOCAB,
            2,
        )
        yield Case(
            f"sample greedily {spread}",
            lambda turn, logits=logits: sample_rows(
                logits[turn], SlotRows(params, slots, zeros), scratch, target, Needs.NOTHING
            ),
            2.0 * num_rows * _VOCAB,
            2,
        )
    print(json.dumps({"sampling": str(cut_of(num_rows, _VOCAB)), "block": sample.BLOCK}), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 384, 512], help="tokens that a row sees")
    parser.add_argument("--parts", nargs="+", default=["dense", "latents", "experts", "sampling"])
    args = parser.parse_args()
    rows = []
    for num_rows in args.rows:
        of_parts = {
            "dense": lambda rows=num_rows: dense(rows),
            "latents": lambda rows=num_rows: latents(rows, args.lengths),
            "experts": lambda rows=num_rows: experts(rows),
            "sampling": lambda rows=num_rows: sampling(rows),
        }
        for part in args.parts:
            for case in of_parts[part]():
                try:
                    us = micros(case.run, case.turns, num_replays=8)
                except Exception as error:  # One kernel that fails takes no figure from the others.
                    rows.append({"rows": num_rows, "kernel": case.name, "error": str(error)[:200]})
                else:
                    rows.append(
                        {
                            "rows": num_rows,
                            "kernel": case.name,
                            "us": round(us, 2),
                            "tb_s": round(case.nbytes / us * 1e-6, 2),
                        }
                    )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
