"""A step of the scheduler before and after a change: both trees in turn on one machine, which need not be quiet.

    git worktree add /tmp/before c8e8d85
    python bench/scheduler_pairs.py step-cost --before /tmp/before --repeats 5

Times are CPU time of the scheduler's thread. Each repeat runs the two trees next to each other, the order changing from
one to the next.

step-cost: step i of a replay is the same work in every run, so its cost is the least of all repeats; before_ms and
after_ms are the medians of those over the steps with all slots taken, ratio that of the medians, mean_ratio that of the
sums. ratios: of single repeats. Other load takes caches and halves of cores: ratios spread, ratio does not.
opcodes: bytecode instructions of scheduler and runtime in a shorter replay, which no load changes.
ranks: ratio is the median, over repeats, of after over before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent))
from scheduler_tables import ROOT, machine, ranks, run_in, step_cost

Run = dict[str, object]
_FULL = 0.9
"""A step counts as a full one with so much of the running limit in slots."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=("step-cost", "ranks"))
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="rows of the suite, from 0 (default all)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    suite = step_cost() if args.suite == "step-cost" else ranks()
    chosen = suite if args.only is None else [suite[number] for number in args.only]
    trees = {"before": args.before, "after": ROOT}
    row_of = _step_row if args.suite == "step-cost" else _ranks_row
    rows = []
    for arguments in chosen:
        rows.append(row_of(trees, [str(argument) for argument in arguments], args.repeats))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    only = f" --only {' '.join(map(str, args.only))}" if args.only is not None else ""
    report = {
        "command": f"python bench/scheduler_pairs.py {args.suite} --before CHECKOUT --repeats {args.repeats}{only}",
        "commits": {name: _commit(tree) for name, tree in trees.items()},
        "machine": machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "runs": rows,
    }
    if args.suite == "step-cost":
        report["opcodes"] = _opcodes(trees)
    (args.out / f"scheduler-{args.suite}-pairs.json").write_text(json.dumps(report, indent=1) + "\n")


def _step_row(trees: dict[str, Path], arguments: list[str], repeats: int) -> Run:
    running_limit = int(arguments[arguments.index("--running") + 1])
    least: dict[str, npt.NDArray[np.int64]] = {}
    # Trees whose planners differ may take a step more.
    full: dict[str, npt.NDArray[np.bool_]] = {}
    loads, ratios = [], []
    for repeat in range(repeats):
        medians = {}
        for name in sorted(trees, reverse=repeat % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "times.npz"
                _run_steps(trees[name], path, arguments)
                taken = np.load(path)
                times, parts = taken["rows"], [str(part) for part in taken["parts"]]
                full[name] = is_full = taken["running"] >= int(_FULL * running_limit)
            least[name] = times if name not in least else np.minimum(least[name], times)
            medians[name] = float(np.median(times[is_full].sum(axis=1)))
        loads.append(round(os.getloadavg()[0], 2))
        ratios.append(round(medians["after"] / medians["before"], 3))
    steps = {name: times[full[name]] for name, times in least.items()}
    medians = {name: float(np.median(times.sum(axis=1))) for name, times in steps.items()}
    return {
        "arguments": " ".join(arguments),
        "num_steps": int(full["after"].sum()),
        "load_average": loads,
        **{f"{name}_ms": round(value / 1e6, 4) for name, value in medians.items()},
        "ratio": round(medians["after"] / medians["before"], 3),
        "mean_ratio": round(float(steps["after"].sum(axis=1).mean() / steps["before"].sum(axis=1).mean()), 3),
        "ratios": ratios,
        "parts_us": {
            part: [round(float(np.median(steps[name][:, i])) / 1e3, 1) for name in ("before", "after")]
            for i, part in enumerate(parts)
        },
    }


def _opcodes(trees: dict[str, Path]) -> Run:
    arguments = "--workload multi-turn --closed --requests 700 --running 256 --tree-tokens 10000"
    counts = {}
    for name, tree in trees.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "opcodes.json"
            _run_steps(tree, path, ["--opcodes", *arguments.split()])
            counts[name] = sum(json.loads(path.read_text()).values())
    return {"arguments": arguments, **counts, "ratio": round(counts["after"] / counts["before"], 3)}


def _run_steps(tree: Path, path: Path, arguments: list[str]) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "bench" / "step_times.py"), str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"},
        check=True,
    )


def _ranks_row(trees: dict[str, Path], arguments: list[str], repeats: int) -> Run:
    taken: dict[str, list[Run]] = {name: [] for name in trees}
    for repeat in range(repeats):
        for name in sorted(trees, reverse=repeat % 2 == 0):
            taken[name].append(run_in(trees[name], arguments))
    times = {name: [float(str(run["step_ms"])) for run in runs] for name, runs in taken.items()}
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    return {
        "arguments": taken["after"][0]["arguments"],
        "load_average": [run["load_average"] for run in taken["after"]],
        **{f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
