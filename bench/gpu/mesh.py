"""The workloads through a scheduler and a worker on a GPU as processes over gRPC: ids in, ids out.

    python bench/gpu/mesh.py --workloads decode-256 single-stream --runs 3 > bench/results/h200-dense.json
    python bench/gpu/mesh.py --workloads decode-256 single-stream --worker quantization=fp8

out_tok_s: output tokens over the time from the submission of the first request to the last token. device_busy: share of
that time in which steps ran, by the worker's own device times. roofline_share: the least time that the GPU's memory and
arithmetic allow, of the time taken. drafted, accepted: drafts that steps computed and kept, where the worker drafts, as
its scheduler counts them; each of either is a list by the draft's number in its row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from gpu.shapes import sampling_temperature, workload_roofline_s, write_shape
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes, cpu_s

from radixmesh.cli.bench.workloads import make_workload

_START_S = 240.0
_START_EVENTS = ("weights_loaded", "gemm_tuned", "gemm_pdl_tuned", "memory_sized", "graphs_captured")


async def measure(args: argparse.Namespace) -> dict[str, object]:
    metrics, of_scheduler = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix", start_s=_START_S) as processes:
            started = time.monotonic()
            os.environ["EXPERTS_HIT"] = str(Path(folder) / "experts-hit.json")
            through = (str(Path(__file__).with_name("count_experts.py")), "-m") if args.count_experts else ("-m",)
            flags = worker_flags(args, Path(folder), metrics)
            names = ["worker", *(f"rank-{rank}" for rank in range(1, args.ranks))]
            starts = [
                processes.start(name, "worker", {**flags, **rank_flags(rank, args.ranks)}, through=through)
                for rank, name in enumerate(names)
            ]
            await asyncio.gather(*starts)
            started = time.monotonic() - started
            log = (Path(folder) / "worker.log").read_text()
            workers = ",".join(processes.address(name) for name in names)
            scheduler = {"workers": workers, "pipeline_depth": args.depth, **_flags(args.scheduler)}
            scheduler = {"chunk_tokens": 8192, "metrics_listen": of_scheduler, **scheduler}
            await processes.start("scheduler", "scheduler", scheduler)
            results: dict[str, object] = {}
            try:
                for name in args.workloads:
                    before = await _drafts(of_scheduler)
                    rows = [await _run(processes, name, metrics, run, args) for run in range(args.runs)]
                    best = max(rows, key=lambda row: float(str(row["out_tok_s"])))
                    results[name] = {
                        **best,
                        **_since(before, await _drafts(of_scheduler)),
                        "runs": [row["out_tok_s"] for row in rows],
                        "first_tokens_s": [row["first_token_s"] for row in rows],
                        "busy": [row["device_busy"] for row in rows],
                    }
                    print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
            except BaseException:
                for process in ("worker", "scheduler"):
                    print((Path(folder) / f"{process}.log").read_text()[-3000:], file=sys.stderr)
                raise
            after = (Path(folder) / "worker.log").read_text()[len(log) :]
    start_log = [
        short_line(json.loads(line)) for line in log.splitlines() if any(event in line for event in _START_EVENTS)
    ]
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": args.shape,
        "ranks": args.ranks,
        "start_s": round(started, 2),
        "memory": memory_at_start(start_log),
        "start_log": start_log,
        "late_compiles": [
            short_line(json.loads(line)) for line in after.splitlines() if "kernel_compiled_late" in line
        ],
        "workloads": results,
    }


async def _run(processes: Processes, name: str, metrics: str, run: int, args: argparse.Namespace) -> dict[str, object]:
    turns = make_workload(name, num_requests=args.num_requests)
    prompts, lengths = [turn.new_ids for turn in turns], [turn.out_len for turn in turns]
    # Another salt every run: nothing may be found in the cache that the run before left there.
    label, temperature = f"{name}-{run}", sampling_temperature(args.shape)
    async with BulkStream(processes.address("scheduler"), label, label, temperature=temperature) as stream:
        await asyncio.sleep(0.5)
        cpu = {n: cpu_s(processes.pid(n)) for n in ("worker", "scheduler")}
        busy, steps = await device_steps(metrics)
        hits = await asyncio.to_thread(_experts_hit, processes.pid("worker")) if args.count_experts else (0, 0)
        start = time.monotonic()
        await stream.submit(prompts, lengths)
        await stream.until(num_finished=len(turns), timeout_s=args.timeout_s)
        wall = stream.last_token_at - start
        after_busy, after_steps = await device_steps(metrics)
        after_hits = await asyncio.to_thread(_experts_hit, processes.pid("worker")) if args.count_experts else (0, 0)
        tokens = sum(lengths)
        assert stream.num_tokens == tokens, (stream.num_tokens, tokens)
    hit, layers = after_hits[0] - hits[0], after_hits[1] - hits[1]
    return {
        **({"experts_hit_a_layer": round(hit / layers, 2)} if layers else {}),
        "out_tok_s": round(tokens / wall, 1),
        "seconds": round(wall, 3),
        "first_token_s": round(stream.first_token_at - start, 4),
        "out_tokens": tokens,
        "prompt_tokens": sum(len(prompt) for prompt in prompts),
        "cached_tokens": stream.cached_tokens,
        "steps": int(after_steps - steps),
        "device_busy": round((after_busy - busy) / wall, 4),
        "ms_per_step": round(wall / max(1, after_steps - steps) * 1e3, 3),
        "worker_cores": round((cpu_s(processes.pid("worker")) - cpu["worker"]) / wall, 2),
        "scheduler_cores": round((cpu_s(processes.pid("scheduler")) - cpu["scheduler"]) / wall, 2),
        "roofline_share": round(
            workload_roofline_s(args.shape, prompts, lengths, _quantization(args)) / args.ranks / wall, 4
        ),
    }


def _experts_hit(pid: int) -> tuple[int, int]:
    """(experts hit, routed layers run) so far, of a worker that counts them."""
    path, deadline = Path(os.environ["EXPERTS_HIT"]), time.monotonic() + 30.0
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        assert time.monotonic() < deadline, "the worker does not write its counts"
        time.sleep(0.02)
    hit, layers = json.loads(path.read_text())
    return hit, layers


def worker_flags(args: argparse.Namespace, folder: Path, metrics: str) -> dict[str, object]:
    return {
        "backend": "cuda",
        "model": write_shape(args.shape, folder),
        "load_format": "dummy",
        "num_slots": 512,
        "max_tokens_per_step": 8192,
        "max_total_len": 8192,
        "metrics_listen": metrics,
        "log-level": "info",
        **_flags(args.worker),
    }


def rank_flags(rank: int, num_ranks: int) -> dict[str, object]:
    """Flags of a worker that holds the model together with others; those of rank 0 are left as they are."""
    if num_ranks == 1:
        return {}
    flags: dict[str, object] = {"tp_size": num_ranks, "tp_rank": rank, "group_host": "127.0.0.1"}
    flags["cuda_device"] = rank % max(1, torch.cuda.device_count())
    return flags if rank == 0 else {**flags, "metrics_listen": f"127.0.0.1:{free_port()}"}


def _quantization(args: argparse.Namespace) -> str:
    return str(_flags(args.worker).get("quantization", "none"))


def _flags(texts: list[str]) -> dict[str, object]:
    return dict(text.split("=", 1) for text in texts)


async def device_steps(metrics: str) -> tuple[float, float]:
    """(device seconds of all steps, steps) so far."""
    text = await asyncio.to_thread(_get, f"http://{metrics}/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("radixmesh_step_seconds_"))
    return float(values["radixmesh_step_seconds_sum"]), float(values["radixmesh_step_seconds_count"])


async def metric_sums(metrics: str, prefix: str) -> dict[str, float]:
    """Values of the metrics whose names begin with the prefix, those of all labels together."""
    text, found = await asyncio.to_thread(_get, f"http://{metrics}/metrics"), dict[str, float]()
    for line in text.splitlines():
        if line.startswith(prefix):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
    return found


async def _drafts(metrics: str) -> dict[str, list[int]]:
    """Drafts so far, by the draft's number in its row, from a scheduler's metrics."""
    text = await asyncio.to_thread(_get, f"http://{metrics}/metrics")
    names = {"drafted": "radixmesh_drafted_tokens_total", "accepted": "radixmesh_accepted_draft_tokens_total"}
    return {
        name: [int(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if line.startswith(series + "{")]
        for name, series in names.items()
    }


def _since(before: Mapping[str, list[int]], after: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The drafts of all runs of a workload; nothing where there are none."""
    return {
        name: [number - (before[name][index] if index < len(before[name]) else 0) for index, number in enumerate(of)]
        for name, of in after.items()
        if sum(of) > sum(before[name])
    }


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        return str(answer.read().decode())


def memory_at_start(start_log: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Bytes of the weights, and of the device that are in use before there are KV pages and graphs."""
    fields = {"weights_loaded": ("bytes", "weights_bytes"), "memory_sized": ("used_bytes", "used_bytes")}
    return {
        name: line[field]
        for line in start_log
        for field, name in (fields.get(str(line["event"]), ("", "")),)
        if field in line
    }


def short_line(fields: Mapping[str, object]) -> dict[str, object]:
    """A line of the log without where it comes from."""
    return {key: value for key, value in fields.items() if key not in ("ts", "level", "daemon", "instance", "logger")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return f"{gpus[0]} (one of {len(gpus)} in the machine)" if gpus else "no GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--workloads", nargs="+", default=["single-stream", "decode-256", "shared-prefix", "random"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="workers that hold the model together, a GPU each")
    parser.add_argument("--pipeline-depth", "--depth", dest="depth", default="auto")
    parser.add_argument("--num-requests", type=int, default=None)
    parser.add_argument("--timeout-s", type=float, default=200.0)
    parser.add_argument(
        "--count-experts", action="store_true", help="experts hit a layer and step; slower: take speeds without it"
    )
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the scheduler")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
