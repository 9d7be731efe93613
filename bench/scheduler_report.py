"""Writes the tables of docs/scheduler-bench.md and its plot from bench/results/scheduler-*.json.

    python bench/scheduler_report.py

Tables stand between markers; what no result file exists for stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from radixmesh.cli.bench.report.plots import Curve, Panel, plot_panels

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "scheduler-bench.md"
Run = dict[str, Any]  # JSON.


def main() -> None:
    page = PAGE.read_text()
    for name, table in TABLES.items():
        file = RESULTS / f"scheduler-{name}.json"
        if file.exists():
            report = json.loads(file.read_text())
            text = table(report)
            page, count = re.subn(
                rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=text: m[1] + t + m[2], page, flags=re.DOTALL
            )
            assert count == 1, f"the page has no place for {name}"
            if name in PLOTS:
                file_name, plot = PLOTS[name]
                (ROOT / "docs" / file_name).write_text(plot(report["runs"]))
    PAGE.write_text(page)


def _step_cost(report: Run) -> str:
    rows = []
    for run in report["runs"]:
        full, config = run["full_steps"], run["config"]
        parts = full["parts_us"]
        rows.append(
            [
                config["running"],
                f"{config['tree_tokens']:,}",
                config["cache"] + (", evicting" if run["evicted_tokens"] else ""),
                f"{full['ms']['p50']:.2f}",
                f"{full['ms']['p99']:.2f}",
                *(
                    f"{parts[part]['p50']:.0f}"
                    for part in ("plan", "encode", "write", "read", "process", "token_batch")
                ),
                full["num_steps"],
                f"{run.get('calibration_us', run.get('yardstick_us')):.0f}",  # Older results have the old name.
            ]
        )
    head = (
        "running, tree, cache, p50 ms, p99 ms, plan us, encode, write, read, process, TokenBatch, steps, calibration us"
    )
    return _table(head, rows)


def _hit_rates(report: Run) -> str:
    rows = [
        [
            run["workload"],
            run["policy"],
            f"{run['hit_rate']:.4f}",
            f"{run['oracle_hit_rate']:.4f}",
            f"{100 * run['hit_rate'] / run['oracle_hit_rate']:.2f}%" if run["oracle_hit_rate"] > 1e-3 else "-",
            f"{run['out_tok_s']:,.0f}",
            f"{run['ttft_ms']['p50']:.0f}",
            f"{run['ttft_ms']['p99']:.0f}",
        ]
        for run in report["runs"]
    ]
    return _table("workload, order, hit rate, oracle, of the oracle, tok/s, TTFT p50 ms, p99 ms", rows)


def _orders(report: Run) -> str:
    rows = []
    base: Run = {}
    for run in report["runs"]:
        if run["policy"] == "fcfs":
            base = run
        rows.append(
            [
                run["workload"],
                f"x{run['config']['speed']:g}",
                f"{run['cache_tokens']:,} of {run['working_set_tokens']:,}",
                run["policy"] + _ageing(run["config"]["planner"]),
                f"{run['hit_rate']:.3f}",
                f"{run['saturated']['out_tok_s']:,.0f}",
                f"{run['saturated']['out_tok_s'] / max(1.0, base['saturated']['out_tok_s']):.3f}",
                f"{run['out_tok_s']:,.0f}",
                f"{run['ttft_ms']['mean']:,.0f}",
                f"{run['ttft_ms']['p50']:,.0f}",
                f"{run['ttft_ms']['p99']:,.0f}",
                f"{run['ttft_ms']['p99'] / base['ttft_ms']['p99']:.2f}",
                run["retractions"],
            ]
        )
    head = (
        "workload, speed, cache, order, hit rate, tok/s while some wait, to FCFS, tok/s overall, TTFT mean ms, p50,"
        " p99, p99 to FCFS, retractions"
    )
    return _table(head, rows)


def _ageing(planner: dict[str, str]) -> str:
    factor = planner.get("max_overtake_factor", planner.get("overtaking"))  # Older results have the old name.
    if factor is None:
        return ""
    return f" passing {factor} queue lengths" if float(factor) < 1e6 else " without ageing"


def _gains(report: Run) -> str:
    """One row a cell: FCFS, LPM without ageing, LPM."""
    runs = report["runs"]
    rows = []
    for fcfs, greedy, aged in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        config = fcfs["config"]
        base, most, kept = (run["saturated"]["out_tok_s"] for run in (fcfs, greedy, aged))
        ttft = [run["ttft_ms"] for run in (fcfs, greedy, aged)]
        rows.append(
            [
                f"x{config['speed']:g}",
                f"{fcfs['cache_tokens']:,}",
                config["seed"],
                " / ".join(f"{run['hit_rate']:.3f}" for run in (fcfs, greedy, aged)),
                f"{base:,.0f}",
                f"{100 * (most / base - 1):+.1f}%",
                f"{100 * (kept / base - 1):+.1f}%",
                " / ".join(f"{run['out_tok_s']:,.0f}" for run in (fcfs, greedy, aged)),
                " / ".join(f"{times['mean']:,.0f}" for times in ttft),
                f"{ttft[0]['p99']:,.0f}",
                f"{ttft[1]['p99'] / ttft[0]['p99']:.2f}",
                f"{ttft[2]['p99'] / ttft[0]['p99']:.2f}",
            ]
        )
    rows.append(_all_cells(runs))
    head = (
        "speed, cache, seed, hit rate, busy tok/s fcfs, without ageing, lpm, tok/s overall, TTFT mean ms, p99 ms fcfs,"
        " without ageing to fcfs, lpm to fcfs"
    )
    return _table(head, rows)


def _all_cells(runs: list[Run]) -> list[object]:
    """Throughput over the time of all cells, and the worst of their p99 ratios."""

    def rate(first: int) -> float:
        waiting = [run["saturated"] for run in runs[first::3]]
        return float(sum(s["out_tok_s"] * s["seconds"] for s in waiting) / sum(s["seconds"] for s in waiting))

    def worst(first: int) -> float:
        return float(
            max(run["ttft_ms"]["p99"] / f["ttft_ms"]["p99"] for run, f in zip(runs[first::3], runs[::3], strict=True))
        )

    gains = [f"{100 * (rate(first) / rate(0) - 1):+.1f}%" for first in (1, 2)]
    ratios = [f"at most {worst(first):.2f}" for first in (1, 2)]
    return ["all", "", "", "", f"{rate(0):,.0f}", *gains, "", "", "", *ratios]


def _over_grpc(report: Run) -> str:
    names = [row["depth"] for row in report["rounds"][0]]
    rows = []
    for index, name in enumerate(names):
        cells = [rounds[index] for rounds in report["rounds"]]
        best = min(cells, key=lambda row: row["load_average"])
        rows.append(
            [
                name,
                " / ".join(f"{100 * row['idle']:.2f}%" for row in cells),
                f"{100 * best['idle_by_formula']:.2f}%",
                f"{np.median([row['period_ms'] for row in cells]):.3f}",
                f"{np.median([row['scheduler_cpu_ms_per_step'] for row in cells]):.2f}",
                " / ".join(f"{row['load_average']:.1f}" for row in cells),
            ]
        )
    kills = [
        [
            f"{kill['adopted_tokens']:,}",
            f"{kill['first_token_s']:.2f}",
            f"{kill['successor_cpu_s']:.2f} + {kill['worker_cpu_s']:.2f}",
            f"{kill['hit_rate_before']:.4f}",
            f"{kill['hit_rate_after']:.4f}",
            kill["load_average"],
        ]
        for kill in report["kills"]
    ]
    depth_table = _table("depth, idle by round, formula, period ms, scheduler CPU ms a step, load by round", rows)
    head = "adopted tokens, first token after s, CPU s (scheduler + worker), hit rate before, after, load"
    return depth_table + "\n" + _table(head, kills)


def _ranks(report: Run) -> str:
    parts = ("plan_ms", "encode_ms", "join_ms", "process_ms", "step_ms", "step_p99_ms")
    rows = [[run["ranks"], run["rows"], *(f"{run[part]:.2f}" for part in parts)] for run in report["runs"]]
    return _table("ranks, rows of each, plan ms, encode, join, process, step, step p99", rows)


def _pairs(report: Run) -> str:
    rows = []
    for run in report["runs"]:
        load = f"{min(run['load_average']):.0f} to {max(run['load_average']):.0f}"
        name = run["arguments"].removeprefix("--workload multi-turn --closed ").removeprefix("scheduler_ranks.py ")
        spread = f"{min(run['ratios']):.2f} to {max(run['ratios']):.2f}"
        times = (f"{run[f'{tree}_ms']:.2f}" for tree in ("before", "after"))
        rows.append([f"`{name}`", *times, f"{run['ratio']:.2f}", spread, len(run["ratios"]), load])
    commits = report["commits"]
    before, after = (f"{tree} ({commits[tree]})" for tree in ("before", "after"))
    return _table(f"run, {before} ms, {after} ms, ratio, of the pairs, pairs, load", rows)


TABLES: dict[str, Callable[[Run], str]] = {
    "step-cost": _step_cost,
    "hit-rates": _hit_rates,
    "orders": _orders,
    "ageing": _gains,
    "over-grpc": _over_grpc,
    "ranks": _ranks,
    "ranks-pairs": _pairs,
    "step-cost-pairs": _pairs,
}


def _plot(runs: list[Run]) -> str:
    def panel(running: int) -> Panel:
        chosen = [r for r in runs if r["config"]["running"] == running and not r["evicted_tokens"]]
        curves = []
        for cache in ("radix", "trie"):
            mine = [r for r in chosen if r["config"]["cache"] == cache]
            for name in ("p50", "p99") if mine else ():
                x = np.array([r["config"]["tree_tokens"] for r in mine], np.float64)
                y = np.array([r["full_steps"]["ms"][name] for r in mine])
                curves.append(Curve(name=f"{cache} {name}", x=x, y=y))
        return Panel(
            title=f"{running} running", x_label="tokens in the tree", y_label="ms", curves=tuple(curves), has_log_x=True
        )

    return plot_panels((panel(256), panel(1024)), "CPU time of a scheduler's step")


def _plot_ranks(runs: list[Run]) -> str:
    num_ranks = np.array([run["ranks"] for run in runs], np.float64)
    parts = ("plan", "encode", "process", "step", "step_p99")
    curves = [
        Curve(name=part.replace("_", " "), x=num_ranks, y=np.array([run[f"{part}_ms"] for run in runs]))
        for part in parts
    ]
    goal = Curve(name="goal of a step", x=num_ranks, y=np.full(len(num_ranks), 10.0))
    panel = Panel(
        title="128 rows a rank", x_label="data-parallel ranks", y_label="ms", curves=(*curves, goal), has_log_x=True
    )
    each = Curve(name="step", x=num_ranks, y=np.array([1e3 * run["step_ms"] / run["ranks"] for run in runs]))
    of_rank = Panel(title="a rank's part", x_label="data-parallel ranks", y_label="us", curves=(each,), has_log_x=True)
    return plot_panels((panel, of_rank), "CPU time of a scheduler's step with many ranks")


PLOTS: dict[str, tuple[str, Callable[[list[Run]], str]]] = {
    "step-cost": ("scheduler-step-cost.svg", _plot),
    "ranks": ("scheduler-ranks.svg", _plot_ranks),
}


def _table(head: str, rows: list[list[object]]) -> str:
    names = head.split(", ")
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in (names, ["---"] * len(names), *rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
