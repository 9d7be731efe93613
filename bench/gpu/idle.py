"""GPU idle in steady decode through the mesh: by the union of kernel intervals in a profiler trace, by depth and rows.

    python bench/gpu/idle.py --pipeline-depths 0 1 2 auto auto-unheld --rows 1 64 256

auto-unheld: auto with --no-hold-plans.

A scheduler and a worker as processes over gRPC; the worker's Profile verb traces some tens of steps while `rows`
requests decode. That is a window: a tenth of a second, in which one pause of the host is a tenth of the time. So each
case has several, all cases in turns, each time with a scheduler of its own; figures are medians of windows, beside
those of the worst one. Idle is the share of the time between the first and the last kernel in which none ran. The
formula is 1 - step / max(step, (step + gap) / (depth + 1)), with the gap that depth 0 shows. `gaps_us` says between
which kernels the time of a step without one lies; `idle_of_windows` is in their order.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from gpu.shapes import sampling_temperature, write_shape
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

_STEPS = 40
_TOKENS = 300


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    cases: dict[tuple[str, int], list[dict[str, object]]] = {(d, num): [] for d in args.depths for num in args.rows}
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder), "unix", start_s=240.0) as processes:
            worker = {
                "backend": "cuda",
                "model": write_shape(args.shape, Path(folder)),
                "load_format": "dummy",
                "num_slots": 256,
                "max_tokens_per_step": 8192,
                "max_total_len": 4096,
                "dump_folder": folder,
            }
            await processes.start("worker", "worker", worker)
            for window, depth in itertools.product(range(args.windows), args.depths):
                name = f"scheduler-{depth}-{window}"
                flags = {
                    "workers": processes.address("worker"),
                    "chunk_tokens": 8192,
                    "pipeline_depth": depth.removesuffix("-unheld"),
                    "hold_plans": not depth.endswith("-unheld"),
                }
                await processes.start(name, "scheduler", flags)
                for num_rows in args.rows:
                    found = await _idle(processes, name, num_rows, args.shape)
                    cases[depth, num_rows].append(found)
                    print(json.dumps({"depth": depth, "rows": num_rows, **found}), file=sys.stderr, flush=True)
                await processes.stop(name)
    return [{"depth": depth, "rows": num, **summary(windows)} for (depth, num), windows in cases.items()]


def summary(windows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Of all windows of a case: medians, the worst idle time with its longest gap, and the gaps of the window that is
    in the middle."""
    by_idle = sorted(windows, key=lambda window: float(str(window["idle"])))
    middle, worst = by_idle[len(by_idle) // 2], by_idle[-1]
    medians = {
        name: round(float(np.median([float(str(window[name])) for window in windows])), 5)
        for name in ("idle", "period_ms", "gaps_over_20us", "longest_gap_us")
    }
    return {
        **medians,
        "idle_worst": worst["idle"],
        "longest_gap_us_worst": worst["longest_gap_us"],
        "idle_of_windows": [window["idle"] for window in windows],
        "gaps_us": middle["gaps_us"],
        "depth_reported": middle["depth_reported"],
    }


async def _idle(processes: Processes, scheduler: str, num_rows: int, shape: str) -> dict[str, object]:
    rng = np.random.default_rng(num_rows)
    prompts = [rng.integers(10, 30_000, 128).astype(np.int32) for _ in range(num_rows)]
    stream = BulkStream(
        processes.address(scheduler),
        f"idle-{num_rows}",
        f"{scheduler}-{num_rows}",
        temperature=sampling_temperature(shape),
    )
    async with stream:
        found = await idle_of_trace(processes.address("worker"), stream, prompts, _STEPS)
        return {**found, "depth_reported": (await stream.state()).depth}


async def idle_of_trace(worker: str, stream: BulkStream, prompts: list[IntArray], num_steps: int) -> dict[str, object]:
    """Submits prompts and traces some of their decode steps; returns when all have ended, so that whatever is measured
    next shares the device with none of these."""
    num_rows, before, finished = len(prompts), stream.num_tokens, stream.num_finished
    async with open_channel(worker) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stream.submit(prompts, _TOKENS)
        await stream.until(num_tokens=before + 60 * num_rows)
        await stub.Profile(worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_START, num_steps=num_steps))
        await stream.until(num_tokens=stream.num_tokens + 3 * num_steps * num_rows)
        answer = await stub.Profile(worker_pb2.ProfileRequest(action=worker_pb2.PROFILE_ACTION_STOP))
        await stream.until(num_finished=finished + num_rows)
    return _read(Path(answer.path))


def _read(path: Path) -> dict[str, object]:
    """Busy time of the device in a Chrome trace, without the first fifth, in which the profiler itself starts."""
    events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]) for e in events if e.get("cat") in kinds
    )
    spans = spans[len(spans) // 5 :]
    start, end, before = spans[0]
    busy, longest = end - start, 0.0
    gaps: dict[str, float] = defaultdict(float)
    for first, last, name in spans[1:]:
        if first > end:
            gaps[f"{_short(before)} > {_short(name)}"] += first - end
            longest = max(longest, first - end)
        busy += max(0.0, last - max(first, end))
        if last > end:
            end, before = last, name
    # A step begins when the device fetches its numbers.
    starts = sorted(
        float(e["ts"]) for e in events if e.get("cat") == "kernel" and "_fetch_step_inputs_kernel" in e["name"]
    )
    period = float(np.median(np.diff(starts))) if len(starts) > 2 else 0.0
    num_steps = max(1.0, (end - start) / period) if period else 1.0
    largest = sorted(gaps.items(), key=lambda gap: -gap[1])[:8]
    return {
        "idle": round(1.0 - busy / (end - start), 5),
        "period_ms": round(period / 1e3, 4),
        "gaps_over_20us": sum(1 for a, b in itertools.pairwise(spans) if b[0] - a[1] > 20.0),
        "longest_gap_us": round(longest, 2),
        "gaps_us": {pair: round(us / num_steps, 2) for pair, us in largest},
    }


def _short(name: str) -> str:
    """A kernel's name without its parameters."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].strip()[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--pipeline-depths", "--depths", dest="depths", nargs="+", default=["0", "1", "2", "auto"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--windows", type=int, default=5, help="traces of each case")
    print(json.dumps({"command": " ".join(sys.argv), "idle": asyncio.run(measure(parser.parse_args()))}, indent=1))


if __name__ == "__main__":
    main()
