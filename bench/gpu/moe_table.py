"""Models with routed experts on one GPU: the workloads through a mesh, and where a step's time goes.

    python bench/gpu/moe_table.py --runs 3 --where single-stream decode-256 > bench/results/h200-moe.json

Each shape by mesh.py, then by where.py in another mesh: about 75 s and 40 s a shape. Prints JSON: by shape the time and
memory of the start, the best run of each workload with what all runs gave, and traces.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_SHAPES = ("deepseek-v2-lite", "qwen3-30b-a3b")
_WORKLOADS = ("single-stream", "decode-256", "shared-prefix")
_KEPT = ("start_s", "memory", "late_compiles", "workloads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(_SHAPES))
    parser.add_argument("--workloads", nargs="+", default=list(_WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--where", nargs="*", default=[], metavar="WORKLOAD", help="workloads to be traced")
    args = parser.parse_args()
    report: dict[str, object] = {}
    shapes: dict[str, object] = {}
    for shape in args.shapes:
        got = _run("mesh.py", "--shape", shape, "--workloads", *args.workloads, "--runs", str(args.runs))
        report |= {"command": " ".join(["python", *sys.argv]), "machine": got["machine"], "versions": got["versions"]}
        shapes[shape] = {
            **{key: got[key] for key in _KEPT},
            "where": [
                _run("where.py", "--shape", shape, "--workloads", workload, "--window-s", "1")["where"]
                for workload in args.where
            ],
        }
        print(json.dumps({shape: shapes[shape]}), file=sys.stderr, flush=True)
    print(json.dumps({**report, "shapes": shapes}, indent=1))


def _run(script: str, *arguments: str) -> dict[str, object]:
    """The script's JSON; its other output is shown."""
    run = subprocess.run([sys.executable, _HERE / script, *arguments], stdout=subprocess.PIPE, check=True)
    result: dict[str, object] = json.loads(run.stdout)
    return result


if __name__ == "__main__":
    main()
