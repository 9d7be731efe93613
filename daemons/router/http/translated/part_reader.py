"""The parts of a chat's one output as they come, for APIs that stream them in words of their own."""

from __future__ import annotations

from typing import NamedTuple

from radixmesh.daemons.router.chat.parts import ChatMessage, ChatParser, ChatPart, PlainParser, join
from radixmesh.daemons.router.http.answers.collected import CollectedRequest, raise_failure
from radixmesh.daemons.router.requests.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update


class News(NamedTuple):
    """Parts of one update. finished: set with the last parts."""

    parts: list[ChatPart]
    finished: Finished | None


class PartReader:
    """Reads output 0 of one request."""

    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def read(self, update: Update) -> News:
        """Raises the MeshError of an output that failed."""
        parts: list[ChatPart] = []
        for delta in update.deltas:
            parts += self._parser.feed(delta.text)
        for finished in update.finished:
            raise_failure(finished)
            return News(parts + self._parser.finish(), finished)
        return News(parts, None)


def chat_parser(resolved: ResolvedRequest) -> ChatParser:
    """The parser of a request's output."""
    return PlainParser()


def whole_parts(answer: CollectedRequest) -> list[ChatPart]:
    """The parts of a finished answer's output, in order."""
    parser = chat_parser(answer.resolved)
    return [*parser.feed(answer.outputs[0].text), *parser.finish()]


def whole_message(answer: CollectedRequest) -> ChatMessage:
    """The same put together."""
    return join(whole_parts(answer))
