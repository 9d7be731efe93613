"""A Grafana dashboard's file: its variables, its panels, and the queries they make."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*)\}?")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)")


class LabelSource(Protocol):
    """Answers `label_values(selector, label)`."""

    def label_values(self, selector: str, label: str) -> list[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query of one panel. expr: PromQL with Grafana's variables in it."""

    panel_id: int
    panel: str
    ref_id: str
    expr: str
    legend: str


class Dashboard:
    """The parsed file. Raises ValueError for what this reader does not know, rather than leaving something out."""

    def __init__(self, tree: Mapping[str, object]) -> None:
        self.tree = tree
        self.panels: list[dict[str, object]] = [panel for panel in _dicts(tree["panels"]) if panel["type"] != "row"]
        self.queries: tuple[Query, ...] = tuple(_queries(self.panels))

    @classmethod
    def read(cls, path: Path) -> Dashboard:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def variables(self, source: LabelSource, *, rate_interval_s: int) -> dict[str, str]:
        """Every variable at "All", in the order of the file: a later one's query may name an earlier one."""
        values = {"__rate_interval": f"{rate_interval_s}s"}
        templating = self.tree["templating"]
        assert isinstance(templating, dict)
        for variable in _dicts(templating["list"]):
            name = str(variable["name"])
            if variable["type"] == "datasource":
                values[name] = "prometheus"
                continue
            query = variable["query"]
            text = str(query["query"]) if isinstance(query, dict) else str(query)
            match = _LABEL_VALUES.fullmatch(substitute(text, values))
            if variable["type"] != "query" or match is None:
                raise ValueError(f"variable {name}: only label_values(selector, label) is known, not {text!r}")
            values[name] = any_of(source.label_values(match["selector"], match["label"]))
        return values


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Puts the variables' values in. Raises ValueError for one that has none."""

    def value_of(match: re.Match[str]) -> str:
        if match["name"] not in values:
            raise ValueError(f"{text!r} names ${match['name']}, which the dashboard does not define")
        return values[match["name"]]

    return _VARIABLE.sub(value_of, text)


def any_of(values: Sequence[str]) -> str:
    """A regular expression for "one of them", escaped for a PromQL string, as Grafana makes it of several choices."""
    return "(" + "|".join(re.escape(value).replace("\\", "\\\\") for value in values) + ")"


def _queries(panels: list[dict[str, object]]) -> Iterator[Query]:
    for panel in panels:
        for target in _dicts(panel["targets"]):
            yield Query(
                panel_id=int(str(panel["id"])),
                panel=str(panel["title"]),
                ref_id=str(target["refId"]),
                expr=str(target["expr"]),
                legend=str(target["legendFormat"]),
            )


def _dicts(value: object) -> list[dict[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"a list of objects is expected, not {value!r}")
    return value
