"""CPU of a decode step in scheduler and worker over gRPC, by thread: one stream, a simulated device. No GPU.

    python bench/step_cpu.py --step-ms 0.8 --rows 1 --rounds 5 [--against PATH-TO-ANOTHER-TREE]

Prints microseconds of CPU by step, as the kernel has counted them, and tokens a second. With --against, rounds of both
trees take turns, and `ratio` is this tree's CPU over the other's, median and extremes of the rounds: what else the
machine does meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes

_PROMPT, _EDGE = 64, 32


async def measure(step_ms: float, num_rows: int, num_tokens: int, flags: dict[str, str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        async with Processes(Path(name), "unix") as processes:
            latency = {"simulated_base_us": step_ms * 1e3, "simulated_decode_row_us": 0.0}
            await processes.start("worker", "worker", {"backend": "simulated", **latency})
            await processes.start("scheduler", "scheduler", {"workers": processes.address("worker"), **flags})
            pids = {name: processes.pid(name) for name in ("worker", "scheduler")}
            prompts = [np.arange(10, 10 + _PROMPT).astype(np.int32) + row for row in range(num_rows)]
            async with BulkStream(processes.address("scheduler"), "cpu") as stream:
                await stream.submit(prompts, num_tokens)
                await stream.until(num_tokens=_EDGE * num_rows)
                before, tokens, start = (
                    {n: threads_ns(pid) for n, pid in pids.items()},
                    stream.num_tokens,
                    time.monotonic(),
                )
                await stream.until(num_tokens=(num_tokens - _EDGE) * num_rows)
                seconds, steps = time.monotonic() - start, (stream.num_tokens - tokens) / num_rows
                after = {n: threads_ns(pid) for n, pid in pids.items()}
    return {
        "step_ms": round(seconds / steps * 1e3, 3),
        "cpu_us": {n: cpu_of(before[n], after[n], steps) for n in pids},
    }


def threads_ns(pid: int) -> dict[str, int]:
    """Nanoseconds of CPU so far, by thread id and name."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[f"{task.name} {(task / 'comm').read_text().strip()}"] = int(
                (task / "schedstat").read_text().split()[0]
            )
        except OSError:
            continue
    return found


def cpu_of(before: dict[str, int], after: dict[str, int], steps: float) -> dict[str, float]:
    """Microseconds a step: of all threads, and of those with more than 2."""
    spent = {name: (ns - before.get(name, 0)) / steps / 1e3 for name, ns in after.items()}
    largest = sorted(spent, key=lambda name: -spent[name])
    return {"all": round(sum(spent.values()), 1)} | {
        name: round(spent[name], 1) for name in largest if spent[name] > 2.0
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=0.8)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the scheduler")
    parser.add_argument("--against", type=Path, default=None, help="the root of another tree, with this bench in it")
    args = parser.parse_args()
    flags = dict(text.split("=", 1) for text in args.scheduler)
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(asyncio.run(measure(args.step_ms, args.rows, args.tokens, flags)))
        if args.against is not None:
            theirs.append(_other(args))
    report: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"cores": os.cpu_count(), "load_average": os.getloadavg()},
        "versions": {"python": platform.python_version(), "grpcio": version("grpcio")},
        "ours": ours,
    }
    if theirs:
        report["other"] = theirs
        report["ratio"] = {
            name: _spread([_all(a, name) / _all(b, name) for a, b in zip(ours, theirs, strict=True)])
            for name in ("worker", "scheduler")
        }
    print(json.dumps(report, indent=1))


def _all(run: dict[str, object], name: str) -> float:
    cpu: dict[str, dict[str, float]] = run["cpu_us"]  # type: ignore[assignment]
    return cpu[name]["all"]


def _spread(values: list[float]) -> list[float]:
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def _other(args: argparse.Namespace) -> dict[str, object]:
    command = [
        sys.executable,
        "bench/step_cpu.py",
        "--step-ms",
        args.step_ms,
        "--rows",
        args.rows,
        "--tokens",
        args.tokens,
    ]
    path = str(args.against / "src")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=args.against,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)["ours"][0]
    return found


if __name__ == "__main__":
    main()
