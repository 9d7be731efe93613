"""Queries to a running Prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass


class PrometheusError(Exception):
    """Prometheus refused a query or could not be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of an answer: times (unix seconds) and values of one length; values may be NaN or infinite."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


class PrometheusApi:
    """The HTTP API below `url` (http://host:port)."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query_range(self, expr: str, *, start: float, end: float, step_s: float) -> list[Series]:
        """Raises PrometheusError with Prometheus' own words, and the query."""
        data = self._get("query_range", {"query": expr, "start": start, "end": end, "step": step_s}, expr)
        return [
            Series(
                labels={name: value for name, value in line["metric"].items() if name != "__name__"},
                times=[float(at) for at, _ in line["values"]],
                values=[float(value) for _, value in line["values"]],
            )
            for line in data["result"]
        ]

    def label_values(self, selector: str, label: str) -> list[str]:
        data = self._get(f"label/{label}/values", {"match[]": selector}, selector)
        return sorted(str(value) for value in data)

    def targets_up(self) -> dict[str, int]:
        """Job -> targets whose last scrape succeeded."""
        up: dict[str, int] = {}
        for target in self._get("targets", {"state": "active"}, "targets")["activeTargets"]:
            job = target["labels"]["job"]
            up[job] = up.get(job, 0) + (target["health"] == "up")
        return up

    def _get(self, path: str, arguments: dict[str, object], what: str):  # type: ignore[no-untyped-def]  # JSON
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{json.load(error).get('error')}: {what}") from error
        except OSError as error:
            raise PrometheusError(f"{error}: {what}") from error
