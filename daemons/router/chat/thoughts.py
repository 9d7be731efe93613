"""Reasoning before the answer: `<think>...</think>`, and its spellings."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.daemons.router.chat.parts import ChatParser, PlainParser
from radixmesh.daemons.router.chat.reasoning_tokens import Read
from radixmesh.daemons.router.chat.text_reader import Malformed, Reading, TextReader


class ThoughtTags(NamedTuple):
    """begin, end: around a thought. stops: what ends it too, and begins something else. is_always: the model thinks
    unless its prompt says otherwise, whether or not it writes `begin`."""

    begin: str = "<think>"
    end: str = "</think>"
    stops: tuple[str, ...] = ()
    is_always: bool = False

    def is_open_after(self, prompt: str) -> bool:
        """True if the text that follows this prompt (its end will do) begins inside a thought."""
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        return self.is_always and not tail.endswith(self.end)

    def may_open_after(self, prompt: str) -> bool:
        """True if the model may begin a thought by itself."""
        return not prompt.rstrip().endswith(self.end)


class ThoughtParser(TextReader):
    """The thought first, the rest by another parser. is_open: the prompt ends inside a thought.

    Blanks around the thought are left out.
    """

    has_reasoning = True

    def __init__(self, tags: ThoughtTags, rest: ChatParser | None = None, *, is_open: bool = False) -> None:
        self._tags = tags
        self._rest = rest or PlainParser()
        self._is_open = is_open
        self._blanks: list[str] = []
        self._is_past = False
        super().__init__()

    def read(self) -> Reading[None]:
        self.begin_raw()
        try:
            yield from self.blanks()
            if (yield from self.is_next(self._tags.begin)):
                self._is_open = True
        except Malformed:
            pass  # More blanks than are held back: what follows them is read as if no thought began.
        assert self._raw is not None
        leading, self._raw = "".join(self._raw), None
        if self._is_open:
            yield from self.blanks()
            yield from self.pass_until((self._tags.end, *self._tags.stops), self._think)
            yield from self.is_next(self._tags.end)
            yield from self.blanks()
            self._blanks.clear()
        else:
            self._pass_on(leading)
        self._is_past = True
        while True:
            self._pass_on(self.take(len(self._text)))
            if not (yield from self.waits()):
                break
        self._parts += self._rest.finish()
        self.num_calls = self._rest.num_calls

    def reasoning_read(self) -> Read:
        read = super().reasoning_read()
        return read._replace(settled=read.settled - sum(map(len, self._blanks)), is_past=self._is_past)

    def _think(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self.reasoning("".join(self._blanks) + body, len(text) - len(body))
            self._blanks.clear()
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _pass_on(self, text: str) -> None:
        self._parts += self._rest.feed(text)
        self.num_calls = self._rest.num_calls
