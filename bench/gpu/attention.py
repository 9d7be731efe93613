"""Attention kernels on one GPU: achieved bandwidth and FLOP rate, in CUDA graphs, of defaults and of alternatives.

    python bench/gpu/attention.py --out bench/results/h200-attention.json [--budget-s 60] [--only decode,extend,shared]

Prints one JSON. Each figure is of a graph of several layers, each with its own KV scattered token by token over a pool
that no cache holds, and comes with the largest error against fp32 torch on some of its rows. `sweep` holds a few cases
for each alternative configuration, `defaults` all cases for the configuration that the kernels choose.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from attention_cases import (
    DECODE_CASES,
    DECODE_CONFIGS,
    DECODE_KEY_CASES,
    EXTEND_CASES,
    EXTEND_CONFIGS,
    EXTEND_KEY_CASES,
    FEW_ROWS_CASES,
    FEW_ROWS_CONFIGS,
    PREFIX_CONFIGS,
    SHARED_CASES,
    DecodeCase,
    ExtendCase,
    SharedCase,
)

from radixmesh.kernels.attention.decode_attention import DecodeWorkspace, decode_config, paged_decode, plan_decode
from radixmesh.kernels.attention.extend_attention import ExtendConfig, extend_config, paged_extend
from radixmesh.kernels.attention.prefix_groups import PrefixGroup
from radixmesh.kernels.attention.shared_prefix_attention import (
    SharedPrefixWorkspace,
    paged_shared_decode,
    plan_shared_decode,
    shared_prefix_config,
)
from radixmesh.kernels.attention.split_schedule import SplitConfig, SplitShape

HEADS, KV_HEADS, DIM, MAX_ROWS = 24, 8, 128, 512
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
POOL_TOKENS = 1 << 21
SHAPE = SplitShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
# A graph reads at least this much, unless it has as many layers as a small model.
GRAPH_BYTES = 400 << 20
MAX_LAYERS = 16
CHECKED_ROWS = 6


class Pool:
    """One layer's pool of random KV, and page tables that scatter sequences over all of it."""

    def __init__(self, num_tokens: int) -> None:
        size = (num_tokens, KV_HEADS, DIM)
        self.keys = torch.randn(size, device="cuda", dtype=DTYPE)
        self.values = torch.randn(size, device="cuda", dtype=DTYPE)
        self._num_tokens = num_tokens
        self._pages: dict[int, torch.Tensor] = {}

    def tables(self, num_slots: int, num_tokens: int, page_size: int) -> torch.Tensor:
        """int32 [slots, pages]: pages in random order, as far as there are some all different."""
        if page_size not in self._pages:
            self._pages[page_size] = torch.randperm(self._num_tokens // page_size, device="cuda").int()
        pages, per_slot = self._pages[page_size], -(-num_tokens // page_size)
        index = torch.arange(num_slots * per_slot, device="cuda") % len(pages)
        return pages[index].view(num_slots, per_slot).contiguous()

    def row_reference(self, q_Hd: torch.Tensor, table: torch.Tensor, length: int, page_size: int) -> torch.Tensor:
        position = torch.arange(length, device="cuda")
        token = table[position // page_size].long() * page_size + position % page_size
        k = self.keys[token].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = self.values[token].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
        return torch.einsum("hl,lhd->hd", (torch.einsum("hd,lhd->hl", q_Hd.float(), k) * SCALE).softmax(-1), v)


def time_graph(run: Callable[[], None], seconds: float = 0.02) -> float:
    """Seconds of one replay of a graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def elapsed(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    elapsed(2)
    count = max(3, int(seconds / max(elapsed(2) / 2, 1e-6)))
    return min(elapsed(count) / count for _ in range(2))


def _layers(bytes_per_layer: float) -> int:
    return max(2, min(MAX_LAYERS, int(GRAPH_BYTES / bytes_per_layer) + 1))


def measure_decode(pool: Pool, case: DecodeCase, config: SplitConfig | None) -> dict[str, object]:
    generator = torch.Generator().manual_seed(case.batch + case.context)
    lens = torch.full((case.batch,), case.context)
    if case.lengths == "random":
        lens = torch.randint(1, 2 * case.context + 1, (case.batch,), generator=generator)
    num_bytes = int(lens.sum()) * TOKEN_BYTES
    layers = _layers(num_bytes)
    tables = pool.tables(layers * case.batch, int(lens.max()), case.page_size)
    q = torch.randn(layers, case.batch, HEADS, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    kv_lens = lens.int().cuda()
    slots = torch.arange(layers * case.batch, device="cuda", dtype=torch.int32).view(layers, -1)
    workspace = DecodeWorkspace(MAX_ROWS, HEADS, KV_HEADS, DIM, "cuda", DTYPE, config=config)

    def plan() -> None:
        plan_decode(kv_lens, workspace)

    def run() -> None:
        for i in range(layers):
            planes = (pool.keys, pool.values, tables, slots[i], kv_lens)
            paged_decode(q[i], *planes, case.page_size, SCALE, None, workspace, out[i])

    plan()
    seconds = time_graph(run) / layers
    rows = range(0, case.batch, max(1, case.batch // CHECKED_ROWS))
    wants = (pool.row_reference(q[0, r], tables[slots[0, r]], int(lens[r]), case.page_size) for r in rows)
    error = max((out[0, r].float() - want).abs().max().item() for r, want in zip(rows, wants, strict=True))
    return {
        "us": round(seconds * 1e6, 2),
        "tb_s": round(num_bytes / seconds / 1e12, 3),
        "plan_us": round(time_graph(plan) * 1e6, 2),
        "error": round(error, 5),
    }


def measure_extend(pool: Pool, case: ExtendCase, config: ExtendConfig | None) -> dict[str, object]:
    rows = case.chunks * case.chunk_len
    tables = pool.tables(2 * case.chunks, case.context, case.page_size)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=DTYPE)
    out = torch.empty_like(q)
    starts = torch.arange(case.chunks + 1, device="cuda", dtype=torch.int32) * case.chunk_len
    lens = torch.full((case.chunks,), case.context, device="cuda", dtype=torch.int32)
    slots = torch.arange(2 * case.chunks, device="cuda", dtype=torch.int32).view(2, -1)

    def run() -> None:
        for i in (1, 0):
            planes = (pool.keys, pool.values, tables, slots[i], starts, lens)
            paged_extend(q, *planes, case.page_size, SCALE, None, case.chunk_len, out, config)

    seconds = time_graph(run) / 2
    seen = case.chunks * case.chunk_len * (case.context - (case.chunk_len - 1) / 2)
    error = 0.0
    for row in range(0, rows, max(1, rows // CHECKED_ROWS)):
        chunk, at = divmod(row, case.chunk_len)
        length = case.context - case.chunk_len + at + 1
        want = pool.row_reference(q[row], tables[chunk], length, case.page_size)
        error = max(error, (out[row].float() - want).abs().max().item())
    return {
        "us": round(seconds * 1e6, 1),
        "tflop_s": round(4 * HEADS * DIM * seen / seconds / 1e12, 1),
        "error": round(error, 5),
    }


def measure_shared(pool: Pool, case: SharedCase, config: SplitConfig | None) -> dict[str, object]:
    """us: with groups; plain_us: plain decode of the same rows; no_groups_us: what the second kernel alone costs it."""
    batch, length, layers = case.groups * case.rows, case.prefix + case.own, 4
    tables = pool.tables(layers * batch, length, 1)
    by_group = tables.view(layers, case.groups, case.rows, length)
    by_group[:, :, :, : case.prefix] = by_group[:, :, :1, : case.prefix].clone()
    q = torch.randn(layers, batch, HEADS, DIM, device="cuda", dtype=DTYPE)
    out, plain_out = torch.empty_like(q), torch.empty_like(q)
    kv_lens = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    slots = torch.arange(layers * batch, device="cuda", dtype=torch.int32).view(layers, -1)
    groups = [PrefixGroup(torch.arange(case.rows).numpy() + g * case.rows, case.prefix) for g in range(case.groups)]
    workspaces = []
    for i in range(layers):
        workspace = SharedPrefixWorkspace(MAX_ROWS, HEADS, KV_HEADS, DIM, "cuda", DTYPE, prefix_config=config)
        workspace.set_groups(groups, slots[i].tolist())
        plan_shared_decode(kv_lens, workspace)
        workspaces.append(workspace)
    plain = DecodeWorkspace(MAX_ROWS, HEADS, KV_HEADS, DIM, "cuda", DTYPE)
    plan_decode(kv_lens, plain)

    def run_shared() -> None:
        for i in range(layers):
            planes = (pool.keys, pool.values, tables, slots[i], kv_lens)
            paged_shared_decode(q[i], *planes, 1, SCALE, workspaces[i], out[i])

    def run_plain() -> None:
        for i in range(layers):
            planes = (pool.keys, pool.values, tables, slots[i], kv_lens)
            paged_decode(q[i], *planes, 1, SCALE, None, plain, plain_out[i])

    shared_s = time_graph(run_shared) / layers
    plain_s = time_graph(run_plain) / layers
    error = (out.float() - plain_out.float()).abs().max().item()
    want = pool.row_reference(q[0, 1], tables[1], length, 1)
    error = max(error, (out[0, 1].float() - want).abs().max().item())
    for workspace in workspaces:
        workspace.set_groups([], slots[0].tolist())
        plan_shared_decode(kv_lens, workspace)
    no_groups_s = time_graph(run_shared) / layers
    distinct = (case.groups * case.prefix + batch * case.own) * TOKEN_BYTES
    return {
        "us": round(shared_s * 1e6, 2),
        "tb_s": round(distinct / shared_s / 1e12, 3),
        "plain_us": round(plain_s * 1e6, 2),
        "no_groups_us": round(no_groups_s * 1e6, 2),
        "error": round(error, 5),
    }


def _compile(job: tuple[str, SplitConfig | ExtendConfig | None, int]) -> str:
    """Runs a kernel once in a process of its own, which leaves it in Triton's cache on disk."""
    kind, config, page_size = job
    try:
        pool = Pool(1 << 14)
        if kind in ("decode", "few"):
            measure_decode(pool, DecodeCase(batch=2, context=100, page_size=page_size), config)
        elif kind == "extend":
            measure_extend(pool, ExtendCase(chunks=2, chunk_len=600, context=900, page_size=page_size), config)
        else:
            measure_shared(pool, SharedCase(groups=2, rows=2, prefix=128, own=9), config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _jobs(only: set[str]) -> Iterator[tuple[str, str, object, object, Callable[[Pool], dict[str, object]]]]:
    """(part, kind, configuration, case, measurement): what decides most comes first."""
    sweeps = [
        ("few", FEW_ROWS_CONFIGS, FEW_ROWS_CASES, measure_decode),
        ("decode", DECODE_CONFIGS, DECODE_KEY_CASES, measure_decode),
        ("shared", PREFIX_CONFIGS, SHARED_CASES[:1], measure_shared),
        ("extend", EXTEND_CONFIGS, EXTEND_KEY_CASES, measure_extend),
    ]
    for kind, configs, cases, measure in sweeps:
        for config in configs if kind in only else []:
            for case in cases:
                yield "sweep", kind, config, case, partial(measure, case=case, config=config)
    defaults = [
        ("shared", SHARED_CASES, measure_shared),
        ("extend", EXTEND_CASES, measure_extend),
        ("decode", DECODE_CASES, measure_decode),
    ]
    for kind, cases, measure in defaults:
        for case in cases if kind in only else []:
            yield "defaults", kind, None, case, partial(measure, case=case, config=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0, help="measurements past it are left out")
    parser.add_argument("--only", default="few,decode,extend,shared", help="few: few rows")
    parser.add_argument("--processes", type=int, default=12, help="that compile; 0: none")
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    begin = time.monotonic()
    if arguments.processes:
        jobs = [("decode", c, 1) for c in DECODE_CONFIGS] + [("decode", None, 16)]
        jobs += [("few", c, 1) for c in FEW_ROWS_CONFIGS]
        jobs += [("extend", c, 1) for c in EXTEND_CONFIGS] + [("extend", None, 16)]
        jobs += [("shared", c, 1) for c in PREFIX_CONFIGS]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as processes:
            failed = processes.map(_compile, [job for job in jobs if job[0] in only], chunksize=1)
    else:
        failed = []
    compiled = time.monotonic()
    pool = Pool(POOL_TOKENS)
    results: dict[str, list[dict[str, object]]] = {"sweep": [], "defaults": []}
    skipped = 0
    for part, kind, config, case, measure in _jobs(only):
        if time.monotonic() - compiled > arguments.budget_s:
            skipped += 1
            continue
        row: dict[str, object] = {"kind": kind, "case": asdict(case)}
        if config is not None:
            row["config"] = asdict(config)
        try:
            row |= measure(pool)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        results[part].append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    report = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        "default_configs": {
            "decode": asdict(decode_config(SHAPE, DTYPE)),
            "shared_prefix": asdict(shared_prefix_config(replace(SHAPE, members=21), DTYPE)),
            "extend": asdict(extend_config(HEADS // KV_HEADS, DIM, DTYPE, 8192)),
        },
        "compile_s": round(compiled - begin, 1),
        "measure_s": round(time.monotonic() - compiled, 1),
        "skipped": skipped,
        "compile_failures": [failure for failure in failed if failure],
        **results,
    }
    text = json.dumps(report, indent=1)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
