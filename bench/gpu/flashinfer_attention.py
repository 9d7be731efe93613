"""FlashInfer's kernels beside the bounds of memory and tensor cores: decode in TB/s, extend in TFLOP/s.

Decode runs as in a step: a CUDA graph of as many layers as it takes to flush the L2, planned anew by the host. Extend
runs eagerly, layer after layer. Bytes are those of the keys and values that rows have to see, operations those of the
pairs of a query and a key that it sees. About 20 s of GPU time.

    PYTHONPATH=src python bench/gpu/flashinfer_attention.py --out flashinfer.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.flashinfer.attention import FlashInferAttention
from radixmesh.daemons.worker.cuda.flashinfer.modules import KernelKind
from radixmesh.daemons.worker.cuda.flashinfer.shared_prefix import FlashInferSharedPrefix

_BATCHES = (1, 64, 256, 512)
_CONTEXTS = (384, 2048, 8192)
_PAGE_SIZES = (1, 16)
# (chunks, tokens of each, tokens before them)
_EXTENDS = ((1, 8192, 0), (4, 2048, 0), (16, 512, 0), (64, 128, 0), (16, 128, 2048), (64, 128, 2048), (1, 512, 16384))
# (groups, rows of each, tokens that a group shares, tokens of each row after them)
_SHARED = ((32, 16, 2048, 192), (8, 32, 2048, 192), (1, 256, 1024, 512))
_FLUSH_BYTES = 256 << 20
_MOST_LAYERS = 28
_REPLAYS = 8

Record = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    shape = AttentionShape(
        num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim, scale=args.head_dim**-0.5
    )
    start = time.monotonic()
    memory = _Memory(shape, max(_BATCHES) * max(_CONTEXTS) + 16)
    report = {
        "command": "python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "flashinfer-python")},
        "shape": {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "dtype": "bfloat16"},
        "decode": list(_decodes(shape, memory)),
        "shared_prefix": list(_shared_prefixes(shape, memory)),
        "extend": list(_extends(shape, memory)),
    }
    report["seconds"] = round(time.monotonic() - start, 1)
    text = json.dumps(report, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


class _Memory:
    """Keys and values of `num_tokens` tokens, cut anew into layers for each measurement."""

    def __init__(self, shape: AttentionShape, num_tokens: int) -> None:
        size = (num_tokens, shape.num_kv_heads, shape.head_dim)
        self.token_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim
        self._keys, self._values = (
            torch.empty(size, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1) for _ in range(2)
        )

    def layers(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Layers of as many tokens each: enough to flush the L2, where there is room."""
        wanted = min(_MOST_LAYERS, max(1, _FLUSH_BYTES // (num_tokens * self.token_bytes)))
        count = max(1, min(wanted, len(self._keys) // num_tokens))
        cuts = [slice(i * num_tokens, (i + 1) * num_tokens) for i in range(count)]
        return [(self._keys[cut], self._values[cut]) for cut in cuts]


def _decodes(shape: AttentionShape, memory: _Memory) -> Iterator[Record]:
    for page_size in _PAGE_SIZES:
        for context in _CONTEXTS:
            for batch in _BATCHES:
                for kind in (KernelKind.CUDA_CORES, KernelKind.TENSOR_CORES):
                    record: Record = {"kind": kind.value, "batch": batch, "context": context, "page_size": page_size}
                    yield record | _tried(lambda: _decode(shape, memory, kind, batch, context, page_size))  # noqa: B023


def _decode(
    shape: AttentionShape, memory: _Memory, kind: KernelKind, batch: int, context: int, page_size: int
) -> Record:
    tables, num_tokens = _tables(batch, context, page_size)
    attention = FlashInferAttention(
        shape,
        tables,
        dtype=torch.bfloat16,
        page_size=page_size,
        max_rows=batch,
        max_extend_tokens=1,
        decode_kind=kind,
        extend_kind=KernelKind.TENSOR_CORES,
    )
    layers = memory.layers(num_tokens)
    query = torch.randn(batch, shape.num_heads, shape.head_dim, device="cuda").bfloat16()
    out = torch.empty_like(query)
    slots, lens = np.arange(batch, dtype=np.int32), np.full(batch, context, np.int32)

    def step() -> None:
        for keys, values in layers:
            attention.decode(query, keys, values, out=out)

    attention.plan_decode(slots, lens)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    plan_us = _host_us(lambda: attention.plan_decode(slots, lens))
    us = _device_us(graph.replay) / len(layers)
    moved = batch * context * memory.token_bytes
    return {"us": round(us, 2), "tb_s": round(moved / us / 1e6, 3), "plan_us": round(plan_us, 1), "layers": len(layers)}


def _shared_prefixes(shape: AttentionShape, memory: _Memory) -> Iterator[Record]:
    for groups, members, prefix, own in _SHARED:
        record: Record = {"groups": groups, "rows": groups * members, "prefix": prefix, "own": own, "page_size": 16}
        yield record | _tried(lambda: _shared_prefix(shape, memory, groups, members, prefix, own))  # noqa: B023


def _shared_prefix(
    shape: AttentionShape, memory: _Memory, groups: int, members: int, prefix: int, own: int, page_size: int = 16
) -> Record:
    rows = groups * members
    tables, num_tokens = _tables(rows, prefix + own, page_size)
    firsts = torch.arange(rows, device="cuda") // members * members
    tables[:rows, : prefix // page_size] = tables[firsts, : prefix // page_size]
    attention = FlashInferSharedPrefix(shape, tables, dtype=torch.bfloat16, page_size=page_size, max_rows=rows)
    layers = memory.layers(num_tokens)
    query = torch.randn(rows, shape.num_heads, shape.head_dim, device="cuda").bfloat16()
    out = torch.empty_like(query)
    slots, lens = np.arange(rows, dtype=np.int32), np.full(rows, prefix + own, np.int32)
    sizes, prefixes = np.full(groups, members, np.int32), np.full(groups, prefix, np.int32)

    def step() -> None:
        for keys, values in layers:
            attention.decode(query, keys, values, out=out)

    attention.plan(slots, lens, sizes, prefixes)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    us = _device_us(graph.replay) / len(layers)
    least = (groups * prefix + rows * own) * memory.token_bytes
    return {"us": round(us, 2), "tb_s_of_the_least": round(least / us / 1e6, 3), "layers": len(layers)}


def _extends(shape: AttentionShape, memory: _Memory) -> Iterator[Record]:
    for page_size in _PAGE_SIZES:
        for chunks, length, before in _EXTENDS:
            for kind in (KernelKind.TENSOR_CORES, KernelKind.HOPPER):
                record: Record = {
                    "kind": kind.value,
                    "chunks": chunks,
                    "tokens": length,
                    "before": before,
                    "page_size": page_size,
                }
                yield record | _tried(lambda: _extend(shape, memory, kind, chunks, length, before, page_size))  # noqa: B023


def _extend(
    shape: AttentionShape, memory: _Memory, kind: KernelKind, chunks: int, length: int, before: int, page_size: int
) -> Record:
    tables, num_tokens = _tables(chunks, before + length, page_size)
    attention = FlashInferAttention(
        shape,
        tables,
        dtype=torch.bfloat16,
        page_size=page_size,
        max_rows=chunks,
        max_extend_tokens=chunks * length,
        decode_kind=KernelKind.TENSOR_CORES,
        extend_kind=kind,
    )
    query = torch.randn(chunks * length, shape.num_heads, shape.head_dim, device="cuda").bfloat16()
    out = torch.empty_like(query)
    slots, lens = np.arange(chunks, dtype=np.int32), np.full(chunks, length, np.int32)
    keys, values = memory.layers(num_tokens)[0]

    def plan() -> None:
        attention.plan_extend(slots, lens, lens + before)

    plan()
    us = _device_us(lambda: attention.extend(query, keys, values, out=out))
    pairs = chunks * (length * before + length * (length + 1) / 2)
    flop = 4 * shape.num_heads * shape.head_dim * pairs
    return {"us": round(us, 1), "tflop_s": round(flop / us / 1e6, 1), "plan_us": round(_host_us(plan), 1)}


def _tables(rows: int, context: int, page_size: int) -> tuple[torch.Tensor, int]:
    """Page tables of rows whose pages lie scattered, and the tokens of a layer's pool with its dummy page."""
    pages = math.ceil(context / page_size)
    scattered = torch.randperm(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    dummy = torch.full((1, pages), rows * pages, dtype=torch.int32, device="cuda")
    return torch.cat([scattered, dummy]), (rows * pages + 1) * page_size


def _tried(measure: Callable[[], Record]) -> Record:
    """A kernel that cannot run here is a finding, not the end of the run."""
    try:
        return measure()
    except (MeshError, RuntimeError) as error:
        return {"error": str(error)[-300:]}


def _device_us(run: Callable[[], object]) -> float:
    """Fastest of some runs: nothing else is on the device."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPLAYS)]
    for _ in range(2):
        run()
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1000 * min(begin.elapsed_time(end) for begin, end in events)


def _host_us(run: Callable[[], object]) -> float:
    """Median of some calls, with the device idle."""
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e6 * sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
