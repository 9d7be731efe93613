"""Plans of chats: the model's format, the grammar that makes it call, and the parsers of outputs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.chat.formats import ChatFormat
from radixmesh.daemons.router.chat.parts import ChatParser, ChatPart, ContentDelta, ReasoningDelta, ToolMode, ToolUse
from radixmesh.daemons.router.chat.tool_grammar import CallTags, check_size, is_unguided, tool_grammar
from radixmesh.daemons.router.http.answers.tokens import TokenTable, TokenTables
from radixmesh.daemons.router.http.bodies.field_decoders import invalid
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

# Tokens at the end of a prompt that tell whether it opens a thought.
_TAIL_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPlan:
    """is_list: calls come as a JSON list. separates: reasoning comes apart, not as content. keeps_reasoning: it comes
    at all. ignored: fields of the request that could not be followed, and change nothing but how sure an answer is."""

    format: ChatFormat
    use: ToolUse
    table: TokenTable | None = None
    is_list: bool = False
    separates: bool = True
    keeps_reasoning: bool = True
    ignored: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True where all text is content, as it comes."""
        return self.use.mode is ToolMode.NONE and not (self.format.has_markup and self._reads_thoughts)

    @property
    def _reads_thoughts(self) -> bool:
        return self.separates or self.format.is_harmony

    def parser(self, resolved: ResolvedRequest, index: int) -> ChatParser:
        """The parser of one output."""
        tail = ""
        if self.table is not None and self.format.thought is not None:
            ids = unpack_ints(resolved.prompt_ids[-4 * _TAIL_TOKENS :], "prompt_ids").tolist()
            tail = b"".join(map(self.table.data, ids)).decode(errors="replace")
        form = self.format if self._reads_thoughts else self.format._replace(thought=None)
        return form.parser(self.use, tail, request_id=resolved.request_id, index=index, is_list=self.is_list)

    def shown(self, parts: list[ChatPart]) -> list[ChatPart]:
        """The parts that the client wants to see."""
        if self.separates and self.keeps_reasoning:
            return parts
        if not self.separates:
            return [ContentDelta(part.text) if isinstance(part, ReasoningDelta) else part for part in parts]
        return [part for part in parts if not isinstance(part, ReasoningDelta)]


class ChatPlans:
    """Plans for the models behind a router. tool_parser, reasoning_parser: names of chat/formats.py, or "auto"."""

    def __init__(self, router: Router, tables: TokenTables, tool_parser: str, reasoning_parser: str) -> None:
        self._router = router
        self._tables = tables
        self._names = (tool_parser, reasoning_parser)
        self._formats: dict[str, ChatFormat] = {}

    async def plan(
        self,
        request: router_pb2.GenerateRequest,
        use: ToolUse,
        *,
        separates: bool = True,
        keeps_reasoning: bool = True,
    ) -> ChatPlan:
        """The plan of a chat; the request gets the grammar that it needs, and the tokens of markup as text.

        Raises INVALID_ARGUMENT or UNSUPPORTED for a call that cannot be made sure of, and what the mesh says where its
        model is not known.
        """
        try:
            async with asyncio.timeout(request.deadline_ms / 1000 if request.HasField("deadline_ms") else None):
                identity, table = await self._model_of(request.model)
        except TimeoutError as error:
            message = "the request's deadline_ms passed before it could start: give it more time"
            raise MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error
        form = self._format_of(identity, table)
        has_special = table is not None and table.has_special_in(form.markers)
        ignored: tuple[str, ...] = ()
        is_list = False
        if use.mode is not ToolMode.NONE:
            is_list, ignored = _guide(request, use, form.tags, identity, has_special=has_special)
        if request.HasField("grammar") and form.thought is not None:
            tags = form.thought
            is_text = table is None or not table.has_special_in(tags.begin + tags.end)
            if is_text:
                thought = common_pb2.Thought(begin=tags.begin, end=tags.end, is_always=tags.is_always)
                request.grammar.thought.CopyFrom(thought)
        plan = ChatPlan(
            format=form,
            use=use,
            table=table,
            is_list=is_list,
            separates=separates,
            keeps_reasoning=keeps_reasoning,
            ignored=ignored,
        )
        if has_special and not plan.is_plain:
            request.stop.skip_special_tokens = False
        return plan

    async def format_of(self, name: str) -> ChatFormat:
        """The markup that a model writes. Raises as plan() does."""
        return self._format_of(*await self._model_of(name))

    async def _model_of(self, name: str) -> tuple[ServedIdentity, TokenTable | None]:
        """Waits for both. The table is None where tokenizers tell none."""
        served = self._router.schedulers.served(name)
        identity = served.identity if served is not None else await self._router.model_identity(name)
        try:
            return identity, await self._tables.of(identity)
        except MeshError as error:
            if error.reason != ErrorReason.ERROR_REASON_UNSUPPORTED:
                raise
            return identity, None

    def _format_of(self, identity: ServedIdentity, table: TokenTable | None) -> ChatFormat:
        key = identity.tokenizer_fingerprint
        if key not in self._formats:
            self._formats[key] = ChatFormat.of(*self._names, table.template if table is not None else "")
        return self._formats[key]


def _guide(
    request: router_pb2.GenerateRequest,
    use: ToolUse,
    tags: CallTags | None,
    identity: ServedIdentity,
    *,
    has_special: bool,
) -> tuple[bool, tuple[str, ...]]:
    """Gives the request the grammar of its tools: (calls come as a list, fields that are not followed)."""
    must_call = use.mode is not ToolMode.AUTO
    if must_call and request.HasField("grammar"):
        raise invalid("tool_choice", "tool_choice requires a call, and a constraint another answer: send one of them")
    if not identity.grammar_format:
        if must_call:
            message = (
                f"tool_choice that requires a call needs workers that follow grammars, and those of {identity.name!r} "
                "do not: send auto (docs/http.md says what they need)"
            )
            raise unsupported("tool_choice", message)
        return False, ("tools.strict",) if any(tool.strict for tool in use.tools) else ()
    grammar = tool_grammar(use, tags, has_special_markup=has_special)
    if grammar is None:
        is_open = is_unguided(use, tags, has_special_markup=has_special)
        return False, ("tools.strict",) if is_open else ()
    if not request.HasField("grammar"):
        check_size(len(grammar.structural_tag.encode()))
        request.grammar.structural_tag = grammar.structural_tag
        return grammar.is_list, ()
    # The answer keeps to its own constraint, or is a call: the model may begin with either.
    return False, ("tools.strict",)
