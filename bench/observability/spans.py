"""Spans as they are drawn: what OTLP brings, reduced to times, names and parents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something that happened within a span. at_ns: unix time."""

    name: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span. Times are unix nanoseconds of the daemon's own clock; parent_id is empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    events: tuple[SpanEvent, ...] = ()
    is_error: bool = False

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A span and how deep it hangs below the root."""

    span: Span
    depth: int


def as_tree(spans: Sequence[Span]) -> list[Placed]:
    """One trace's spans depth first, siblings by start. Raises ValueError unless it has one root and all parents."""
    known = {span.span_id for span in spans}
    orphans = [span.name for span in spans if span.parent_id and span.parent_id not in known]
    roots = [span for span in spans if not span.parent_id]
    if orphans or len(roots) != 1:
        raise ValueError(f"{len(roots)} roots, and no parent of: {', '.join(orphans) or 'none'}")

    def below(span: Span, depth: int) -> Iterator[Placed]:
        yield Placed(span=span, depth=depth)
        for child in sorted((s for s in spans if s.parent_id == span.span_id), key=lambda s: s.start_ns):
            yield from below(child, depth + 1)

    return list(below(roots[0], 0))
