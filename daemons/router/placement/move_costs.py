"""Measured cost of going on elsewhere: seconds until a moved output has its next token, by KV and by prefill.

Either way is a straight line over the tokens that the next replica lacks, fitted to the moves of late. Queues,
transfers that failed and the speed of the machines are in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# A move counts half as much as one so many later.
_HALF_LIFE = 16
# So often the way that seems dearer is taken, so that its figure does not stay what it was once.
_EXPLORE_EVERY = 16
# Moves that are measured at a time.
_MOST = 4096


class MoveWay(Enum):
    KV = "kv"
    PREFILL = "prefill"


@dataclass(slots=True)
class Line:
    """Least squares of seconds over tokens, with samples that fade."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    products: float = 0.0

    def add(self, num_tokens: float, seconds: float) -> None:
        """A move as it was."""
        fade = 0.5 ** (1 / _HALF_LIFE)
        for name, value in (
            ("weight", 1.0),
            ("tokens", num_tokens),
            ("seconds", seconds),
            ("tokens_squared", num_tokens * num_tokens),
            ("products", num_tokens * seconds),
        ):
            setattr(self, name, getattr(self, name) * fade + value)

    def at(self, num_tokens: float) -> float | None:
        """Seconds of a move of so many tokens, never less than 0; None: nothing was measured."""
        if not self.weight:
            return None
        mean, seconds = self.tokens / self.weight, self.seconds / self.weight
        spread = self.tokens_squared / self.weight - mean * mean
        if spread <= 0.01 * mean * mean:
            return seconds * num_tokens / mean if mean else seconds  # All of one size: in proportion.
        slope = max(0.0, (self.products / self.weight - mean * seconds) / spread)
        return max(0.0, seconds + slope * (num_tokens - mean))


class _Begun(NamedTuple):
    way: MoveWay
    num_tokens: int
    at: float


class MoveCosts:
    """clock: monotonic seconds. Outputs are named by their link and the number of their submit there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = {way: Line() for way in MoveWay}
        self._begun: dict[tuple[object, int], _Begun] = {}
        self.num_chosen = 0

    def choose(self, num_tokens: int) -> MoveWay:
        """The way for an output of which the next replica lacks so many tokens, where both are open."""
        self.num_chosen += 1
        seconds = {way: line.at(num_tokens) for way, line in self._lines.items()}
        by_kv, by_prefill = seconds[MoveWay.KV], seconds[MoveWay.PREFILL]
        if by_kv is None or by_prefill is None:
            # Long prompts go by KV until it is known what that takes; then a prefill is tried.
            return MoveWay.KV if by_kv is None else MoveWay.PREFILL
        cheaper = MoveWay.KV if by_kv <= by_prefill else MoveWay.PREFILL
        other = MoveWay.PREFILL if cheaper is MoveWay.KV else MoveWay.KV
        return other if self.num_chosen % _EXPLORE_EVERY == 0 else cheaper

    def seconds(self, way: MoveWay, num_tokens: int) -> float | None:
        """As measured; None: not yet."""
        return self._lines[way].at(num_tokens)

    def begin(self, link: object, sequence: int, way: MoveWay, num_tokens: int) -> None:
        """An output goes on there."""
        if len(self._begun) < _MOST:
            self._begun[link, sequence] = _Begun(way, num_tokens, self._clock())

    def again(self, link: object, former: int, sequence: int) -> None:
        """It was submitted once more, behind a token that came from elsewhere."""
        if (begun := self._begun.pop((link, former), None)) is not None:
            self._begun[link, sequence] = begun

    def first_token(self, link: object, sequence: int) -> None:
        """It goes on."""
        if (begun := self._begun.pop((link, sequence), None)) is not None:
            self._lines[begun.way].add(begun.num_tokens, self._clock() - begun.at)

    def left(self, link: object, sequence: int) -> None:
        """It is not there any more."""
        self._begun.pop((link, sequence), None)
