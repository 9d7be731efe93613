"""The metrics as a table of the documentation.

    python -m radixmesh.daemons.runtime.telemetry.metrics_table docs/observability.md

rewrites the table between the two marks below; a test fails while page and code differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from radixmesh.daemons.runtime.telemetry.metric_maker import MetricInfo
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

BEGIN = "<!-- metrics: made of daemons/runtime/telemetry/metrics.py -->"
END = "<!-- end of metrics -->"


def metrics_table() -> str:
    """Markdown, one row a metric; deprecated names last."""
    rows = ["| name | kind | labels | served by | meaning |", "|---|---|---|---|---|"]
    for info in sorted(Metrics().infos, key=lambda info: bool(info.replaced_by)):
        labels = ", ".join(f"`{label}`" for label in info.labels)
        daemons = ", ".join(info.daemons)
        rows.append(f"| `{info.name}` | {info.kind} | {labels} | {daemons} | {_meaning(info)} |")
    return "\n".join(rows) + "\n"


def _meaning(info: MetricInfo) -> str:
    if info.replaced_by:
        return f"**Deprecated**, gone in the next release: use `{info.replaced_by}`."
    return info.help_text


def with_table(page: str) -> str:
    """The page with the current table between the marks. Raises ValueError where there are none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} with {END!r} behind it")
    return f"{before}{BEGIN}\n{metrics_table()}{END}{after}"


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    path.write_text(with_table(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
