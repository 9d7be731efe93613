"""A load's picture as one SVG file, made without any library: distributions and the course over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from radixmesh.cli.bench.request_record import RequestRecord

# Of a diagram; left of and below its axes; above the first row.
_WIDTH, _HEIGHT, _LEFT, _BELOW, _HEAD = 460, 310, 54, 86, 84
_NUM_BINS, _NUM_POINTS = 120, 240
_COLOURS = ("#1f6fb4", "#d1622b", "#3a8f4d")
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
    """Which share of the values is at most x milliseconds."""
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
    """Diagrams two in a row, as one SVG file."""
    width, height = 2 * _WIDTH, _HEAD + _HEIGHT * math.ceil(len(panels) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:g}" y="28" font-size="16" text-anchor="middle">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        left, top = _WIDTH * (place % 2), _HEAD + _HEIGHT * (place // 2)
        parts += [f'<g transform="translate({left} {top})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> list[str]:
    right, bottom = _WIDTH - 20, _HEIGHT - _BELOW
    curves = [_kept(curve, panel.has_log_x) for curve in panel.curves]
    x_low, x_high = _bounds([curve.x for curve in curves], starts_at_zero=not panel.has_log_x)
    y_low, y_high = _bounds([curve.y for curve in curves], starts_at_zero=True)
    parts = [
        f'<text x="{_WIDTH / 2:g}" y="-24" text-anchor="middle" font-weight="bold">{escape(panel.title)}</text>',
        f'<path d="M{_LEFT} 0V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{(_LEFT + right) / 2:g}" y="{bottom + 34}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text transform="translate(14 {bottom / 2:g}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>",
    ]
    for tick in range(5):
        x = _LEFT + (right - _LEFT) * tick / 4
        y = bottom * (1 - tick / 4)
        value = x_low + (x_high - x_low) * tick / 4
        shown = 10**value if panel.has_log_x else value
        parts += [
            f'<path d="M{x:g} {bottom}v4M{_LEFT} {y:g}h-4M{_LEFT} {y:g}H{right}" stroke="#ccc"/>',
            f'<text x="{x:g}" y="{bottom + 17}" text-anchor="middle">{_number(shown)}</text>',
            f'<text x="{_LEFT - 7}" y="{y + 4:g}" text-anchor="end">'
            f"{_number(y_low + (y_high - y_low) * tick / 4)}</text>",
        ]
    for number, curve in enumerate(curves):
        xs = _LEFT + (right - _LEFT) * (curve.x - x_low) / (x_high - x_low)
        ys = bottom * (1 - (curve.y - y_low) / (y_high - y_low))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs.tolist(), ys.tolist(), strict=True))
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
            f'<text x="{_LEFT + 130 * number}" y="-7" fill="{colour}">{escape(curve.name)}</text>',
        ]
    return parts


def _kept(curve: Curve, has_log_x: bool) -> Curve:
    if not has_log_x:
        return curve
    positive = curve.x > 0
    return Curve(name=curve.name, x=np.log10(curve.x[positive]), y=curve.y[positive])


def _bounds(values: Sequence[_FLOATS], *, starts_at_zero: bool) -> tuple[float, float]:
    together = np.concatenate(values)
    low = 0.0 if starts_at_zero or not len(together) else float(together.min())
    high = float(together.max()) if len(together) else 1.0
    return low, high if high > low else low + 1.0


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
