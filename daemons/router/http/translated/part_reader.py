"""The parts of a chat's one output as they come, for APIs that stream them in words of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from radixmesh.daemons.router.chat.formats import ChatFormat
from radixmesh.daemons.router.chat.parts import ChatMessage, ChatPart, ToolUse, join
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.http.answers.collected import CollectedRequest, raise_failure
from radixmesh.daemons.router.http.answers.output_reader import OutputReader
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Update

PLAIN_PLAN = ChatPlan(format=ChatFormat.of("none", "none", ""), use=ToolUse())
"""Of outputs that are no chat's: all is content."""


class News(NamedTuple):
    """Parts of one update. finished: set with the last parts."""

    parts: list[ChatPart]
    finished: Finished | None


class WholeOutput(NamedTuple):
    """The parts of a finished output, in order. num_reasoning: tokens of its thought."""

    parts: list[ChatPart]
    num_reasoning: int


class PartReader:
    """Reads output 0 of one request as its plan says."""

    def __init__(self, plan: ChatPlan, resolved: ResolvedRequest) -> None:
        self._reader = OutputReader(plan, resolved, 0)

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    @property
    def num_reasoning(self) -> int:
        """Tokens of the thought so far; 0 where no parser reads thoughts."""
        return self._reader.num_reasoning or 0

    def read(self, update: Update) -> News:
        """Raises the MeshError of an output that failed."""
        parts: list[ChatPart] = []
        for delta in update.deltas:
            parts += self._reader.feed(delta)
        for finished in update.finished:
            raise_failure(finished)
            return News(parts + self._reader.finish(), finished)
        return News(parts, None)


def whole_output(answer: CollectedRequest, plan: ChatPlan) -> WholeOutput:
    """The one output of a finished answer."""
    reader, output = OutputReader(plan, answer.resolved, 0), answer.outputs[0]
    return WholeOutput(reader.whole(output.text, output.ids.tobytes()), reader.num_reasoning or 0)


def whole_message(answer: CollectedRequest, plan: ChatPlan) -> ChatMessage:
    """The same put together."""
    return join(whole_output(answer, plan).parts)


def arguments_of(text: str) -> Mapping[str, object] | None:
    """A call's arguments as an object; None where max_tokens cut them off, or they are too deep to be read."""
    try:
        value: object = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
