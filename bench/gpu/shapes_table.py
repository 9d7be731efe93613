"""Speeds of dense models from 1B to 8B, one after the other: `mesh.py` on each shape, in one report.

    python bench/gpu/shapes_table.py --runs 2 > bench/results/h200-shapes.json

Some 25 s a shape, of which its start is 10 to 15. A shape that fails is left out, and said so on stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SHAPES = ("llama-3.2-1b", "llama-3.2-3b", "qwen3-4b", "llama-3.1-8b")
_MESH = Path(__file__).with_name("mesh.py")
_WORKLOADS = ("single-stream", "decode-256")


def report(shape: str, runs: int, timeout_s: float) -> dict[str, object]:
    """The report of mesh.py on a shape. Raises subprocess.SubprocessError."""
    command = [sys.executable, str(_MESH), "--shape", shape, "--workloads", *_WORKLOADS, "--runs", str(runs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=70.0, help="of a shape")
    parser.add_argument("--output", type=Path, default=None, help="written after every shape, also to be read so far")
    args = parser.parse_args()
    shapes: dict[str, dict[str, object]] = {}
    text = ""
    for shape in args.shapes:
        try:
            found = report(shape, args.runs, args.timeout_s)
        except subprocess.SubprocessError as error:
            print(f"{shape} is left out: {error}", file=sys.stderr, flush=True)
            continue
        about = {key: found[key] for key in ("machine", "versions")}
        shapes[shape] = {key: found[key] for key in ("start_s", "start_log", "late_compiles", "workloads")}
        command = " ".join(["python", "bench/gpu/shapes_table.py", *sys.argv[1:]])
        text = json.dumps({"command": command, **about, "runs": args.runs, "shapes": shapes}, indent=1)
        if args.output is not None:
            args.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
