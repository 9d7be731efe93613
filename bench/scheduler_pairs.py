"""A step of the scheduler before and after a change: both trees in turn on one machine, which need not be quiet.

    git worktree add /tmp/before c8e8d85
    python bench/scheduler_pairs.py step-cost --before /tmp/before --repeats 5

Times are CPU time of the scheduler's thread. Each repeat runs the two trees next to each other, the order changing from
one to the next. ratio: the median, over repeats, of after over before; ratios: all of them. Other load on the machine
takes caches and halves of cores: where they spread widely, more repeats are needed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from scheduler_tables import ROOT, machine, ranks, run_in, step_cost

Run = dict[str, object]


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
    rows = []
    for arguments in chosen:
        taken: dict[str, list[Run]] = {name: [] for name in trees}
        for repeat in range(args.repeats):
            for name in sorted(trees, reverse=repeat % 2 == 0):
                taken[name].append(run_in(trees[name], arguments))
        rows.append(_row(taken))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = {
        "command": f"python bench/scheduler_pairs.py {args.suite} --before CHECKOUT --repeats {args.repeats}",
        "commits": {name: _commit(tree) for name, tree in trees.items()},
        "machine": machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "runs": rows,
    }
    (args.out / f"scheduler-{args.suite}-pairs.json").write_text(json.dumps(report, indent=1) + "\n")


def _row(taken: dict[str, list[Run]]) -> Run:
    times = {name: [_step_ms(run) for run in runs] for name, runs in taken.items()}
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    any_run = taken["after"][0]
    same = ("hit_rate", "num_retracted", "retractions")
    return {
        "arguments": any_run["arguments"],
        "load_average": [run["load_average"] for run in taken["after"]],
        **{f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{f"{name}_{key}": runs[0][key] for name, runs in taken.items() for key in same if key in runs[0]},
    }


def _step_ms(run: Run) -> float:
    """The median step with all slots taken; of the ranks' suite, which reports no median, the mean."""
    full = run.get("full_steps")
    return float(full["ms"]["p50"] if isinstance(full, dict) else str(run["step_ms"]))


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
