"""A live mesh, a Prometheus that scrapes it, a load, and then every panel of the shipped dashboard. CPU only.

    python bench/observe.py [--seconds 180] [--picture docs/dashboard.png] [--json FILE] [--scale tokenizer=2 ...]

Starts compose/simulated.yml as local processes and the `prometheus` of PATH with compose/observe/prometheus.yml, sends
load (chats, a burst, texts, mistakes, a kill, a refused plan), asks every query of the dashboard as Grafana would,
and draws the panels with Grafana's components (@grafana/ui) in a headless Chromium. No Grafana server takes part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from observability.dashboard import Dashboard, substitute
from observability.load import Load
from observability.page import PageError, draw
from observability.prometheus_api import PrometheusError, Series
from observability.prometheus_server import PrometheusServer

from radixmesh.daemons.cluster.endpoint import Endpoint
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.ports import PortClaims

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "compose" / "observe" / "grafana" / "dashboards" / "radixmesh.json"
CONFIG = ROOT / "compose" / "observe" / "prometheus.yml"
METRICS_PORT = 9100
_POINTS = 300
_WORKER = {"RADIXMESH_SIMULATED_BASE_US": "8000", "RADIXMESH_MAX_TOTAL_LEN": "8192"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Prometheus's answer to one query. series: labels, times, values; None where there is no number."""

    panel_id: int
    panel: str
    expr: str
    legend: str
    series: list[dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All queries over one stretch of time (unix seconds)."""

    start: float
    end: float
    step_s: float
    queries: list[Answer]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        answers = asyncio.run(_observe(args))
        if args.json is not None:
            args.json.write_text(json.dumps(asdict(answers), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        empty = [f"{answer.panel}: {answer.expr}" for answer in answers.queries if not answer.series]
        print(f"{len(answers.queries)} queries, {len(empty)} without an answer")
        print("\n".join(empty))
        if args.picture is not None:
            draw(Dashboard.read(DASHBOARD).tree, asdict(answers), args.picture)
            print(f"drew {args.picture}")
    except (PrometheusError, PageError) as error:
        print(f"observe.py: {error}", file=sys.stderr)
        return 1
    return 0


async def _observe(args: argparse.Namespace) -> Answers:
    """Runs everything; the answers of all queries over the time of the load."""
    # One plan is refused on the way, so that losses have something to show.
    fault = f"refuse@{math.ceil(60 * args.seconds * 0.55)}"
    cluster = LocalCluster(
        ROOT / "compose" / "simulated.yml",
        scale=dict(args.scale),
        environment={"worker": {**_WORKER, "RADIXMESH_FAULTS": fault}},
        publish=False,
    )
    async with cluster:
        await cluster.wait_healthy(90)
        addresses: dict[str, list[str]] = {}
        for status in cluster.processes:
            address = cluster.address(status.service, status.replica, METRICS_PORT)
            addresses.setdefault(status.service, []).append(address)
        routers = [cluster.address("router", number + 1) for number in range(len(addresses["router"]))]
        (port,) = PortClaims().assign({Endpoint("prometheus", 1, 9090): None}).values()
        with PrometheusServer(CONFIG, addresses, port=port, scrape_s=args.scrape_s) as server:
            await _all_scraped(server, sum(map(len, addresses.values())))
            start = time.time()
            load = Load(routers, seconds=args.seconds)
            await load.run(cluster)
            return await asyncio.to_thread(_ask, server, start, time.time())


async def _all_scraped(server: PrometheusServer, num_targets: int) -> None:
    deadline = time.monotonic() + 30
    while sum((await asyncio.to_thread(server.api.targets_up)).values()) < num_targets:
        if time.monotonic() > deadline:
            raise PrometheusError(f"not all of {num_targets} daemons are scraped: {server.api.targets_up()}")
        await asyncio.sleep(0.2)


def _ask(server: PrometheusServer, start: float, end: float) -> Answers:
    dashboard = Dashboard.read(DASHBOARD)
    step_s = max(server.scrape_s, math.ceil((end - start) / _POINTS))
    # As Grafana computes it: four scrapes, or a step and a scrape where that is more.
    rate_interval_s = math.ceil(max(4 * server.scrape_s, step_s + server.scrape_s))
    values = dashboard.variables(server.api, rate_interval_s=rate_interval_s)
    answers = []
    for query in dashboard.queries:
        expr = substitute(query.expr, values)
        lines = server.api.query_range(expr, start=start, end=end, step_s=step_s)
        answers.append(
            Answer(
                panel_id=query.panel_id,
                panel=query.panel,
                expr=expr,
                legend=query.legend,
                series=[_as_json(line) for line in lines],
            )
        )
    return Answers(start=start, end=end, step_s=step_s, queries=answers)


def _as_json(series: Series) -> dict[str, object]:
    # A quotient of two counters that both stood still is NaN: no point, as in Grafana.
    return {
        "labels": series.labels,
        "times": series.times,
        "values": [value if math.isfinite(value) else None for value in series.values],
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="of load (180)")
    parser.add_argument("--scrape-s", type=float, help="instead of the configuration's interval")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw all panels there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what Prometheus answered there")
    parser.add_argument(
        "--scale", action="append", type=_scale, default=[], metavar="SERVICE=N", help="replicas; repeatable"
    )
    return parser.parse_args(argv)


def _scale(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write for instance tokenizer=2")
    return name, int(count)


if __name__ == "__main__":
    sys.exit(main())
