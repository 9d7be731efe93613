"""Attention over latents (MLA) on a GPU, by configuration: TB/s of decodes, TFLOP/s of shared prefixes and of chunks.

    PYTHONPATH=src python bench/gpu/mla.py --processes 6 --flashinfer-s 100 --output bench/results/h200-mla.json

Launches are captured in a CUDA graph and timed by events; each reads other tokens of the pool, so that no cache holds
them. Bytes are those of the latents and RoPE keys that rows have to see, a prefix counted once for its group;
operations those of the pairs of a query and a token that it sees, absorbed: 2 (C + R) a head.
With --processes, kernels are compiled by so many processes first. With --flashinfer-s, FlashInfer's FA3 template of MLA
is compiled meanwhile, and measured beside ours if that took no longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_timing import micros
from gpu.mla_cases import LATENT, RANK, ROPE, SCALE, Pool, Record, check, figures, rows_of

from radixmesh.kernels.attention.decode_attention import plan_decode
from radixmesh.kernels.attention.extend_attention import ExtendConfig
from radixmesh.kernels.attention.mla_decode import (
    mla_decode,
    mla_decode_workspace,
    mla_shared_decode,
    mla_shared_workspace,
)
from radixmesh.kernels.attention.mla_extend import mla_extend
from radixmesh.kernels.attention.mla_merge import mla_decode_expanded, mla_few_rows_workspace
from radixmesh.kernels.attention.mla_prompt import chunk_tokens, mla_prompt
from radixmesh.kernels.attention.prefix_groups import PrefixGroup
from radixmesh.kernels.attention.shared_prefix_attention import plan_shared_decode
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.mla_rows import head_gemm, head_gemm_reference

_TOKENS = 1 << 20
# (rows, tokens of each) by query heads: of DeepSeek-V2-Lite, and of DeepSeek-V3.
_DECODES = {
    16: ((1, 384), (1, 8192), (32, 1024), (256, 384), (256, 2048), (512, 1024)),
    128: ((1, 4096), (32, 4096), (128, 2048)),
}
# (rows, tokens of each) with the value expansion behind them
_FEW = ((1, 384), (1, 2048), (1, 8192), (8, 384), (8, 4096))
# (groups, rows of each, tokens that a group shares, tokens of each row after them)
_SHARED = ((32, 16, 2048, 192), (1, 256, 512, 128), (8, 4, 2048, 192))
# (chunks, tokens of each, tokens before them)
_EXTENDS = ((1, 8192, 0), (64, 128, 0), (4, 2048, 2048))
# Tokens of a tile, warps, stages (0: the kernel written for Hopper), programs of an SM, tiles of a program at least.
_SPLITS = {
    16: ((32, 4, 5, 2, 4), (32, 4, 5, 2, 2)),
    128: ((64, 8, 0, 1, 2), (64, 8, 0, 1, 4), (32, 8, 5, 1, 4)),
}
_PREFIXES = ((64, 8, 0, 1, 2), (64, 8, 0, 1, 4), (32, 8, 5, 1, 4))
# (heads, chunks, tokens of each, tokens before them, chunks that share those): in the up-projected form beside the
# absorbed one
_PROMPTS = (
    (16, 16, 512, 0, 1),
    (16, 64, 128, 0, 1),
    (16, 64, 128, 2048, 16),
    (16, 64, 128, 1024, 1),
    (16, 4, 2048, 2048, 1),
    (128, 4, 512, 0, 1),
    (128, 1, 4096, 0, 1),
)
_PROMPT_BLOCKS = ((128, 64, 8, 3), (128, 128, 8, 2))
_CHUNKS = ((64, 64, 8, 3), (64, 32, 8, 5))

Launch = Callable[[int], object]


def _split(config: tuple[int, int, int, int, int]) -> SplitConfig:
    block_n, warps, stages, per_sm, min_tiles = config
    return SplitConfig(
        heads=1,
        block_n=block_n,
        num_warps=warps,
        num_stages=stages,
        programs_per_sm=per_sm,
        min_tiles=min_tiles,
        is_sm90=not stages,
    )


def _decode(pool: Pool, heads: int, num_rows: int, length: int, config: tuple[int, int, int, int, int]) -> Record:
    q, slots, lens = rows_of(num_rows, heads, length)
    tables = pool.tables(num_rows, length)
    workspace = mla_decode_workspace(num_rows, heads, RANK, "cuda", torch.bfloat16, _split(config))
    plan_decode(lens, workspace)
    got = mla_decode(q, pool.latents_SC, tables[0], slots, lens, 1, SCALE, workspace)
    check(got[:4], q[:4], pool, tables[0], slots[:4], lens[:4])
    us = micros(
        lambda turn: mla_decode(q, pool.latents_SC, tables[turn], slots, lens, 1, SCALE, workspace), len(tables)
    )
    return figures(us, read=num_rows * length, pairs=num_rows * length, heads=heads)


def _few(pool: Pool, num_rows: int, length: int) -> Record:
    """Microseconds with the value expansion behind a merge of its own, and in one."""
    heads = 16
    q, slots, lens = rows_of(num_rows, heads, length)
    tables = pool.tables(num_rows, length)
    expand = torch.randn(heads, 128, RANK, device="cuda", dtype=torch.bfloat16) * RANK**-0.5
    plain = mla_decode_workspace(num_rows, heads, RANK, "cuda")
    few = mla_few_rows_workspace(heads, RANK, "cuda", torch.bfloat16)
    plan_decode(lens, plain)
    plan_decode(lens, few)

    def separate(turn: int) -> torch.Tensor:
        out = mla_decode(q, pool.latents_SC, tables[turn], slots, lens, 1, SCALE, plain)
        return head_gemm(out, expand)

    def merged(turn: int) -> torch.Tensor:
        return mla_decode_expanded(q, pool.latents_SC, tables[turn], slots, lens, 1, SCALE, few, expand)

    out, want = merged(0).float(), separate(0).float()
    if not float((out - want).norm() / want.norm()) < 0.02:
        raise RuntimeError("the two differ")
    forms = {"separate_us": separate, "merged_us": merged}
    return {name: round(micros(form, len(tables)), 1) for name, form in forms.items()}


def _shared(pool: Pool, case: tuple[int, int, int, int], config: tuple[int, int, int, int, int]) -> Record:
    heads, (groups, per_group, prefix, own) = 16, case
    num_rows, length = groups * per_group, prefix + own
    q, slots, lens = rows_of(num_rows, heads, length)
    tables = pool.tables(num_rows, length)[:8]
    for table in tables:
        of_groups = table.view(groups, per_group, length)
        of_groups[:, :, :prefix] = of_groups[:, :1, :prefix].clone()
    workspace = mla_shared_workspace(num_rows, heads, RANK, "cuda", torch.bfloat16, _split(config))
    assert workspace is not None
    members = [PrefixGroup(np.arange(per_group * g, per_group * (g + 1)), prefix) for g in range(groups)]
    workspace.set_groups(members, list(range(num_rows)))
    plan_shared_decode(lens, workspace)
    got = mla_shared_decode(q, pool.latents_SC, tables[0], slots, lens, 1, SCALE, workspace)
    check(got[:4], q[:4], pool, tables[0], slots[:4], lens[:4])
    us = micros(
        lambda turn: mla_shared_decode(q, pool.latents_SC, tables[turn], slots, lens, 1, SCALE, workspace),
        len(tables),
    )
    return figures(us, read=groups * prefix + num_rows * own, pairs=num_rows * length, heads=heads)


def _extend(pool: Pool, case: tuple[int, int, int], config: tuple[int, int, int, int]) -> Record:
    heads, (chunks, new, before) = 16, case
    q, slots, lens = rows_of(chunks * new, heads, before + new)
    slots, lens = slots[:chunks], lens[:chunks]
    starts = torch.arange(0, chunks * new + 1, new, device="cuda", dtype=torch.int32)
    tables = pool.tables(chunks, before + new)[:4]
    out = torch.empty(chunks * new, heads, RANK, device="cuda", dtype=torch.bfloat16)
    tuned = ExtendConfig(**dict(zip(ExtendConfig.__slots__, config, strict=True)))

    def run(turn: int) -> object:
        return mla_extend(q, pool.latents_SC, tables[turn], slots, starts, lens, 1, SCALE, out, tuned)

    run(0)
    last = torch.arange(new - 1, chunks * new, new, device="cuda")[:2]
    check(out[last], q[last], pool, tables[0], slots[:2], lens[:2])
    pairs = chunks * (new * before + new * (new + 1) // 2)
    return figures(micros(run, len(tables)), read=chunks * (before + new), pairs=pairs, heads=heads)


def _prompt(pool: Pool, case: tuple[int, int, int, int, int], config: tuple[int, int, int, int]) -> Record:
    """Microseconds of both forms, from queries to results by head. Plain and value dims of a head are 128."""
    heads, chunks, new, before, per_group = case
    _, slots, lens = rows_of(chunks, heads, before + new)
    starts = torch.arange(0, chunks * new + 1, new, device="cuda", dtype=torch.int32)
    tables = pool.tables(chunks, before + new)[:4]
    for table in tables:
        of_groups = table.view(-1, per_group, before + new)
        of_groups[:, :, :before] = of_groups[:, :1, :before].clone()
    tokens = [chunk_tokens(table.cpu().numpy(), lens.cpu().numpy(), 1).to(lens.device) for table in tables]
    expand = torch.randn(heads, 256, RANK, device="cuda", dtype=torch.bfloat16) * RANK**-0.5
    q = torch.randn(chunks * new, heads, 128 + ROPE, device="cuda", dtype=torch.bfloat16)
    absorbed = q.new_empty(len(q), heads, LATENT)
    absorbed[..., RANK:] = q[..., 128:]
    latents, values = q.new_empty(len(q), heads, RANK), q.new_empty(len(q), heads, 128)
    tuned = ExtendConfig(**dict(zip(ExtendConfig.__slots__, config, strict=True)))

    def absorb(turn: int) -> torch.Tensor:
        head_gemm_reference(q[..., :128], expand[:, :128].transpose(1, 2), absorbed[..., :RANK])
        mla_extend(absorbed, pool.latents_SC, tables[turn], slots, starts, lens, 1, SCALE, latents)
        return head_gemm_reference(latents, expand[:, 128:])

    def project(turn: int) -> torch.Tensor:
        of_plain, of_rope = q[..., :128], absorbed[..., RANK:]
        return mla_prompt(of_plain, of_rope, pool.latents_SC, tokens[turn], expand, starts, lens, SCALE, values, tuned)

    out, want = project(0).float(), absorb(0).float()
    if not float((out - want).norm() / want.norm()) < 0.02:
        raise RuntimeError("the two forms differ")
    forms = {"absorbed_us": absorb, "projected_us": project}
    return {name: round(micros(form, len(tables)), 1) for name, form in forms.items()}


def _flashinfer(pool: Pool, heads: int, num_rows: int, length: int) -> Record:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    q, _, lens = rows_of(num_rows, heads, length)
    tables = pool.tables(num_rows, length)[:1]
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), backend="fa3")
    starts = torch.arange(num_rows + 1, device="cuda", dtype=torch.int32)
    wrapper.plan(
        starts,
        starts * length,
        tables[0].flatten(),
        lens,
        heads,
        RANK,
        ROPE,
        1,
        False,
        SCALE,
        *(torch.bfloat16,) * 2,
    )
    latents, ropes = pool.latents_SC[:, None, :RANK], pool.latents_SC[:, None, RANK:]
    us = micros(lambda _: wrapper.run(q[..., :RANK], q[..., RANK:], latents, ropes), 4)
    return figures(us, read=num_rows * length, pairs=num_rows * length, heads=heads)


def _tried(measure: Callable[[], Record]) -> Record:
    try:
        return measure()
    except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}


def _all(pool: Pool, *, is_short: bool = False) -> Iterator[Callable[[], Record]]:
    """Every measurement; is_short: one case of each configuration, enough to compile it."""
    few = 1 if is_short else None
    for case in _FEW[:few]:
        yield lambda x=case: {"kind": "few", "rows": x[0], "kv": x[1]} | _tried(lambda: _few(pool, *x))
    for heads, cases in _DECODES.items():
        for case, config in itertools.product(cases[:few], _SPLITS[heads]):
            about = {"kind": "decode", "heads": heads, "rows": case[0], "kv": case[1], "config": config}
            yield lambda a=about, h=heads, x=case, c=config: a | _tried(lambda: _decode(pool, h, *x, c))
    for shared, config in itertools.product(_SHARED[:few], _PREFIXES):
        about = {"kind": "shared", "groups": shared, "config": config}
        yield lambda a=about, x=shared, c=config: a | _tried(lambda: _shared(pool, x, c))
    for prompt, config in itertools.product(_PROMPTS[:few], _PROMPT_BLOCKS):
        about = {"kind": "prompt", "case": prompt, "config": config}
        yield lambda a=about, x=prompt, c=config: a | _tried(lambda: _prompt(pool, x, c))
    for chunks, chunk_config in itertools.product(_EXTENDS[-1:] if is_short else _EXTENDS, _CHUNKS):
        about = {"kind": "extend", "chunks": chunks, "config": chunk_config}
        yield lambda a=about, x=chunks, c=chunk_config: a | _tried(lambda: _extend(pool, x, c))


_BUILD = """
import torch
from flashinfer.jit.attention import gen_batch_mla_module as make
make("fa3", torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32, 512, 64, False).build_and_load()
"""


def _beside(pool: Pool, building: subprocess.Popen[str], deadline: float) -> Iterator[Record]:
    """FlashInfer's, once its module is built."""
    try:
        said, _ = building.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        building.kill()
        yield {"kind": "flashinfer", "error": "its module was not compiled in time"}
        return
    if building.returncode:
        yield {"kind": "flashinfer", "error": said[-300:]}
        return
    for heads, cases in _DECODES.items():
        for case in cases:
            about = {"kind": "flashinfer", "heads": heads, "rows": case[0], "kv": case[1]}
            yield about | _tried(lambda: _flashinfer(pool, heads, *case))  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=0, help="that compile kernels first")
    parser.add_argument("--share", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--flashinfer-s", type=float, default=0.0, help="seconds that FlashInfer's build may take")
    parser.add_argument("--output", help="where the report is written")
    args = parser.parse_args()
    started = time.monotonic()
    if args.share is not None:
        index, count = args.share
        for measure in list(_all(Pool(1 << 17), is_short=True))[index::count]:
            measure()
        return
    building = None
    if args.flashinfer_s:
        command = [sys.executable, "-c", _BUILD]
        building = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    helpers = [
        subprocess.Popen([sys.executable, __file__, "--share", str(index), str(args.processes)])
        for index in range(args.processes)
    ]
    for helper in helpers:
        helper.wait()
    pool, rows = Pool(_TOKENS), []
    beside = iter(()) if building is None else _beside(pool, building, started + args.flashinfer_s)
    for record in itertools.chain((measure() for measure in _all(pool)), beside):
        rows.append(record)
        print(json.dumps(record), file=sys.stderr, flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "command": " ".join(["python", *sys.argv]),
        "rows": rows,
        "seconds": round(time.monotonic() - started, 1),
    }
    if args.output:
        Path(args.output).write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
