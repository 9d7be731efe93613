"""One trace as an SVG: a row a span, indented below its parent, a bar from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from observability.spans import Placed

_WIDTH, _NAMES, _RIGHT, _ROW, _TOP, _BOTTOM = 1180, 350, 150, 24, 66, 44
_COLOURS = {
    "router": "#3b6fd4",
    "tokenizer": "#b07d12",
    "detokenizer": "#8a4fbf",
    "scheduler": "#2b8a4b",
    "worker": "#c8452f",
}
_OTHER = "#5c6370"
_MIN_BAR_PX = 2.0
_FONT = "font-family='DejaVu Sans, Helvetica, Arial, sans-serif'"


def waterfall(rows: Sequence[Placed], title: str) -> str:
    """The picture. rows: as_tree() of one trace."""
    start_ns = min(row.span.start_ns for row in rows)
    total_ms = max((row.span.end_ns - start_ns) / 1e6 for row in rows) or 1e-3
    height = _TOP + len(rows) * _ROW + _BOTTOM
    scale = (_WIDTH - _NAMES - _RIGHT) / total_ms
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height}' {_FONT} font-size='12'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{_WIDTH}' height='{height}' fill='#ffffff'/>",
        f"<text x='14' y='25' font-size='14' font-weight='600' fill='#1f2430'>{escape(title)}</text>",
        *_axis(total_ms, scale, height),
    ]
    for number, row in enumerate(rows):
        parts += _row(row, _TOP + number * _ROW, start_ns, scale, is_striped=number % 2 == 1)
    parts += _legend(rows, height)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _axis(total_ms: float, scale: float, height: int) -> list[str]:
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if total_ms / s <= 8), 5000)
    parts, at = [], 0.0
    while at <= total_ms:
        x = _NAMES + at * scale
        parts.append(f"<line x1='{x:.1f}' y1='{_TOP - 8}' x2='{x:.1f}' y2='{height - _BOTTOM}' stroke='#e3e5ea'/>")
        parts.append(f"<text x='{x:.1f}' y='{_TOP - 14}' text-anchor='middle' fill='#6b7280'>{at:g} ms</text>")
        at = round(at + step, 6)
    return parts


def _row(row: Placed, y: int, start_ns: int, scale: float, *, is_striped: bool) -> list[str]:
    span = row.span
    x = _NAMES + (span.start_ns - start_ns) / 1e6 * scale
    width = max(span.duration_ms * scale, _MIN_BAR_PX)
    colour = colour_of(span.service)
    middle = y + _ROW / 2
    parts = [f"<rect x='0' y='{y}' width='{_WIDTH}' height='{_ROW}' fill='#f6f7f9'/>"] if is_striped else []
    indent = 14 + row.depth * 14
    parts.append(f"<rect x='{indent}' y='{y + 6}' width='4' height='{_ROW - 12}' fill='{colour}'/>")
    parts.append(f"<text x='{indent + 10}' y='{middle + 4}' fill='#1f2430'>{escape(span.name)}</text>")
    tip = "\n".join([f"{span.service}: {span.name}, {span.duration_ms:.2f} ms", *_facts(span.attributes)])
    parts.append(
        f"<rect x='{x:.1f}' y='{y + 5}' width='{width:.1f}' height='{_ROW - 10}' rx='2' fill='{colour}' "
        f"fill-opacity='0.85'><title>{escape(tip)}</title></rect>"
    )
    for event in span.events:
        at = _NAMES + (event.at_ns - start_ns) / 1e6 * scale
        parts.append(
            f"<line x1='{at:.1f}' y1='{y + 3}' x2='{at:.1f}' y2='{y + _ROW - 3}' stroke='#1f2430' stroke-width='1.5'>"
            f"<title>{escape(event.name)}</title></line>"
        )
    text = f"{span.duration_ms:.2f} ms" + (" failed" if span.is_error else "")
    parts.append(f"<text x='{x + width + 6:.1f}' y='{middle + 4}' fill='#4b5563'>{text}</text>")
    return parts


def _facts(attributes: dict[str, str | int | float | bool]) -> list[str]:
    return [f"{name} = {value}" for name, value in sorted(attributes.items())]


def _legend(rows: Sequence[Placed], height: int) -> list[str]:
    parts, x = [], 14
    for service in sorted({row.span.service for row in rows}):
        parts.append(f"<rect x='{x}' y='{height - 26}' width='12' height='12' fill='{colour_of(service)}'/>")
        parts.append(f"<text x='{x + 18}' y='{height - 16}' fill='#1f2430'>{escape(service)}</text>")
        x += 40 + 8 * len(service)
    for name in sorted({event.name for row in rows for event in row.span.events}):
        parts.append(
            f"<line x1='{x + 5}' y1='{height - 27}' x2='{x + 5}' y2='{height - 13}' "
            "stroke='#1f2430' stroke-width='1.5'/>"
        )
        parts.append(f"<text x='{x + 14}' y='{height - 16}' fill='#1f2430'>{escape(name)}</text>")
        x += 40 + 8 * len(name)
    return parts


def colour_of(service: str) -> str:
    """One colour a daemon, whatever stands before its name (`radixmesh-router`)."""
    return _COLOURS.get(service.rpartition("-")[2], _OTHER)
