"""The host's share of a decode step on a GPU: CPU by thread, times of the functions on its path, by pipeline depth.

    python bench/gpu/host.py --shape llama-3.2-1b --pipeline-depths auto 3 6 --out FOLDER

A scheduler and a worker over gRPC, both under `bench/span_recorder.py`; one stream (and `--rows`) decodes. us_per_step:
CPU of each thread by what the kernel has counted; spans: microseconds of a function by step, median, with the share of
time spent waiting in those that wait. start: the spans of the worker's start, and the kernels that Triton compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gpu.idle import idle_of_trace
from gpu.mesh import device_steps, free_port, gpu_name, short_line
from gpu.shapes import write_shape
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes
from step_cpu import cpu_of, threads_ns

from radixmesh.daemons.runtime.arrays import IntArray

_RECORDER = str(Path(__file__).parents[1] / "span_recorder.py")
# Tokens of a run at either end that are not measured.
_EDGE = 32
_PROMPT, _TOKENS, _TRACED = 128, 512, 60
_START_EVENTS = ("weights_loaded", "gemm_", "memory_sized", "kernels_", "graphs_captured", "start_", "serving")


async def measure(args: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": args.shape,
    }
    with tempfile.TemporaryDirectory() as name:
        folder, metrics = Path(name), f"127.0.0.1:{free_port()}"
        async with Processes(folder, "unix", start_s=240.0) as processes:
            worker = {
                "backend": "cuda",
                "model": write_shape(args.shape, folder),
                "load_format": "dummy",
                "num_slots": 512,
                "max_tokens_per_step": 8192,
                "max_total_len": 8192,
                "dump_folder": folder,
                "metrics_listen": metrics,
                "log-level": "info",
                **dict(text.split("=", 1) for text in args.worker),
            }
            started, started_at = time.monotonic(), time.time()
            through = (_RECORDER, str(folder / "worker.json")) if args.spans else ("-m",)
            try:
                await processes.start("worker", "worker", worker, through=through)
            except RuntimeError:
                print((folder / "worker.log").read_text()[-3000:], file=sys.stderr)
                raise
            result["start_s"] = round(time.monotonic() - started, 2)
            log = [json.loads(line) for line in (folder / "worker.log").read_text().splitlines() if line[:1] == "{"]
            result["start_log"] = [
                {"at_s": round(datetime.fromisoformat(line["ts"]).timestamp() - started_at, 2), **short_line(line)}
                for line in log
                if line["event"].startswith(_START_EVENTS)
            ]
            runs: list[dict[str, Any]] = []
            for depth in args.depths:
                scheduler = f"scheduler-{depth}"
                flags = {"workers": processes.address("worker"), "pipeline_depth": depth, "chunk_tokens": 8192}
                through = (_RECORDER, str(folder / f"{scheduler}.json")) if args.spans else ("-m",)
                await processes.start(scheduler, "scheduler", flags, through=through)
                for num_rows in args.rows:
                    runs.append(await _run(processes, scheduler, num_rows, metrics, args))
                    print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
                await processes.stop(scheduler)
                if args.spans:
                    last = next(run for run in reversed(runs) if run["scheduler"] == scheduler)
                    last["scheduler_spans"] = _spans(folder / f"{scheduler}.json", last)
            await processes.stop("worker")
            result["runs"] = runs
            if args.spans:
                for run in runs:
                    run["worker_spans"] = _spans(folder / "worker.json", run)
                result["start"] = _start(folder / "worker.json")
    return result


async def _run(
    processes: Processes, scheduler: str, num_rows: int, metrics: str, args: argparse.Namespace
) -> dict[str, Any]:
    rng = np.random.default_rng(num_rows)
    prompts = [rng.integers(10, 30_000, _PROMPT).astype(np.int32) for _ in range(num_rows)]
    pids = {"worker": processes.pid("worker"), "scheduler": processes.pid(scheduler)}
    async with BulkStream(processes.address(scheduler), f"host-{num_rows}", f"{scheduler}-{num_rows}") as stream:
        await asyncio.sleep(0.3)
        decoded = [await _decode(stream, prompts, pids, metrics) for _ in range(args.repeats)]
        state = await stream.state()
        traced = await idle_of_trace(processes.address("worker"), stream, prompts, _TRACED) if args.idle else None
    rates = [run["out_tok_s"] for run in decoded]
    return {
        "scheduler": scheduler,
        "rows": num_rows,
        "depth_reported": state.depth,
        **decoded[-1],
        "out_tok_s": rates,
        "traced": traced,
    }


async def _decode(stream: BulkStream, prompts: list[IntArray], pids: dict[str, int], metrics: str) -> dict[str, Any]:
    """One run: its rate, and the CPU of its decode steps, without the first and the last of them."""
    num_rows, before, submitted = len(prompts), stream.num_tokens, time.monotonic()
    await stream.submit(prompts, _TOKENS)
    await stream.until(num_tokens=before + 1)
    first = time.monotonic()
    await stream.until(num_tokens=before + _EDGE * num_rows)
    cpu, device = {name: threads_ns(pid) for name, pid in pids.items()}, await device_steps(metrics)
    start, tokens = time.monotonic_ns(), stream.num_tokens
    await stream.until(num_tokens=before + (_TOKENS - _EDGE) * num_rows)
    end = time.monotonic_ns()
    steps = (stream.num_tokens - tokens) / num_rows
    cpu_after, after = {name: threads_ns(pid) for name, pid in pids.items()}, await device_steps(metrics)
    await stream.until(num_tokens=before + _TOKENS * num_rows)
    return {
        "out_tok_s": round(_TOKENS * num_rows / (stream.last_token_at - submitted), 1),
        "step_us": round((end - start) / steps / 1e3, 1),
        "device_us": round((after[0] - device[0]) / max(1, after[1] - device[1]) * 1e6, 1),
        "cpu_us_per_step": {name: cpu_of(cpu[name], cpu_after[name], steps) for name in pids},
        "ns": [start, end],
        "first_token_ms": round((first - submitted) * 1e3, 2),
        "first_token_ns": [int(submitted * 1e9), int(first * 1e9)],
    }


def _spans(path: Path, run: dict[str, Any]) -> dict[str, object]:
    """By label and thread: calls and microseconds a step; what ten steps in the middle looked like, and the time from
    the submission to the first token."""
    record = json.loads(path.read_text())
    start, end = run["ns"]
    spans = sorted((s for s in record["spans"] if start <= s[2] and s[3] <= end), key=lambda s: s[2])
    times: dict[str, list[int]] = defaultdict(list)
    for label, thread, first, last in spans:
        times[f"{label} [{record['threads'].get(str(thread), thread)}]"].append(last - first)
    middle = (start + end) // 2
    timeline = [
        [s[0], record["threads"].get(str(s[1]), s[1]), round((s[2] - middle) / 1e3), round((s[3] - middle) / 1e3)]
        for s in spans
        if middle <= s[2] <= middle + 4_000_000
    ]
    submitted, first_token = run["first_token_ns"]
    first = [
        [s[0], record["threads"].get(str(s[1]), s[1]), round((s[2] - submitted) / 1e3), round((s[3] - submitted) / 1e3)]
        for s in sorted(record["spans"], key=lambda s: s[2])
        if submitted <= s[2] <= first_token
    ]
    return {
        "first_token_us": first,
        "us": {
            label: {
                "calls": len(all_),
                "median": round(float(np.median(all_)) / 1e3, 1),
                "p90": round(float(np.percentile(all_, 90)) / 1e3, 1),
            }
            for label, all_ in times.items()
        },
        "timeline_us": timeline,
    }


def _start(path: Path) -> dict[str, object]:
    record = json.loads(path.read_text())
    first = min(s[2] for s in record["spans"])
    labels = {"import daemon", "import torch", "import cuda backend", "load_model", "create_kernels", "create_runner"}
    labels |= {"CudaDevice", "tune_kind", "GemmSm90.prepare", "DeviceRunner.warm_up", "PromptSteps.capture"}
    labels |= {"PromptSteps.warm_up", "SlotSampler.warm_up"}
    phases = [
        [s[0], round((s[2] - first) / 1e9, 3), round((s[3] - s[2]) / 1e9, 3)] for s in record["spans"] if s[0] in labels
    ]
    captures = [round((s[3] - s[2]) / 1e9, 3) for s in record["spans"] if s[0] == "StepGraphs.capture"]
    kernels: dict[str, list[float]] = defaultdict(list)
    for name, seconds, from_cache in record["compiled"]:
        kernels[f"{name}{' (cached)' if from_cache else ''}"].append(round(seconds, 3))
    by_time = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "phases": phases,
        "captures": captures,
        "compiled_s": {name: [len(all_), round(sum(all_), 3)] for name, all_ in by_time},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--pipeline-depths", "--depths", dest="depths", nargs="*", default=["auto"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--idle", action="store_true", help="also trace some tens of steps, for the idle share")
    parser.add_argument("--no-spans", dest="spans", action="store_false", help="without the recorder")
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
