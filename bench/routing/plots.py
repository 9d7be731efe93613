"""Bars of every policy on every workload, from the JSON of router_policies.py. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Results = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Workload/replicas -> policy -> figures."""

_ROWS = (
    ("tok_s", "tokens/s, of round_robin", False),
    ("hit_rate", "share of prompt tokens cached", False),
    ("ttft_p50_ms", "first token p50, ms", True),
    ("ttft_p99_ms", "first token p99, ms", True),
    ("imbalance", "most outputs to the mean", False),
)


def plot(results: Results, path: Path) -> None:
    """Writes a picture; the ending of path says in which format. Dashes: the best possible hit rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(results)
    policies = list(results[workloads[0]])
    width = 0.85 / len(policies)
    figure, axes = plt.subplots(len(_ROWS), 1, figsize=(max(8.0, 2.2 * len(workloads)), 2.4 * len(_ROWS)), sharex=True)
    for axis, (name, label, is_log) in zip(axes, _ROWS, strict=True):
        for number, policy in enumerate(policies):
            heights = [_height(results[workload], policy, name) for workload in workloads]
            xs = [x + (number - (len(policies) - 1) / 2) * width for x in range(len(workloads))]
            axis.bar(xs, heights, width, label=policy, color=f"C{number}")
        if name == "hit_rate":
            for x, workload in enumerate(workloads):
                best = next(iter(results[workload].values()))["best_hit_rate"]
                axis.hlines(best, x - 0.45, x + 0.45, linestyles="dashed", colors="black", linewidth=1)
        axis.set_ylabel(label, fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        if is_log:
            axis.set_yscale("log")
    axes[-1].set_xticks(range(len(workloads)), [workload.replace("/", "\n") + " replicas" for workload in workloads])
    axes[0].legend(ncols=len(policies), fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _height(figures: Mapping[str, Mapping[str, float]], policy: str, name: str) -> float:
    value = figures.get(policy, {}).get(name, 0.0)
    base = figures.get("round_robin", {}).get(name, 0.0)
    return value / base if name == "tok_s" and base else value
