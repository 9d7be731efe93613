"""Time of each workload by kind of GPU kernel, from profiler traces of the run itself.

    python bench/gpu/where.py --workloads single-stream decode-256 random shared-prefix > where.json

The workloads run through a scheduler and a worker as processes over gRPC, as in mesh.py, each once without a trace,
then once while the worker's Profile verb traces windows of `--window-s`, one every `--every-s` (0: one after the
other). A window ends by itself with the most steps that a trace may have. Time that several kernels share is that of
the first of them: what kinds of kernels take, and idle (none runs), is all there is. Steps are told by their search
for the highest logits: one that samples nothing counts as part of the next. What a traced run takes more than the other
is the profiler's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.shapes import sampling_temperature, workload_roofline_s, write_shape
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes

from radixmesh.cli.bench.workloads import make_workload
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

KINDS = {
    "attention of decodes": r"_split_attention_kernel|_mla_split_kernel|BatchDecode",
    "attention of prompts": r"_extend_kernel|BatchPrefill|PrefillWithKV",
    "experts": r"_gate_up_kernel|_down_kernel",
    "routing of rows to experts": r"_route_kernel|_router_logits|_group_rows|_combine_kernel",
    "expansions of latents": r"_head_gemm",
    "RoPE and KV write": r"_rope_kv|_mla_rows",
    "SiLU and multiply": r"_silu_",
    "norms, rows made FP8": r"_rms_norm|_quantize_rows",
    "sampling": r"_highest|_finish|_gumbel|_cut_off|_survey|_collect|_count_kernel|_adjust|_bias_kernel",
    "drafts": r"_expand_kernel|_accept_kernel|_ngram|_follow|_chain_kernel",
    "a step's numbers": r"_fetch_|_scatter_embed|_plan_kernel|Mem(cpy|set)|[Ii]ndex|embedding|elementwise|CatArray",
    "gemm": r"nvjet|gemm|gemv|cublas|splitK|cutlass|xmma|_linear|few_rows",
}
STEP_KERNEL = "_highest_kernel"
"""A step has one of these, near its end."""
_NUM_KERNELS = 24
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """Work of the device, in microseconds."""

    start: float
    end: float
    name: str


class Spent(NamedTuple):
    """Microseconds by kind of work, by kernel, and of kernels of no kind; the steps that ended: each samples once."""

    by_kind: dict[str, float]
    by_kernel: dict[str, float]
    others: dict[str, float]
    num_steps: int

    @property
    def total_us(self) -> float:
        return sum(self.by_kind.values())


def spent(spans: Iterable[Span]) -> Spent:
    """Of one window, from its first kernel to its last."""
    ordered = sorted(spans)
    by_kind: dict[str, float] = defaultdict(float)
    by_kernel: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    over = ordered[0].start
    for span in ordered:
        by_kind["idle"] += max(0.0, span.start - over)
        own = max(0.0, span.end - max(span.start, over))
        kind = kind_of(span.name)
        by_kind[kind] += own
        by_kernel[span.name[:60]] += own
        if kind == "others":
            others[span.name[:60]] += own
        over = max(over, span.end)
    return Spent(dict(by_kind), dict(by_kernel), dict(others), sum(STEP_KERNEL in span.name for span in ordered))


def kind_of(name: str) -> str:
    """Of what is in `KINDS`, or others."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")


def table(windows: Iterable[Spent]) -> dict[str, object]:
    """Shares of the time of all windows, the largest first, and microseconds a step."""
    windows = list(windows)
    total = sum(window.total_us for window in windows)
    num_steps = max(1, sum(window.num_steps for window in windows))
    by_kind: dict[str, float] = defaultdict(float)
    by_kernel: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    for window in windows:
        sources = (by_kind, window.by_kind), (by_kernel, window.by_kernel), (others, window.others)
        for target, source in sources:
            for name, micros in source.items():
                target[name] += micros
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind])
    kernels = sorted(by_kernel, key=lambda name: -by_kernel[name])[:_NUM_KERNELS]
    return {
        "windows": len(windows),
        "steps": num_steps,
        "shares": {kind: round(by_kind[kind] / total, 4) for kind in kinds},
        "us_per_step": {kind: round(by_kind[kind] / num_steps, 1) for kind in kinds},
        "us_per_step_of_kernels": {name: round(by_kernel[name] / num_steps, 1) for name in kernels},
        "others_us": {name: round(others[name], 1) for name in sorted(others, key=lambda name: -others[name])[:8]},
    }


