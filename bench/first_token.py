"""Time to first token of the whole mesh, one request at a time, of this tree and another in turns. CPU only.

    python bench/first_token.py --rounds 6 [--requests 40] [--step-ms 8] [--against PATH-TO-ANOTHER-TREE] [--json FILE]

The worker is simulated and every step takes one time, so what a first token takes beyond that is the mesh's. Rounds of
both trees take turns: what else the machine does meets both. Prints one JSON object, times in ms.
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
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_TOKENS, _WARM_UP = 4, 5


def main() -> int:
    args = _parse()
    if args.tree is not None:
        print(json.dumps(asyncio.run(_measured(args))))
        return 0
    trees = {"ours": _ROOT} | ({} if args.against is None else {"other": args.against.resolve()})
    rounds: dict[str, list[list[float]]] = {name: [] for name in trees}
    before = os.getloadavg()
    for _ in range(args.rounds):
        for name, tree in trees.items():
            rounds[name].append(_of_tree(tree, args))
    report = {
        "command": " ".join(["python", "bench/first_token.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "load_average_before": before, "load_average_after": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {name: _commit(tree) for name, tree in trees.items()},
        "step_ms": args.step_ms,
        "ttft_ms": {name: _figures(times) for name, times in rounds.items()},
    }
    print(text := json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


def _figures(rounds: list[list[float]]) -> dict[str, object]:
    times = sorted(time for times in rounds for time in times)
    shares = {f"p{share}": round(times[len(times) * share // 100], 2) for share in (10, 25, 50, 90)}
    return {"requests": len(times), **shares, "round_medians": [round(statistics.median(r), 2) for r in rounds]}


def _of_tree(tree: Path, args: argparse.Namespace) -> list[float]:
    command = [sys.executable, __file__, "--tree", str(tree), "--requests", str(args.requests)]
    command += ["--step-ms", str(args.step_ms)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree / "bench")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


async def _measured(args: argparse.Namespace) -> list[float]:
    """With the modules of the tree that PYTHONPATH names."""
    from hop_ladder.ladder import LadderSettings, running_ladder
    from hop_ladder.load import one_at_a_time

    with tempfile.TemporaryDirectory(prefix="first-token") as folder:
        settings = LadderSettings(step_ms=args.step_ms, transport="unix")
        async with running_ladder(settings, Path(folder)) as ladder, ladder.rungs() as rungs:
            mesh, prompts = next(rung for rung in rungs if rung.name == "mesh"), ladder.prompts()
            await one_at_a_time(mesh, prompts, _WARM_UP, _TOKENS)
            return (await one_at_a_time(mesh, prompts, args.requests, _TOKENS)).ttft_ms()


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=40, help="per tree and round")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--against", type=Path, default=None, help="the root of another tree")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--tree", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
