"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.body import Body
from radixmesh.daemons.router.http.json_text import dump
from radixmesh.daemons.router.http.options import GenerationOptions, Uint32, invalid, unsupported
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

JsonObject = dict[str, object]


class ContentPart(Body):
    """A part of a message; only text is offered."""

    type: str
    text: str | None = None


class ChatMessage(Body):
    """What a template reads besides role and content (name, tool_calls, reasoning_content) is handed to it as it is."""

    role: str
    content: str | list[ContentPart] | None = None

    def to_proto(self, place: int) -> tokenizer_pb2.ChatMessage:
        """Raises UNSUPPORTED for parts other than text."""
        extra = self.__pydantic_extra__ or {}
        content = self._text(place)
        return tokenizer_pb2.ChatMessage(role=self.role, content=content, extra_json=_json(extra) if extra else "")

    def _text(self, place: int) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                field = f"messages.{place}.content"
                raise unsupported(field, f"{field} has a part of type {part.type!r}: only text is offered")
        return "".join(part.text or "" for part in self.content)


class JsonSchema(Body):
    """The schema as it came; what stands beside it is not used."""

    schema_: JsonObject | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """A constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationOptions):
    """OpenAI's fields, and: add_generation_prompt, continue_final_message, chat_template_kwargs."""

    messages: list[ChatMessage]
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    tools: list[JsonObject] | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    def to_generate(self, request_id: str) -> router_pb2.GenerateRequest:
        """Raises MeshError naming the field."""
        request = self.to_request(max_tokens=self._max_tokens(), num_top_logprobs=self._num_top_logprobs())
        request.request_id = request_id
        request.chat.CopyFrom(self._chat())
        grammar = self._grammar()
        if grammar is not None:
            request.grammar.CopyFrom(grammar)
        return request

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _num_top_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: set it to true")
        return None

    def _chat(self) -> tokenizer_pb2.ChatInput:
        if not self.messages:
            message = "messages is empty: send at least one"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_CHAT, message, {"field": "messages"})
        chat = tokenizer_pb2.ChatInput(
            messages=[message.to_proto(place) for place, message in enumerate(self.messages)],
            tools_json=_json(self.tools) if self.tools else "",
            template_args_json=_json(self.chat_template_kwargs) if self.chat_template_kwargs else "",
        )
        if self.add_generation_prompt is not None:
            chat.add_generation_prompt = self.add_generation_prompt
        if self.continue_final_message is not None:
            chat.continue_final_message = self.continue_final_message
        return chat

    def _grammar(self) -> common_pb2.Grammar | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.type == "json_object":
            return common_pb2.Grammar(any_json=True)
        schema = self.response_format.json_schema
        if schema is None or schema.schema_ is None:
            raise invalid("response_format", "response_format lacks json_schema.schema: send the schema")
        return common_pb2.Grammar(json_schema=_json(schema.schema_))


def _json(value: object) -> str:
    try:
        return dump(value).decode()
    except (ValueError, RecursionError) as error:
        message = f"a part of the chat cannot be written as JSON again ({error}): send plain JSON values"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_CHAT, message) from error