def sequence(spans: Iterable[Span], count: int) -> list[str]:
    """So many kernels in their order, from the middle of a window: microseconds of each, microseconds from the end of
    the one before to its start (negative: beside it), and its name."""
    ordered = sorted(spans)
    first = max(1, (len(ordered) - count) // 2)
    lines = []
    for before, span in zip(ordered[first - 1 :], ordered[first : first + count], strict=False):
        lines.append(f"{span.end - span.start:.1f} {span.start - before.end:+.1f} {span.name[:80]}")
    return lines


def read_spans(path: Path) -> list[Span]:
    """Of a Chrome trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return [
        Span(float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events if e.get("cat") in _GPU_WORK
    ]


async def measure(args: argparse.Namespace) -> dict[str, object]:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix", start_s=240.0) as processes:
            worker = {
                "backend": "cuda",
                "model": write_shape(args.shape, Path(folder)),
                "load_format": "dummy",
                "num_slots": 512,
                "max_tokens_per_step": 8192,
                "max_total_len": 8192,
                "dump_folder": folder,
                **_flags(args.worker),
            }
            await processes.start("worker", "worker", worker)
            flags = {"workers": processes.address("worker"), "chunk_tokens": 8192, **_flags(args.scheduler)}
            await processes.start("scheduler", "scheduler", flags)
            for name in args.workloads:
                plain = await _run(processes, name, args, is_traced=False)
                results[name] = {"untraced": plain, **await _run(processes, name, args, is_traced=True)}
                print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
    return {"command": " ".join(["python", *sys.argv]), "shape": args.shape, "where": results}


async def _run(processes: Processes, name: str, args: argparse.Namespace, *, is_traced: bool) -> dict[str, object]:
    workload, _, count = name.partition(":")
    turns = make_workload(workload, num_requests=int(count) if count else args.num_requests)
    prompts, lengths = [turn.new_ids for turn in turns], [turn.out_len for turn in turns]
    label = f"{workload}{count}-{'traced' if is_traced else 'plain'}"
    paths: list[Path] = []
    async with (
        open_channel(processes.address("worker")) as channel,
        # Another salt every run: nothing may be found in the cache that the run before left there.
        BulkStream(
            processes.address("scheduler"), label, label, temperature=sampling_temperature(args.shape)
        ) as stream,
    ):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        start = time.monotonic()
        await stream.submit(prompts, lengths)
        finished = asyncio.ensure_future(stream.until(num_finished=len(turns), timeout_s=args.timeout_s))
        while is_traced and not finished.done():
            paths.append(await _traced_window(stub, finished, args.window_s))
            await asyncio.wait((finished,), timeout=max(0.0, args.every_s - args.window_s))
        await finished
        seconds = stream.last_token_at - start
    run: dict[str, object] = {
        "out_tok_s": round(sum(lengths) / seconds, 1),
        "seconds": round(seconds, 3),
        "roofline_share": round(workload_roofline_s(args.shape, prompts, lengths) / seconds, 4),
    }
    if is_traced:
        # Not while it runs: reading them takes a core.
        windows = [spans for path in paths if len(spans := read_spans(path)) > 1]
        run |= table(spent(spans) for spans in windows)
        if args.sequence and windows:
            run["sequence"] = sequence(windows[len(windows) // 2], args.sequence)
    return run


async def _traced_window(
    stub: worker_pb2_grpc.WorkerServiceAsyncStub, finished: asyncio.Future[None], seconds: float
) -> Path:
    """The trace's path. It ends early with the workload, and when it holds as many steps as it may."""
    await stub.Profile(worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_START))
    await asyncio.wait((finished,), timeout=seconds)
    return Path((await stub.Profile(worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_STOP))).path)


def _flags(texts: list[str]) -> dict[str, object]:
    return dict(text.split("=", 1) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["single-stream", "decode-256", "shared-prefix", "random"],
        help="with so many requests: NAME:COUNT",
    )
    parser.add_argument("--window-s", type=float, default=1.5)
    parser.add_argument("--every-s", type=float, default=0.0)
    parser.add_argument("--sequence", type=int, default=0, metavar="KERNELS", help="list so many kernels of a window")
    parser.add_argument("--num-requests", type=int, default=None)
    parser.add_argument("--timeout-s", type=float, default=200.0)
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the scheduler")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
