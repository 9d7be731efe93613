"""The number of an output's tokens whose text is part of its thought.

Tokens and text come apart: text is held back where it may still be a stop string, a marker or blanks at a thought's
end. So both are placed in the output's text, in characters, and meet there:

    tokens   |<think>|Hm|, |l|et|</|think|>|\n|Yes|
    text      <think> Hm,  let  </think>    \nYes
    thought           [-------)                      read by the parser: tokens that touch it count

A token that has a part of a character has all of it, so the two or three tokens of one character in a thought count,
and a token that has the end of the thought and the begin of its mark counts too. Blanks around a thought and its marks
are no part of it, and neither are tokens without text.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Characters start <= i < end of an output's text."""

    start: int
    end: int


class Read(NamedTuple):
    """The thought as far as a parser has read it. spans: new ones, in order. settled: no later span begins before this
    character. is_past: no later span comes at all."""

    spans: Sequence[Span]
    settled: int
    is_past: bool


class _Run(NamedTuple):
    """Consecutive tokens. pieces: their bytes, none empty. kept: the bytes before them of a character that ends in
    them. start, end: the characters that they have a part of; next: the first that none of them has."""

    pieces: Sequence[bytes]
    kept: bytes
    start: int
    end: int
    left: bytes


class ReasoningTokens:
    """Counts as tokens and text come. bytes_of: a token's bytes in the text, b"" where it shows none.

    Tokens are kept until the parser has read their text: as many as the text that is held back. Runs are cut in halves
    where a thought begins or ends within them, so a long run costs little more than its decoding.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self.num = 0
        self.runs: deque[_Run] = deque()
        self._spans: deque[Span] = deque()
        # Characters of the text that all tokens so far have ended, and the bytes of one that is not ended.
        self._num_chars = 0
        self._kept = b""
        self._is_done = False

    def add(self, ids: Iterable[int], read: Read) -> None:
        """New tokens, and what the parser has read since; either may be ahead of the other."""
        if self._is_done:
            return
        pieces = [data for data in map(self._bytes_of, ids) if data]
        if pieces:
            run = _placed(pieces, self._kept, self._num_chars)
            self.runs.append(run)
            self._kept = run.left
            self._num_chars = run.end - bool(run.left)
        self._spans.extend(read.spans)
        self._count()
        while self.runs and self.runs[0].end <= read.settled:
            self.runs.popleft()
        if read.is_past and not (self._spans and self._num_chars < self._spans[-1].end):
            self._is_done = True
            self.runs.clear()

    def _count(self) -> None:
        """Counts the tokens that the spans touch, each once; tokens before the first span are dropped."""
        runs, spans = self.runs, self._spans
        while runs and spans:
            run, span = runs[0], spans[0]
            if span.end <= run.start:
                spans.popleft()
            elif run.end <= span.start:
                runs.popleft()
            elif len(run.pieces) == 1 or (span.start <= run.start and run.end <= span.end):
                self.num += len(run.pieces)
                runs.popleft()
            else:
                half = len(run.pieces) // 2
                runs[0] = first = _placed(run.pieces[:half], run.kept, run.start)
                runs.insert(1, _placed(run.pieces[half:], first.left, first.end - bool(first.left)))


def _placed(pieces: Sequence[bytes], kept: bytes, num_chars: int) -> _Run:
    """The tokens after `num_chars` characters and the bytes `kept` of one more."""
    if kept and not 0x80 <= pieces[0][0] < 0xC0:
        # It never ends: it shows as one U+FFFD, which these tokens have no part of.
        kept, num_chars = b"", num_chars + 1
    data = kept + b"".join(pieces)
    text, num_used = utf_8_decode(data, "replace", False)
    left = data[num_used:]
    return _Run(pieces, kept, num_chars, num_chars + len(text) + bool(left), left)
