"""Time to first token of the whole mesh, one request at a time, of this tree and another in turns. CPU only.

    python bench/first_token.py --requests 200 [--step-ms 8] [--against PATH-TO-ANOTHER-TREE] [--json FILE]
    python bench/first_token.py --rung local_text --against . --other-rung mesh     # with text in the router, without

The worker is simulated and every step takes one time, so what a first token takes beyond that is the mesh's. Both
meshes run all the time, and requests go to one and to the other in turns: what else the machine does meets both. Prints
one JSON object, times in ms; `less` is by how much ours is below the other, pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

_ROOT = Path(__file__).resolve().parents[1]
_TOKENS, _WARM_UP = 4, 20


def main() -> int:
    args = _parse()
    if args.tree is not None:
        asyncio.run(_serve(args))
        return 0
    # The clients of both meshes read sockets as daemons do: what they take themselves is no cost of a mesh.
    poll_without_engine()
    trees = {"ours": _ROOT} | ({} if args.against is None else {"other": args.against.resolve()})
    before = os.getloadavg()
    with ExitStack() as meshes:
        rungs = {"ours": args.rung, "other": args.other_rung or args.rung}
        asked = {name: _Mesh(meshes.enter_context(_started(tree, rungs[name], args))) for name, tree in trees.items()}
        pairs = []
        for number in range(args.requests):
            # The one that comes second may find caches warm.
            order = list(asked) if number % 2 else list(asked)[::-1]
            pairs.append({name: asked[name].ttft_ms() for name in order})
    report: dict[str, object] = {
        "command": " ".join(["python", "bench/first_token.py", *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "load_average_before": before, "load_average_after": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {name: _commit(tree) for name, tree in trees.items()},
        "step_ms": args.step_ms,
        "ttft_ms": {name: _figures([pair[name] for pair in pairs]) for name in trees},
    }
    if args.against is not None:
        report["less"] = _figures([pair["other"] - pair["ours"] for pair in pairs])
    print(text := json.dumps(report, indent=1))
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


def _figures(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {f"p{share}": round(times[len(times) * share // 100], 2) for share in (10, 25, 50, 75, 90)}


class _Mesh:
    """A mesh in a process of its own, which runs a request when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def ttft_ms(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a mesh has ended: its log is above")
        return line


def _started(tree: Path, rung: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    # -P: this file's own folder is no place to import the other tree's modules from.
    command = [sys.executable, "-P", __file__, "--tree", str(tree), "--rung", rung, "--step-ms", str(args.step_ms)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree / "bench")))}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def _serve(args: argparse.Namespace) -> None:
    """A request for each line that comes, with the modules of the tree that PYTHONPATH names; ends with the input."""
    import hop_ladder
    from hop_ladder.ladder import LadderSettings, running_ladder
    from hop_ladder.load import one_at_a_time

    assert Path(str(hop_ladder.__file__)).is_relative_to(args.tree), hop_ladder.__file__
    with tempfile.TemporaryDirectory(prefix="first-token") as folder:
        settings = LadderSettings(step_ms=args.step_ms, transport="unix")
        async with running_ladder(settings, Path(folder)) as ladder, ladder.rungs() as rungs:
            mesh, prompts = next(rung for rung in rungs if rung.name == args.rung), ladder.prompts()
            await one_at_a_time(mesh, prompts, _WARM_UP, _TOKENS)
            print("ready", flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print((await one_at_a_time(mesh, prompts, 1, _TOKENS)).ttft_ms()[0], flush=True)


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="per tree")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--rung", default="mesh", help="of bench/hops.py")
    parser.add_argument("--other-rung", default=None, help="of the other tree; by default the same")
    parser.add_argument("--against", type=Path, default=None, help="the root of another tree")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--tree", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
