"""Cost of every hop of the mesh, and of the whole mesh, over the same objects in one process. CPU only.

    python bench/hops.py [--step-ms 8 2.5] [--rounds 7] [--concurrency 64 16] [--tokens 128] [--json FILE] [--quick]

A ladder of rungs, each with one more boundary: the engine in one process (no gRPC), its worker in a process, scheduler
and worker in processes, a router before them (ids), the whole mesh (text). The simulated worker's steps all take one
time, so no model's maths hides anything. Rungs take turns round by round, and ratios are taken within a round: what
else the machine does meets all of them. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import uvloop
from hop_ladder import round_trips
from hop_ladder.ladder import Ladder, LadderSettings, running_ladder
from hop_ladder.load import Sample, all_at_once, one_at_a_time
from hop_ladder.processes import ROOT
from hop_ladder.report import Figures, high_load, low_load
from hop_ladder.rungs import Rung, check_equal
from hop_ladder.serve_stream import ServeStream

_BASELINE = "one_process"
_PACKAGES = ("grpcio", "protobuf", "numpy", "uvloop", "tokenizers")
_TTFT_TOKENS = 4
_NUM_ROWS = 64
_BLOCKS = 4


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.quick:
        args.step_ms, args.rounds, args.requests, args.round_trips = args.step_ms[:1], 2, 3, 40
        args.concurrency, args.tokens = [8], 24
    results = uvloop.run(_measure(args))
    text = json.dumps(results, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


async def _measure(args: argparse.Namespace) -> Figures:
    results = _conditions(args)
    steps: Figures = {}
    for step_ms in args.step_ms:
        with tempfile.TemporaryDirectory(prefix="hops") as folder:
            settings = LadderSettings(step_ms=step_ms, transport=args.transport, cores_each=args.cores_each)
            async with running_ladder(settings, Path(folder)) as ladder:
                if "round_trips" not in results:
                    results["round_trips"] = await _round_trips(ladder, args.round_trips)
                steps[f"{step_ms:g} ms"] = await _climb(ladder, args)
    results["steps"] = steps
    results["load_average_after"] = os.getloadavg()
    return results


async def _climb(ladder: Ladder, args: argparse.Namespace) -> Figures:
    """All load points on all rungs, rung by rung within each round; the rung that begins changes every round."""
    low: list[dict[str, Sample]] = []
    high: dict[int, list[dict[str, Sample]]] = {num: [] for num in args.concurrency}
    async with ladder.rungs() as rungs:
        prompts = ladder.prompts()
        await check_equal(rungs, next(prompts), args.tokens)
        gc.collect()
        gc.freeze()  # As the daemons do: the engine in this process shall not pay for what only this process holds.
        for rung in rungs:  # Warm-up: channels, estimates of step times and gaps.
            await one_at_a_time(rung, prompts, 2, _TTFT_TOKENS)
            await all_at_once(rung, prompts, max(args.concurrency), 16)
        for round_ in range(args.rounds):
            order = _rotated(rungs, round_)
            low.append({r.name: await one_at_a_time(r, prompts, args.requests, _TTFT_TOKENS) for r in order})
            for num, rounds in high.items():
                rounds.append({r.name: await all_at_once(r, prompts, num, args.tokens) for r in order})
    names = [rung.name for rung in rungs]
    return {
        "adds": {rung.name: rung.adds for rung in rungs},
        "low_load": low_load([{name: samples[name] for name in names} for samples in low], _BASELINE),
        "high_load": {
            f"{num} streams": high_load(
                [{name: samples[name] for name in names} for samples in rounds],
                _BASELINE,
                ideal_tok_s=1000 * num / ladder.settings.step_ms,
            )
            for num, rounds in high.items()
        },
    }


async def _round_trips(ladder: Ladder, num: int) -> Figures:
    """Blocks of each kind take turns."""
    times: dict[str, list[float]] = {}
    address = ladder.processes.address
    prompt = next(ladder.prompts())
    serve = ServeStream(address("scheduler"))
    await serve.open()
    for _ in range(_BLOCKS):
        block = {
            "encode_unary": await round_trips.encode(address("tokenizer"), prompt.text, num),
            "encode_on_stream": await round_trips.encode_on_stream(address("tokenizer"), prompt.text, num),
            "router_tokenize": await round_trips.tokenize(address("router"), prompt.text, num),
            f"detokenize_frame_{_NUM_ROWS}_rows": await round_trips.detokenize(
                address("detokenizer"), prompt.ids, _NUM_ROWS, num
            ),
            "serve_abort_unknown": await round_trips.serve(serve, num),
            "execute_empty_plan_in_process": await round_trips.empty_plan(ladder.thread_link(), num),
            "execute_empty_plan_unix": await round_trips.empty_plan(ladder.execute_link("unix"), num),
            "execute_empty_plan_tcp": await round_trips.empty_plan(ladder.execute_link("tcp"), num),
        }
        for name, values in block.items():
            times.setdefault(name, []).extend(values)
    await serve.close()
    return {name: round_trips.figures(values) for name, values in times.items()}


def _conditions(args: argparse.Namespace) -> Figures:
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu.partition(":")[2].strip() or platform.processor(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), "commit": commit.stdout.strip() or "unknown"}
        | {name: version(name) for name in _PACKAGES},
        "settings": {name: value for name, value in vars(args).items() if name not in ("json", "quick")},
        "load_average_before": os.getloadavg(),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def _rotated(rungs: Sequence[Rung], by: int) -> list[Rung]:
    first = by % len(rungs)
    return [*rungs[first:], *rungs[:first]]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[8.0, 2.5], help="time of a step of the worker")
    parser.add_argument("--rounds", type=int, default=7, help="times that every rung takes its turn")
    parser.add_argument("--requests", type=int, default=20, help="per rung and round at low load")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 16], help="requests at once at high load")
    parser.add_argument("--tokens", type=int, default=128, help="of each request at high load")
    parser.add_argument("--round-trips", type=int, default=250, help="per kind and block")
    parser.add_argument("--transport", choices=["unix", "tcp"], default="unix", help="between all processes")
    parser.add_argument("--cores-each", type=int, default=None, help="cores of every daemon that no other one has")
    parser.add_argument("--json", type=Path, default=None, help="file that gets the JSON object too")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few requests, one step time")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
