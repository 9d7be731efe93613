"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from radixmesh.daemons.router.http.bodies.body import Body, Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, invalid, list_of, text_of, too_large
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.chat_input import read_chat
from radixmesh.daemons.router.http.request_types.options import Name
from radixmesh.daemons.router.http.request_types.prompts import split_prompts
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

# Of one call: as many as the tokenizer takes.
MAX_TEXTS = 4096
# Of one call, in all its lists.
MAX_DECODED_IDS = 1 << 20
# Of messages alone: beside a prompt they change nothing.
_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(Body):
    """Either prompt (a text, or several) or messages (a chat, encoded as /v1/chat/completions does)."""

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"items"}
    BULK: ClassVar[frozenset[str]] = frozenset(("items",))

    model: Name | None = None
    prompt: MaybeRaw = None
    messages: MaybeRaw = None
    tools: MaybeRaw = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: MaybeRaw = None
    return_token_strs: bool | None = None
    items: tuple[tokenizer_pb2.EncodeItem, ...] = ()

    def settled(self) -> Self:
        """Raises MISSING_FIELD unless one of both is set, INVALID_CHAT."""
        if (self.prompt is None) == (self.messages is None):
            message = "set prompt or messages, and not both: what to encode"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "prompt"})
        if self.messages is not None:
            if self.add_special_tokens:
                message = "add_special_tokens is not offered for messages, whose template writes those: leave it out"
                raise unsupported("add_special_tokens", message)
            chat, unread = read_chat(self.messages, self.tools, self.chat_template_kwargs)
            if self.add_generation_prompt is not None:
                chat.add_generation_prompt = self.add_generation_prompt
            if self.continue_final_message is not None:
                chat.continue_final_message = self.continue_final_message
            return replace(self, items=(tokenizer_pb2.EncodeItem(chat=chat),), ignored=(*self.ignored, *unread))
        assert self.prompt is not None
        ignored = (*self.ignored, *(name for name in _OF_CHATS if getattr(self, name) is not None))
        if bytes(memoryview(self.prompt)[:1]) == b'"':
            return replace(self, items=(self._item(text_of(self.prompt, "prompt")),), ignored=ignored)
        texts = [self._item(text_of(text, "prompt")) for text in list_of(self.prompt, "prompt", MAX_TEXTS)]
        return replace(self, items=tuple(texts), is_batch=True, ignored=ignored)

    @classmethod
    def message_type(cls) -> type[router_pb2.TokenizeRequest]:
        return router_pb2.TokenizeRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.TokenizeRequest]:
        yield router_pb2.TokenizeRequest(model=self.model or "", items=self.items)

    def _item(self, text: str) -> tokenizer_pb2.EncodeItem:
        item = tokenizer_pb2.EncodeItem(text=text)
        if self.add_special_tokens is not None:
            item.add_special_tokens = self.add_special_tokens
        return item


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest(Body):
    """tokens: ids of one text, or of several."""

    tokens: MaybeRaw
    model: Name | None = None
    skip_special_tokens: bool | None = None

    def settled(self) -> Self:
        assert self.tokens is not None
        return replace(self, is_batch=split_prompts(self.tokens, "tokens").is_list)

    @classmethod
    def message_type(cls) -> type[tokenizer_pb2.DecodeRequest]:
        return tokenizer_pb2.DecodeRequest

    def to_messages(self, contexts: Contexts) -> Iterator[tokenizer_pb2.DecodeRequest]:
        """Raises TOO_LARGE beyond MAX_DECODED_IDS."""
        assert self.tokens is not None
        request = tokenizer_pb2.DecodeRequest()
        num = 0
        for ids in split_prompts(self.tokens, "tokens").decoded():
            if isinstance(ids, str):
                raise invalid("tokens", "tokens holds texts: send ids, or lists of ids")
            num += len(ids)
            if num > MAX_DECODED_IDS:
                raise too_large("tokens", "ids or more", num, MAX_DECODED_IDS)
            request.ids.append(ids.tobytes())
        if self.skip_special_tokens is not None:
            request.skip_special_tokens = self.skip_special_tokens
        yield request
