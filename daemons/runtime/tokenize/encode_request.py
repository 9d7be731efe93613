"""Encode's messages to and from what the codec works on. Imports no grpc."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.tokenize.chat import (
    Chat,
    check_chat_size,
    invalid_chat,
    read_message,
    read_template_args,
    read_tools,
)
from radixmesh.daemons.runtime.tokenize.text_codec import Encoded, Steps, TextCodec, TextItem
from radixmesh.tokenizer.v1 import tokenizer_pb2

# Of texts that are encoded on the event loop: 0.2 ms of it, under 1 ms for as many items as fit.
SHORT_BYTES = 1 << 10


def is_short_text(request: tokenizer_pb2.EncodeRequest) -> bool:
    """True for what may be encoded on an event loop. A chat's template may take any time."""
    return request.ByteSize() <= SHORT_BYTES and all(item.WhichOneof("input") == "text" for item in request.items)


def encode_request(
    codec_of: Callable[[], TextCodec], request: tokenizer_pb2.EncodeRequest
) -> Steps[tokenizer_pb2.EncodeResponse]:
    """The answer, in steps as `TextCodec.encode_steps` makes them. codec_of: asked at the first step."""
    codec = codec_of()
    codec.check_num_items(len(request.items))
    # Read one by one as they are encoded: a chat's objects are gone before the next one's are made.
    encoded = yield from codec.encode_steps(map(_read_item, request.items), request.max_tokens)
    answer = tokenizer_pb2.EncodeResponse(tokenizer_fingerprint=codec.vocabulary.fingerprint)
    # Ids may be four times the text: each item's arrays are let go before the next one's bytes are made.
    encoded.reverse()
    while encoded:
        _add_encoded(answer, encoded.pop())
    return answer


def _read_item(item: tokenizer_pb2.EncodeItem) -> TextItem | Chat | MeshError:
    form = item.WhichOneof("input")
    if form == "text":
        add_special_tokens = not item.HasField("add_special_tokens") or item.add_special_tokens
        return TextItem(text=item.text, add_special_tokens=add_special_tokens)
    if form is None:
        message = "set text or chat in every item"
        return MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "input"})
    try:
        return _read_chat(item.chat)
    except MeshError as error:
        return error


def _read_chat(chat: tokenizer_pb2.ChatInput) -> Chat:
    if chat.continue_final_message and chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
        raise invalid_chat("continue_final_message excludes add_generation_prompt: leave one of them out")
    check_chat_size(len(chat.messages), _json_texts(chat))
    return Chat(
        messages=[read_message(message.role, message.content, message.extra_json) for message in chat.messages],
        tools=read_tools(chat.tools_json),
        template_args=read_template_args(chat.template_args_json),
        add_generation_prompt=(
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
        ),
        continue_final_message=chat.continue_final_message,
    )


def _json_texts(chat: tokenizer_pb2.ChatInput) -> Iterator[str]:
    yield chat.tools_json
    yield chat.template_args_json
    for message in chat.messages:
        yield message.extra_json


def _add_encoded(answer: tokenizer_pb2.EncodeResponse, encoded: Encoded) -> None:
    if encoded.error is not None:
        answer.items.add(error=encoded.error.to_proto())
    else:
        answer.items.add(ids=pack_ints(encoded.ids), rendered=encoded.rendered)
