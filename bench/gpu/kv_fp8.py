"""KV pages of FP8 beside those of bfloat16: attention of a layer, decode steps and capacity of a model, and the error.

    python bench/gpu/kv_fp8.py --shape llama-3.1-8b --rows 256 --contexts 1024 4096 > kv.json

attention: microseconds of a layer's decode, bytes of KV a second, and the largest error against float32 over the same
keys and values before they are stored. steps: of the whole model with random weights; where the pool has fewer tokens
than rows x context, rows share pages, in an order that no cache of the GPU helps. logits: of prompts, the norm of the
difference from bfloat16 pages relative to that of the logits, and the share of equal greedy tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.attention import time_graph
from gpu.shapes import SHAPES, kv_bytes_per_token, write_shape
from gpu.steps import Bench

from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.attention.decode_attention import DecodeWorkspace, paged_decode, plan_decode
from radixmesh.kernels.attention.extend_attention import paged_extend
from radixmesh.kernels.attention.split_schedule import SplitConfig
from radixmesh.kernels.kv_fp8 import KV_FP8, to_fp8

_LOGIT_PROMPTS, _LOGIT_LEN = 4, 512
_CONFIGS = [
    SplitConfig(heads=heads, block_n=block_n, num_warps=4, num_stages=stages, programs_per_sm=per_sm, min_tiles=1)
    for heads, block_n, stages, per_sm in (
        (1, 64, 3, 4), (1, 64, 5, 4), (1, 128, 3, 4), (1, 128, 3, 2), (1, 128, 5, 2),
        (1, 256, 3, 2), (2, 64, 3, 2), (2, 64, 5, 2),
    )
]  # fmt: skip


def attention(shape: dict[str, object], rows: int, context: int, configs: list[SplitConfig]) -> list[dict[str, object]]:
    """Decode of a layer over both kinds of pages, and extend of one chunk."""
    heads, kv_heads, dim = (int(str(shape[key])) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    num_tokens = rows * context
    torch.manual_seed(0)
    planes = [torch.randn(num_tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    tables = torch.randperm(num_tokens, device="cuda").int().view(rows, context)
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    lens = torch.full((rows,), context, device="cuda", dtype=torch.int32)
    q = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    scale = dim**-0.5
    target = (tables, slots, lens, 1, scale, None)
    wants = []
    for row in range(0, rows, max(1, rows // 6)):
        k, v = (plane[tables[row].long()].float().repeat_interleave(heads // kv_heads, 1) for plane in planes)
        weights = (torch.einsum("hd,lhd->hl", q[row].float(), k) * scale).softmax(-1)
        wants.append((row, torch.einsum("hl,lhd->hd", weights, v)))
    found = []
    for dtype, tried in ((torch.bfloat16, [None]), (KV_FP8, [None, *configs])):
        keys, values = planes if dtype == torch.bfloat16 else [to_fp8(plane) for plane in planes]
        for config in tried:
            workspace = DecodeWorkspace(rows, heads, kv_heads, dim, "cuda", dtype, config=config)
            plan_decode(lens, workspace)
            out = torch.empty_like(q)
            seconds = time_graph(partial(paged_decode, q, keys, values, *target, workspace, out))
            error = max(float((out[row].float() - want).norm() / want.norm()) for row, want in wants)
            num_bytes = 2 * num_tokens * kv_heads * dim * dtype.itemsize
            found.append(
                {
                    "pages": str(dtype).removeprefix("torch."),
                    "config": None if config is None else str(config),
                    "us": round(seconds * 1e6, 1),
                    "tb_s": round(num_bytes / seconds / 1e12, 3),
                    "relative_error": round(error, 5),
                }
            )
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        starts = torch.tensor([0, 2048], device="cuda", dtype=torch.int32)
        chunk_q = torch.randn(2048, heads, dim, device="cuda", dtype=torch.bfloat16)
        chunk = (keys, values, tables, slots[:1], starts, lens[:1], 1, scale, None, 2048)
        seconds = time_graph(partial(paged_extend, chunk_q, *chunk))
        found[-1]["extend_2048_us"] = round(seconds * 1e6, 1)
    return found


def settings(kv_dtype: str, rows: int, context: int, *, has_graphs: bool = True) -> DeviceSettings:
    return DeviceSettings(
        dtype="bfloat16",
        attention_backend="triton",
        load_format="dummy",
        page_size=1,
        num_pages=None,
        num_slots=rows,
        max_tokens_per_step=2048,
        max_total_len=2 * context,
        mem_fraction=0.9,
        cuda_graphs=has_graphs,
        use_pdl=True,
        deterministic=False,
        tune_gemm=False,
        kv_dtype=kv_dtype,
    )


class SharingBench(Bench):
    """A bench whose rows share pages where the pool has too few."""

    def _tables(self, num_rows: int, length: int) -> np.ndarray:
        tables = np.zeros((self.num_slots, length), np.int32)
        pages = np.resize(self._rng.permutation(self.runner.num_pages), num_rows * length)
        tables[:num_rows] = pages.reshape(num_rows, length)
        return tables


def logits(runner: DeviceRunner) -> torch.Tensor:
    """float32 [prompts x length, vocabulary], each prompt in two chunks."""
    rng, rows = np.random.default_rng(0), []
    for prompt in range(_LOGIT_PROMPTS):
        ids = rng.integers(10, runner.vocab_size, _LOGIT_LEN).astype(np.int32)
        pages = np.arange(prompt * _LOGIT_LEN, (prompt + 1) * _LOGIT_LEN, dtype=np.int32)
        for start, stop in ((0, _LOGIT_LEN - 64), (_LOGIT_LEN - 64, _LOGIT_LEN)):
            (part,) = runner.logits([Segment(slot=0, ids=ids[start:stop], start=start, pages=pages)])
        rows.append(torch.from_numpy(part))
    return torch.cat(rows)


def model(shape: str, rows: int, contexts: list[int], kv_dtype: str) -> tuple[dict[str, object], torch.Tensor]:
    """Steps and capacity, and logits. The weights are the same for every dtype of pages."""
    started = time.perf_counter()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        runner = load_cuda_runner(write_shape(shape, Path(folder)), settings(kv_dtype, rows, max(contexts)))
    result: dict[str, object] = {
        "pages": kv_dtype,
        "load_s": round(time.perf_counter() - started, 1),
        "tokens_of_kv": runner.num_pages,
        "kv_gib": round(runner.num_pages * kv_bytes_per_token(shape) / (2 if kv_dtype == "fp8" else 1) / 2**30, 1),
    }
    of_prompts = logits(runner)
    bench = SharingBench(runner, rows)
    bench.decode(1, 200, 20)
    steps = []
    for context in contexts:
        seconds, _ = bench.decode(rows, context, 20)
        has_all = runner.num_pages >= rows * context
        steps.append(
            {
                "rows": rows,
                "context": context,
                "ms": round(seconds * 1e3, 3),
                "tok_s": round(rows / seconds),
                "fits": has_all,
            }
        )
        print(json.dumps(steps[-1]), file=sys.stderr, flush=True)
    return result | {"steps": steps}, of_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--no-sweep", action="store_true", help="of configurations of the decode kernel")
    args = parser.parse_args()
    report: dict[str, object] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": args.shape,
        "attention": attention(SHAPES[args.shape], args.rows, max(args.contexts), [] if args.no_sweep else _CONFIGS),
    }
    torch.cuda.empty_cache()
    found = []
    for kv_dtype in ("auto", "fp8"):
        found.append(model(args.shape, args.rows, args.contexts, kv_dtype))
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(found[-1][0]), file=sys.stderr, flush=True)
    full, fp8 = (of_prompts for _, of_prompts in found)
    report["models"] = [result for result, _ in found]
    report["logits"] = {
        "relative_error": round(float((fp8 - full).norm() / full.norm()), 5),
        "equal_greedy": round(float((fp8.argmax(-1) == full.argmax(-1)).float().mean()), 4),
        "rows": len(full),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
