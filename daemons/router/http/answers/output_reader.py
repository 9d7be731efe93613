"""One output of a chat as it is read: the parts that its client is shown, and the tokens of its thought."""

from __future__ import annotations

from radixmesh.daemons.router.chat.parts import ChatPart
from radixmesh.daemons.router.chat.reasoning_tokens import ReasoningTokens
from radixmesh.daemons.router.chat.text_reader import TextReader
from radixmesh.daemons.router.http.answers.chat_plans import ChatPlan
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Delta
from radixmesh.daemons.runtime.arrays import unpack_list


class OutputReader:
    """Reads output number `index` of a request as its plan says."""

    def __init__(self, plan: ChatPlan, resolved: ResolvedRequest, index: int) -> None:
        self._plan = plan
        self._parser = plan.parser(resolved, index)
        self._thinker: TextReader | None = None
        if plan.table is not None and isinstance(self._parser, TextReader) and self._parser.has_reasoning:
            self._thinker = self._parser
            self._tokens = ReasoningTokens(plan.table.data_in_text(resolved.stop.skip_special_tokens))

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of the thought so far; None where no parser reads thoughts."""
        return None if self._thinker is None else self._tokens.num

    def feed(self, delta: Delta) -> list[ChatPart]:
        """The parts that more output makes certain."""
        return self.feed_tokens(delta.text, delta.ids)

    def feed_tokens(self, text: str, ids: bytes) -> list[ChatPart]:
        """The same. ids: an i32 array."""
        parts = self._parser.feed(text)
        if self._thinker is not None:
            self._tokens.add(unpack_list(ids, "ids"), self._thinker.reasoning_read())
        return self._plan.shown(parts)

    def finish(self) -> list[ChatPart]:
        """The rest, after the last text. Called once."""
        parts = self._parser.finish()
        if self._thinker is not None:
            self._tokens.add((), self._thinker.reasoning_read())
        return self._plan.shown(parts)

    def whole(self, text: str, ids: bytes) -> list[ChatPart]:
        """All parts of a finished output."""
        return [*self.feed_tokens(text, ids), *self.finish()]
