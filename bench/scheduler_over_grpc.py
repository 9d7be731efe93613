"""A scheduler and a simulated worker as processes, over real gRPC: device idle by depth, and a scheduler killed.

    python bench/scheduler_over_grpc.py > bench/results/scheduler-over-grpc.json

Idle: 256 requests decode in steps of exactly 8 ms. Idle share = 1 - device time of all steps / wall time, both over a
window without admissions, as the worker's own metrics count them. The formula is 1 - step / max(step, (step + gap) /
(depth + 1)) with the gap that depth 0 shows. Kill: a cache of a million tokens, SIGKILL, a new scheduler process at
once; the time to the first token through it, and the hit rate of the same prompts before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes, cpu_s

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.scheduler.v1 import scheduler_pb2

STEP_US = 8000
_SETTLE_S = 2.0


async def idle_at(depth: str, running: int, window_s: float) -> dict[str, object]:
    """One row of the depth table."""
    metrics = f"127.0.0.1:{_free_port()}"
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix") as processes:
            await processes.start("worker", "worker", {**_worker(running, 400_000, STEP_US), "metrics_listen": metrics})
            flags = {"workers": processes.address("worker"), "pipeline_depth": depth}
            await processes.start("scheduler", "scheduler", flags)
            async with BulkStream(processes.address("scheduler"), "idle") as stream:
                prompts = [rng.integers(10, 30_000, 32).astype(np.int32) for _ in range(running)]
                num_tokens = int((window_s + _SETTLE_S + 6.0) / (STEP_US / 1e6))
                await stream.submit(prompts, num_tokens)
                await stream.until(num_tokens=2 * running)
                await asyncio.sleep(_SETTLE_S)
                pid = processes.pid("scheduler")
                first, cpu, load = await _device(metrics), cpu_s(pid), os.getloadavg()[0]
                await asyncio.sleep(window_s)
                last, cpu = await _device(metrics), cpu_s(pid) - cpu
                assert stream.num_finished == 0, "the window was longer than the outputs"
                state = await stream.state()
    wall_s, busy_s, steps = (b - a for a, b in zip(first, last, strict=True))
    return {
        "depth": depth,
        "steps": int(steps),
        "idle": round(max(0.0, 1.0 - busy_s / wall_s), 5),
        "period_ms": round(wall_s / steps * 1e3, 4),
        "step_ms": round(busy_s / steps * 1e3, 4),
        "depth_reported": state.depth,
        "scheduler_cpu_ms_per_step": round(cpu / steps * 1e3, 3),
        "load_average": round(load, 2),
    }


async def kill_with(cached_tokens: int) -> dict[str, object]:
    """Fills the cache, kills the scheduler, and times the next one."""
    rng = np.random.default_rng(1)
    shared = [rng.integers(10, 30_000, 300) for _ in range(16)]
    num_prompts = (cached_tokens - 16 * 300) // 700 + 2
    prompts = [
        np.concatenate([shared[i % 16], rng.integers(10, 30_000, 700)]).astype(np.int32) for i in range(num_prompts)
    ]
    sample = prompts[:: max(1, num_prompts // 300)]
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix") as processes:
            await processes.start("worker", "worker", _worker(256, cached_tokens + 65_536, 1000))
            flags = {"workers": processes.address("worker")}
            await processes.start("scheduler", "scheduler", flags)
            async with BulkStream(processes.address("scheduler"), "before") as stream:
                await stream.submit(prompts, 1)
                await stream.until(num_finished=num_prompts)
            before, state = await _hit_rate(processes.address("scheduler"), "sample", sample)
            worker_cpu = cpu_s(processes.pid("worker"))
            os.kill(processes.pid("scheduler"), signal.SIGKILL)
            start = time.monotonic()
            await processes.start("successor", "scheduler", flags)
            serving_s = time.monotonic() - start
            async with BulkStream(processes.address("successor"), "first") as stream:
                await stream.submit(sample[:1], 1)
                await stream.until(num_tokens=1)
            first_token_s = time.monotonic() - start
            own_cpu, worker_cpu = cpu_s(processes.pid("successor")), cpu_s(processes.pid("worker")) - worker_cpu
            after, successor = await _hit_rate(processes.address("successor"), "after", sample)
    return {
        "cached_tokens_before": state.load.cached_pages,
        "adopted_tokens": successor.adopted_tokens,
        "serving_s": round(serving_s, 3),
        "first_token_s": round(first_token_s, 3),
        "successor_cpu_s": round(own_cpu, 2),
        "worker_cpu_s": round(worker_cpu, 2),
        "hit_rate_before": round(before, 6),
        "hit_rate_after": round(after, 6),
        "load_average": round(os.getloadavg()[0], 2),
    }


async def _hit_rate(
    address: str, name: str, prompts: Sequence[IntArray]
) -> tuple[float, scheduler_pb2.GetStateResponse]:
    """Of prompts that are all in the cache, by what their usage says; and the scheduler's state."""
    async with BulkStream(address, name) as stream:
        await stream.submit(prompts, 1)
        await stream.until(num_finished=len(prompts))
        return stream.cached_tokens / stream.prompt_tokens, await stream.state()


def _worker(slots: int, pages: int, step_us: int) -> dict[str, object]:
    return {
        "backend": "simulated",
        "num_slots": slots,
        "num_pages": pages,
        "max_total_len": 4096,
        "max_tokens_per_step": 8192,
        "simulated_base_us": step_us,
        "simulated_decode_row_us": 0,
        "simulated_decode_context_us": 0,
        "simulated_prefill_token_us": 0.1,
        "simulated_prefill_context_us": 0,
    }


async def _device(metrics: str) -> tuple[float, float, float]:
    """(monotonic time, device seconds of all steps, steps) of the worker so far."""
    before = time.monotonic()
    text = await asyncio.to_thread(_get, f"http://{metrics}/metrics")
    now = (before + time.monotonic()) / 2
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("radixmesh_step_seconds_"))
    return now, float(values["radixmesh_step_seconds_sum"]), float(values["radixmesh_step_seconds_count"])


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        return str(answer.read().decode())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _with_formula(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Adds what the formula says, with the gap of depth 0."""
    zero = next((row for row in rows if row["depth"] == "0"), None)
    if zero is None:
        return rows
    step = STEP_US / 1e3
    gap = float(str(zero["period_ms"])) - step
    for row in rows:
        depth = int(str(row["depth_reported"] if row["depth"] == "auto" else row["depth"]))
        row["gap_ms"] = round(gap, 3)
        row["idle_by_formula"] = round(1.0 - step / max(step, (step + gap) / (depth + 1)), 5)
    return rows


async def _measure(args: argparse.Namespace) -> dict[str, object]:
    rounds = []
    for _ in range(args.rounds):
        rows = [await idle_at(depth, args.running, args.window_s) for depth in args.depths]
        rounds.append(_with_formula(rows))
        print(json.dumps(rows), file=sys.stderr, flush=True)
    kills = [await kill_with(args.cached_tokens) for _ in range(args.kills)]
    return {
        "command": "python bench/scheduler_over_grpc.py",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "step_ms": STEP_US / 1e3,
        "running": args.running,
        "rounds": rounds,
        "kills": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline-depths", "--depths", dest="depths", nargs="+", default=["0", "1", "2", "auto"])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--window-s", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--cached-tokens", type=int, default=1_000_000)
    print(json.dumps(asyncio.run(_measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
