"""Diagrams of a load as one SVG file: distributions, and the course over time. Needs matplotlib (the bench extra)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.targets.target import TargetError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogFormatter
except ImportError as error:
    raise TargetError("diagrams need matplotlib: pip install 'radixmesh[bench]'") from error

# Of one diagram, in inches.
_WIDTH, _HEIGHT = 6.4, 4.3
_NUM_BINS, _NUM_POINTS = 120, 240
_FLOATS = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """x, y: points of equal number."""

    name: str
    x: _FLOATS
    y: _FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram. has_log_x: the x axis is logarithmic; points at or below 0 are then left out."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    has_log_x: bool = False


def plot_load(records: Sequence[RequestRecord], title: str) -> str:
    """Four diagrams: times to the first output and to the end, gaps between outputs, and the course of the load."""
    sent = [record for record in records if record.ended]
    done = [record for record in sent if record.is_done]
    ttft = np.array([record.ttft_s for record in done if record.ttft_s is not None])
    tpot = np.array([record.tpot_s for record in done if record.tpot_s is not None])
    gaps = np.array([gap for record in done for gap in record.gaps_s()])
    started = min((record.sent for record in sent), default=0.0)
    panels = (
        Panel(title="time to first output", x_label="ms", y_label="share", curves=(_shares("TTFT", ttft),)),
        Panel(
            title="between outputs (ITL), per token (TPOT)",
            x_label="ms, logarithmic",
            y_label="share",
            curves=(_shares("ITL", gaps), _shares("TPOT", tpot)),
            has_log_x=True,
        ),
        Panel(
            title="sending to end",
            x_label="ms",
            y_label="share",
            curves=(_shares("E2E", np.array([record.e2e_s for record in done])),),
        ),
        Panel(
            title="course",
            x_label="s",
            y_label="requests running; tokens/s / 100",
            curves=(_running(sent, started), _tokens_per_s(sent, started)),
        ),
    )
    return plot_panels(panels, title)


def _shares(name: str, seconds: _FLOATS) -> Curve:
    """Share of the values that are at most x milliseconds."""
    if not len(seconds):
        return Curve(name=name, x=np.zeros(0), y=np.zeros(0))
    y = np.linspace(0, 1, min(_NUM_POINTS, len(seconds) + 1))
    return Curve(name=name, x=np.quantile(1000 * seconds, y), y=y)


def _running(sent: Sequence[RequestRecord], started: float) -> Curve:
    begins = np.sort([record.sent - started for record in sent])
    ends = np.sort([record.ended - started for record in sent])
    x = np.linspace(0, ends[-1] if len(ends) else 0.0, _NUM_BINS)
    y = np.searchsorted(begins, x, side="right") - np.searchsorted(ends, x, side="right")
    return Curve(name="running", x=x, y=y.astype(np.float64))


def _tokens_per_s(sent: Sequence[RequestRecord], started: float) -> Curve:
    """Output tokens of a request spread evenly over its deliveries; in hundreds a second."""
    moments = [np.array(record.deliveries) - started for record in sent if record.deliveries]
    weights = [np.full(len(r.deliveries), r.output_tokens / len(r.deliveries)) for r in sent if r.deliveries]
    if not moments:
        return Curve(name="tokens/s / 100", x=np.zeros(0), y=np.zeros(0))
    end = max(float(m[-1]) for m in moments) or 1.0
    counts, edges = np.histogram(np.concatenate(moments), _NUM_BINS, (0, end), weights=np.concatenate(weights))
    return Curve(name="tokens/s / 100", x=(edges[:-1] + edges[1:]) / 2, y=counts * _NUM_BINS / end / 100)


def plot_panels(panels: Sequence[Panel], title: str) -> str:
    """Diagrams two in a row, as the text of one SVG file."""
    num_rows = math.ceil(len(panels) / 2)
    # Texts stay texts, and dollar signs are no mathematics. A fixed salt and no date: equal data gives an equal file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "radixmesh", "text.parse_math": False}):
        figure = Figure(figsize=(2 * _WIDTH, _HEIGHT * num_rows + 0.5), layout="constrained")
        figure.suptitle(title)
        for axes, panel in zip(figure.subplots(num_rows, 2, squeeze=False).flat, panels, strict=True):
            _draw(axes, panel)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw(axes: Axes, panel: Panel) -> None:
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    for curve in panel.curves:
        is_shown = curve.x > 0 if panel.has_log_x else np.ones(len(curve.x), np.bool_)
        axes.plot(curve.x[is_shown], curve.y[is_shown], label=curve.name)
    if panel.has_log_x:
        axes.set_xscale("log")
        # The default labels of a logarithmic axis are mathematics.
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="0.9")
    axes.legend()
