"""The body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import msgspec

from radixmesh.daemons.router.chat.parts import ToolMode, ToolUse
from radixmesh.daemons.router.http.bodies.body import Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, invalid, read_fields
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.chat_input import read_chat
from radixmesh.daemons.router.http.request_types.client_names import names_of
from radixmesh.daemons.router.http.request_types.options import GenerationOptions, Name, Uint32, with_prompt_logprobs
from radixmesh.daemons.router.http.request_types.tool_fields import pack_use, read_tools, unpack_use
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

_NAMES = names_of("/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationOptions):
    """OpenAI's fields, and: add_generation_prompt, continue_final_message, chat_template_kwargs.

    reasoning_effort and enable_thinking are arguments of the template, which may know them. chat: made of the messages,
    and never kept. packed_use: the tools and their choice, as tool_fields.py packs them.
    """

    OWN_FIELDS: ClassVar[frozenset[str]] = GenerationOptions.OWN_FIELDS | {"chat", "packed_use"}
    BULK: ClassVar[frozenset[str]] = frozenset(("chat",))

    messages: MaybeRaw
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    tools: MaybeRaw = None
    tool_choice: MaybeRaw = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Name | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: MaybeRaw = None
    chat: tokenizer_pb2.ChatInput | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Uint32 | None = None
    packed_use: list[object] | None = None

    @property
    def tool_use(self) -> ToolUse:
        """The tools and how they may be called."""
        return ToolUse() if self.packed_use is None else unpack_use(self.packed_use)

    def settled(self) -> Self:
        # Without arguments: a dataclass with slots is made anew, and `super()` would look at the former class.
        settled = GenerationOptions.settled(self)
        assert self.messages is not None
        if self.add_special_tokens:
            message = "add_special_tokens is not offered for chats, whose template writes those: leave it out"
            raise unsupported("add_special_tokens", message)
        use = read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        # "none": the model is not to call any, so it is shown none.
        tools = self.tools if use.mode is not ToolMode.NONE else None
        chat, unread = read_chat(self.messages, tools, self._template_args())
        if self.add_generation_prompt is not None:
            chat.add_generation_prompt = self.add_generation_prompt
        if self.continue_final_message is not None:
            chat.continue_final_message = self.continue_final_message
        packed = pack_use(use) if use.tools else None
        return replace(settled, chat=chat, packed_use=packed, ignored=(*settled.ignored, *unread))

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        yield self.to_generate()

    def to_generate(self) -> router_pb2.GenerateRequest:
        """The request without its id. Raises MeshError naming the field."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        own = self._num_top_logprobs()
        names, num_top = with_prompt_logprobs(self.stream, self.prompt_logprobs, own, _NAMES)
        wants_prompt = self.prompt_logprobs is not None
        request = self.to_request(max_tokens=most, num_top_logprobs=num_top, prompt_logprobs=wants_prompt, names=names)
        assert self.chat is not None
        request.chat.CopyFrom(self.chat)
        return request

    def _num_top_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: set it to true")
        return None

    def _template_args(self) -> Bytes | None:
        own: dict[str, object] = {}
        if self.reasoning_effort is not None:
            own["reasoning_effort"] = self.reasoning_effort
        thinks = False if self.reasoning_effort == "none" else self.enable_thinking
        if thinks is not None:
            # Qwen's and GLM's name, and DeepSeek's.
            own |= {"enable_thinking": thinks, "thinking": thinks}
        given = self.chat_template_kwargs
        if not own:
            return given
        return msgspec.json.encode({**own, **(read_fields(given, "chat_template_kwargs") if given else {})})
