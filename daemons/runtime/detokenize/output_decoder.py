"""The text of one output while its tokens arrive: decoding, stop strings, what was sent before.

    ids --TextDecoder--> text --StopFinder--> text before any stop --resume--> text the client has not got
          keeps < 1 character        keeps < 1 stop string         drops emitted_text_bytes

An output ends by a stop string, an id of eos_ids or a last row, whichever comes first; what arrives later is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.stop_finder import Match, StopFinder, StopSet
from radixmesh.daemons.runtime.detokenize.text_decoder import TextDecoder
from radixmesh.daemons.runtime.errors import MeshError


class StopHit(NamedTuple):
    """stop: the string that was found. num_tokens: output length at the stop, the token that completed it included."""

    stop: str
    num_tokens: int


class OutputDecoder:
    """One output.

    num_tokens: output tokens that count so far. text_bytes: UTF-8 offset of the text that comes next.
    include_stop: a stop string stays in the text, and so does the text of an id of eos_ids (as far as the decoder
    shows it: special tokens stay hidden where they are skipped).
    """

    __slots__ = (
        "_decoder",
        "_eos_ids",
        "_finder",
        "_include_stop",
        "_num_skip",
        "is_final",
        "num_tokens",
        "stop",
        "text_bytes",
    )

    def __init__(
        self, decoder: TextDecoder, *, stops: StopSet | None, eos_ids: frozenset[int], include_stop: bool
    ) -> None:
        self._decoder = decoder
        self._finder = None if stops is None else StopFinder(stops)
        self._eos_ids = eos_ids
        self._include_stop = include_stop
        self._num_skip = 0  # UTF-8 bytes that the client has and that have not passed yet.
        self.num_tokens = 0
        self.text_bytes = 0
        self.stop: StopHit | None = None
        self.is_final = False

    def resume(self, output_ids: Sequence[int], emitted_text_bytes: int) -> str:
        """Replays what was output before; returns its text from emitted_text_bytes on. Only on a new decoder.

        Raises MeshError INVALID_RESUME if the client cannot have that much text, or half a character of it.
        """
        self._num_skip = self.text_bytes = emitted_text_bytes
        text = self.push(output_ids, is_last=False)
        if self._num_skip:
            # Held text may be sent already: the client may have got the end of an output that was final.
            self._check_skip((self._finder.held if self._finder else "") + self._decoder.remainder())
        return text

    def push(self, ids: Sequence[int], is_last: bool) -> str:
        """The output's next ids; returns the text to send. is_last: none will follow, text that was held comes out.

        Sets stop and is_final. Raises MeshError INVALID_RESUME where emitted_text_bytes turns out to cut a character.
        """
        if self.is_final:
            return ""
        eos_index = -1
        if self._eos_ids and not self._eos_ids.isdisjoint(ids):
            eos_index = next(index for index, i in enumerate(ids) if i in self._eos_ids)
            num_counted = eos_index + 1
            ids = ids[: num_counted if self._include_stop else eos_index]
            is_last = True
        else:
            num_counted = len(ids)
        finder = self._finder
        if finder is None:
            text = self._decoder.push(ids)
            if is_last:
                text += self._decoder.remainder()
        else:
            text = self._push_searching(finder, ids, num_counted, is_last)
        if self.stop is None:
            self.num_tokens += num_counted
        self.is_final = is_last or self.stop is not None
        if text:
            text = self._unseen(text)
        if self._num_skip and self.is_final:
            self._check_skip("")
        return text

    def _push_searching(self, finder: StopFinder, ids: Sequence[int], num_counted: int, is_last: bool) -> str:
        before = self._decoder.fork() if len(ids) > 1 else None
        num_held = len(finder.held)
        text, match = finder.push(self._decoder.push(ids))
        if match is not None:
            num_at_stop = 1 if before is None else _tokens_until(before, ids, match.end - num_held)
            return self._end_at(match, text, num_at_stop)
        if not is_last:
            return text
        more, match = finder.push(self._decoder.remainder())
        if match is not None:
            return text + self._end_at(match, more, num_counted)
        return text + more + finder.release()

    def _end_at(self, match: Match, text: str, num_more_tokens: int) -> str:
        """text: up to the match's end, the match's positions count in it."""
        self.num_tokens += num_more_tokens
        self.stop = StopHit(match.stop, self.num_tokens)
        return text if self._include_stop else text[: match.start]

    def _unseen(self, text: str) -> str:
        """The part of text that the client has not got; moves the offsets on."""
        num_skip = self._num_skip
        if not num_skip:
            self.text_bytes += len(text) if text.isascii() else len(text.encode())
            return text
        data = text.encode()
        if len(data) <= num_skip:
            self._num_skip = num_skip - len(data)
            return ""
        self._check_skip(text)
        self._num_skip = 0
        self.text_bytes += len(data) - num_skip
        return data[num_skip:].decode()

    def _check_skip(self, text: str) -> None:
        data = text.encode()
        num_skip = self._num_skip
        if num_skip > len(data):
            message = "emitted_text_bytes lies beyond the text of output_ids: send all the output ids"
        elif num_skip < len(data) and data[num_skip] & 0xC0 == 0x80:
            message = "emitted_text_bytes lies within a character: send the bytes of whole deltas"
        else:
            return
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_RESUME, message, {"field": "emitted_text_bytes"})


def _tokens_until(decoder: TextDecoder, ids: Sequence[int], num_chars: int) -> int:
    """Number of leading ids after which the decoder has given num_chars characters. Once per output, when it stops."""
    num_given = 0
    for index, i in enumerate(ids):
        num_given += len(decoder.push([i]))
        if num_given >= num_chars:
            return index + 1
    raise AssertionError(f"{len(ids)} ids gave {num_given} characters at once and fewer than {num_chars} one by one")
