"""`radixmesh bench scheduler`: replays a workload against the planner and prints what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from radixmesh.cli.bench.replay.replay import Replay
from radixmesh.cli.bench.replay.replay_config import ReplayConfig
from radixmesh.cli.bench.workloads import WORKLOADS

_EXIT_USAGE = 2
_SHOWN = (
    "hit_rate",
    "oracle_hit_rate",
    "out_tok_s",
    "ttft_ms",
    "itl_ms",
    "step_ms",
    "retractions",
    "evicted_tokens",
    "working_set_tokens",
    "cache_tokens",
)


def run(arguments: list[str]) -> int:
    """Prints a summary, or with --json one object; 2 for settings that do not fit."""
    options = _parser().parse_args(arguments)
    try:
        report = Replay(_config_of(options)).run()
    except ValueError as error:
        print(f"radixmesh bench scheduler: {error}", file=sys.stderr)
        return _EXIT_USAGE
    print(json.dumps(report) if options.json else _summary(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmesh bench scheduler",
        description="Replay a workload against the planner with the simulated worker, in virtual time. Step costs are "
        "CPU time of one core, all else is a function of the arguments.",
    )
    add = parser.add_argument
    add("--workload", required=True, choices=WORKLOADS, help="what is asked")
    add("--running", type=int, default=256, help="most requests that run at a time (default 256)")
    add("--tree-tokens", type=int, default=0, help="tokens in the cache before the workload starts (default 0)")
    add("--policy", default="fcfs", help="order of the queue (default fcfs)")
    add("--cache", default="radix", help="prefix cache: radix, trie, none (default radix)")
    add("--cache-tokens", type=int, help="KV memory in tokens (default: room for everything)")
    add("--seed", type=int, help="of the workload (default: the workload's own)")
    add("--requests", type=int, help="number of turns, about (default: the workload's own)")
    depth_help = "plans ahead: auto (by time), 0, 1, 2, ... (default auto); --depth is its former name"
    add("--pipeline-depth", "--depth", dest="depth", default="auto", help=depth_help)
    add("--gap-us", type=float, default=2000.0, help="from a result to the plan it allows (default 2000)")
    add("--speed", type=float, default=1.0, help="arrivals and pauses so many times shorter (default 1)")
    add("--closed", action="store_true", help="send the next turn when one finishes, keeping --running under way")
    add("--page-size", type=int, default=1, help="tokens a page (default 1)")
    add("--chunk-tokens", type=int, default=512, help="most prefill tokens of a request a step (default 512)")
    add("--step-tokens", type=int, default=2048, help="most tokens a step (default 2048)")
    add("--planner", action="append", default=[], metavar="NAME=VALUE", help="any other setting of the planner")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _config_of(options: argparse.Namespace) -> ReplayConfig:
    if options.depth != "auto" and not options.depth.isdigit():
        raise ValueError(f"--pipeline-depth must be auto or a number >= 0, not {options.depth}")
    if any("=" not in setting for setting in options.planner):
        raise ValueError("--planner is written NAME=VALUE")
    return ReplayConfig(
        workload=options.workload,
        seed=options.seed,
        num_requests=options.requests,
        running=options.running,
        tree_tokens=options.tree_tokens,
        policy=options.policy,
        cache=options.cache,
        cache_tokens=options.cache_tokens,
        page_size=options.page_size,
        depth=None if options.depth == "auto" else int(options.depth),
        gap_us=options.gap_us,
        speed=options.speed,
        is_closed=options.closed,
        chunk_tokens=options.chunk_tokens,
        step_tokens=options.step_tokens,
        planner=tuple((name, value) for name, _, value in (s.partition("=") for s in options.planner)),
    )


def _summary(report: Mapping[str, object]) -> str:
    """The figures that most look for, a line each."""
    lines = [
        f"{report['workload']} by {report['policy']}: {report['num_requests']} requests, {report['num_steps']} steps"
    ]
    lines += [f"  {name:<18} {_figures(report[name])}" for name in _SHOWN]
    return "\n".join(lines)


def _figures(value: object) -> str:
    if isinstance(value, Mapping):
        return "  ".join(f"{name} {number}" for name, number in value.items())
    return str(value)
