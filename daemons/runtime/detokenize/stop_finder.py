"""Stop strings in a growing text.

Which match counts does not depend on how the text arrives: the one that is complete first, and of several completed
by the same character the longest. It is what a reader sees who checks after every character and stops at once;
no complete match ever waits for a longer one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class Match(NamedTuple):
    """stop: the string. start, end: its position in the text that was searched, in characters."""

    stop: str
    start: int
    end: int


class StopSet:
    """The stop strings of one output; immutable."""

    __slots__ = ("_first_chars", "_max_len", "_sorted", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._sorted = sorted(self._stops)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._max_len = max((len(stop) for stop in self._stops), default=0)

    @classmethod
    def checked(cls, stops: Sequence[str], *, max_stops: int, max_stop_bytes: int) -> StopSet | None:
        """None where there are no stop strings.

        Raises MeshError TOO_MANY_STOPS for too many or too long ones, INVALID_ARGUMENT for an empty one.
        """
        if len(stops) > max_stops:
            message = f"send at most {max_stops} stop strings, not {len(stops)}"
            raise MeshError(ErrorReason.ERROR_REASON_TOO_MANY_STOPS, message, {"max": str(max_stops)})
        if any(len(stop.encode()) > max_stop_bytes for stop in stops):
            message = f"send stop strings of at most {max_stop_bytes} UTF-8 bytes"
            raise MeshError(ErrorReason.ERROR_REASON_TOO_MANY_STOPS, message, {"max": str(max_stop_bytes)})
        if not all(stops):
            message = "leave empty stop strings out: they would end every output at once"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "stop"})
        return cls(stops) if stops else None

    def is_far_from(self, text: str) -> bool:
        """No stop string can start in text. The quick way out for nearly all tokens."""
        return self._first_chars.isdisjoint(text)

    def find(self, text: str, num_old: int) -> Match | None:
        """The match that counts. None ends within the first num_old characters, and those are a prefix of some stop."""
        best: Match | None = None
        for stop in self._stops:
            # A match has a new character at its end: few positions are left to look at, even in a long text.
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best.end, best.start):
                best = Match(stop, start, end)
        return best

    def open_start(self, text: str) -> int:
        """Start of the longest suffix of text that begins a stop string; len(text) if there is none.

        text holds no match. The caller passes the suffix found last time + new text, so each position is given up once:
        linear in the text, with a binary search among the stops per position.
        """
        first_chars = self._first_chars
        for start in range(max(0, len(text) + 1 - self._max_len), len(text)):
            if text[start] in first_chars and self._is_beginning(text[start:]):
                return start
        return len(text)

    def _is_beginning(self, text: str) -> bool:
        # Strings that begin with text follow it in the order at once.
        index = bisect_left(self._sorted, text)
        return index < len(self._sorted) and self._sorted[index].startswith(text)


class StopFinder:
    """Lets text through up to the first stop string. Keeps less than one stop string of text."""

    __slots__ = ("_stops", "held")

    def __init__(self, stops: StopSet) -> None:
        self._stops = stops
        self.held = ""

    def push(self, text: str) -> tuple[str, Match | None]:
        """Text that is surely before any match, and the match if there is one (its positions count from there on back:
        from the start of what was held). After a match the finder is done; text is then all before the match's end."""
        stops = self._stops
        if not self.held and stops.is_far_from(text):
            return text, None
        num_old = len(self.held)
        text = self.held + text
        match = stops.find(text, num_old)
        if match is not None:
            self.held = ""
            return text[: match.end], match
        start = stops.open_start(text)
        self.held = text[start:]
        return text[:start], None

    def release(self) -> str:
        """The text that was held, once nothing can follow."""
        text, self.held = self.held, ""
        return text
