"""The scheduler's tables: step cost over tree sizes, hit rates against the oracle, orders under cache pressure.

    python bench/scheduler_tables.py step-cost hit-rates orders ageing --out bench/results

Each suite is a list of `radixmesh bench scheduler` runs, each in a process of its own, and becomes one JSON file
scheduler-SUITE.json with the machine, its load and a calibration: the CPU time of a fixed piece of Python and numpy,
taken before every run. Step costs are CPU time; on a machine that is busy with other things both grow alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
SHARING = ("few-shot", "multi-turn", "tree", "code", "none", "mixed")
# Tokens that a cache would need to hold everything, by workload (radixmesh.cli.bench.oracle).
WORKING_SETS = {
    "few-shot": 75_816,
    "multi-turn": 164_235,
    "tree": 122_955,
    "code": 370_363,
    "none": 466_946,
    "mixed": 252_972,
}
NO_AGEING = ("--planner", "max_overtake_factor=1e9")


def step_cost() -> list[list[object]]:
    """Chats that come as fast as others end, over trees of all sizes; the last ones evict at every grant."""
    runs: list[list[object]] = []
    for running, requests in ((256, 2304), (1024, 9216)):
        for tree in (10_000, 100_000, 1_000_000, 4_000_000):
            runs += [[*_closed(running, requests), "--tree-tokens", tree]]
    runs += [[*_closed(256, 2304), "--tree-tokens", tree, "--cache", "trie"] for tree in (10_000, 1_000_000)]
    runs += [[*_closed(256, 2304), "--tree-tokens", 1_000_000, "--cache-tokens", 1_050_000]]
    return runs


def hit_rates() -> list[list[object]]:
    """Room for everything, arrivals as they are."""
    names = (*SHARING, "random", "shared-prefix")
    return [["--workload", name, "--policy", p] for name in names for p in ("fcfs", "lpm", "dfs-weight")]


def orders() -> list[list[object]]:
    """Cache for a half and a quarter of the working set, arrivals so much faster that requests wait."""
    return [
        ["--workload", name, "--running", 32, "--speed", 20, "--cache-tokens", WORKING_SETS[name] // part, *policy]
        for part in (2, 4)
        for name in SHARING
        if name != "none"
        for policy in (["--policy", "fcfs"], ["--policy", "lpm"], ["--policy", "dfs-weight"])
    ]


def ageing() -> list[list[object]]:
    """mixed at saturation, four times as many turns as usual: LPM with and without a bound on waiting."""
    mixed = ("--workload", "mixed", "--requests", 2752, "--running", 64)
    cells = ((4, 4, 0), (2, 4, 1), (4, 20, 1), (2, 10, 0))
    policies = (["--policy", "fcfs"], ["--policy", "lpm", *NO_AGEING], ["--policy", "lpm"])
    return [
        [*mixed, "--cache-tokens", WORKING_SETS["mixed"] // part, "--speed", speed, "--seed", seed, *policy]
        for part, speed, seed in cells
        for policy in policies
    ]


def ranks() -> list[list[object]]:
    """Data-parallel ranks of 128 rows each behind one scheduler, which has no workers."""
    return [["scheduler_ranks.py", "--ranks", num, "--steps", 700] for num in (1, 2, 8, 64)]


SUITES: dict[str, Callable[[], list[list[object]]]] = {
    "step-cost": step_cost,
    "hit-rates": hit_rates,
    "orders": orders,
    "ageing": ageing,
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=SUITES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; leave it at 1 for step-cost")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    for suite in args.suites:
        runs: list[dict[str, object]] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            for run in pool.map(_run, SUITES[suite]()):
                runs.append(run)
                print(_line(run), file=sys.stderr, flush=True)
        report = {
            "command": f"python bench/scheduler_tables.py {suite}",
            "machine": machine(),
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "runs": runs,
        }
        (args.out / f"scheduler-{suite}.json").write_text(json.dumps(report, indent=1) + "\n")


def _closed(running: int, requests: int) -> list[object]:
    return ["--workload", "multi-turn", "--closed", "--requests", requests, "--running", running]


def _run(arguments: Sequence[object]) -> dict[str, object]:
    return run_in(ROOT, arguments)


def run_in(tree: Path, arguments: Sequence[object]) -> dict[str, object]:
    """One run of the code in `tree`, a checkout."""
    calibration, load = _calibration_us(), os.getloadavg()[0]
    words = [str(argument) for argument in arguments]
    command = ["-m", "radixmesh.cli", "bench", "scheduler", *words, "--json"]
    if words[0].endswith(".py"):
        command = [str(tree / "bench" / words[0]), *words[1:]]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    report: dict[str, object] = json.loads(done.stdout)
    return {"arguments": " ".join(words), "calibration_us": calibration, "load_average": round(load, 2), **report}


def _calibration_us() -> float:
    """CPU time of a fixed piece of work, microseconds, the median of many."""
    values = np.random.default_rng(0).integers(0, 1 << 30, 4096)
    taken = []
    for _ in range(300):
        start = time.thread_time_ns()
        order = np.argsort(values)
        table = {int(v): i for i, v in enumerate(values[order[:256]].tolist())}
        assert len(table) <= 256
        taken.append(time.thread_time_ns() - start)
    return round(float(np.median(taken)) / 1e3, 1)


def machine() -> str:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return f"{os.cpu_count()} x {model.partition(':')[2].strip()}"


def _line(run: dict[str, object]) -> str:
    names = (
        "calibration_us",
        "load_average",
        "hit_rate",
        "oracle_hit_rate",
        "out_tok_s",
        "saturated",
        "ttft_ms",
        "step_ms",
    )
    return f"{run['arguments']}: " + "  ".join(f"{name} {run[name]}" for name in names if name in run)


if __name__ == "__main__":
    main()
