"""The four forms of a prompt: text, texts, ids, lists of ids.

A prompt may hold a million ids: they are counted in its bytes, and decoded a slice at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from radixmesh.daemons.router.http.bodies.field_decoders import invalid, list_of, text_of
from radixmesh.daemons.router.http.bodies.json_shape import Bytes, bound_of_values, shape_of
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.wire_bounds import MAX_BYTES
from radixmesh.router.v1 import router_pb2

Prompt: TypeAlias = "str | array[int]"

# Each is a request of its own.
MAX_PROMPTS = 1024
# Of all requests together, what they share: it is in each of them.
MAX_SHARED_BYTES = 8 << 20
# Of one text, as over gRPC.
MAX_TEXT_BYTES = MAX_BYTES["radixmesh.router.v1.GenerateRequest.text"]
# While the model's context length is not known.
MAX_IDS = 1 << 22

_IDS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]])
_ANY_IDS = msgspec.json.Decoder(list[int])
_SLICE_BYTES = 64 << 10
_SPACE = b" \t\n\r"


class RawPrompts(NamedTuple):
    """entries: one per prompt, as its JSON. is_list: whether they came as a list of prompts."""

    entries: Sequence[Bytes]
    is_list: bool
    field: str

    def decoded(self, max_ids: int = MAX_IDS) -> Iterator[Prompt]:
        """One prompt after the other. Raises INVALID_ARGUMENT, PROMPT_TOO_LONG for one of max_ids ids or more, and
        TOO_LARGE for a text that no tokenizer is asked for: what goes on from here holds the event loop by its bytes.
        """
        for raw in self.entries:
            if _first(raw) == b'"':
                yield _checked_text(text_of(raw, self.field), self.field)
            else:
                yield ids_of(raw, self.field, max_ids)


def _checked_text(text: str, field: str) -> str:
    # Characters: a text of more bytes than that is counted where it is sent.
    if len(text) > MAX_TEXT_BYTES:
        message = f"{field} has a text of {len(text)} characters, at most {MAX_TEXT_BYTES} bytes are taken: send less"
        metadata = {"field": field, "size": str(len(text)), "max": str(MAX_TEXT_BYTES)}
        raise MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, metadata)
    return text


def split_prompts(raw: Bytes, field: str, most: int = MAX_PROMPTS) -> RawPrompts:
    """One entry per prompt; an empty list is one prompt without tokens. Raises INVALID_ARGUMENT."""
    first = _first(raw)
    if first == b'"':
        return RawPrompts([raw], False, field)
    if first != b"[":
        raise no_form(field)
    inner = bytes(memoryview(raw)[:_SLICE_BYTES]).lstrip(_SPACE)[1:].lstrip(_SPACE)[:1]
    if inner not in (b'"', b"["):
        return RawPrompts([raw], False, field)
    entries = list_of(raw, field, most, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
    if any(_first(entry) != inner for entry in entries):
        raise no_form(field)
    return RawPrompts(entries, True, field)


def ids_of(raw: Bytes, field: str, max_ids: int = MAX_IDS) -> array[int]:
    """A list of ids. Raises INVALID_ARGUMENT, and PROMPT_TOO_LONG for max_ids or more."""
    num = bound_of_values(raw)
    # Of anything but ids it would be a bound: such a list is refused below, for what it is.
    if num > max_ids and (num := shape_of(raw).num_entries) >= max_ids:
        raise prompt_too_long(num, max_ids)
    ids: array[int] = array("i")
    view = memoryview(raw)
    start, end = 1, len(view) - 1
    while start < end:
        part = bytes(view[start : min(end, start + _SLICE_BYTES)])
        if start + _SLICE_BYTES < end:
            cut = part.rfind(b",")
            if cut < 0:  # A number as long as that, or so many spaces.
                raise no_form(field)
            part = part[:cut]
        ids.extend(_slice_of_ids(part, field))
        start += len(part) + 1
    return ids


def requests_of(
    template: router_pb2.GenerateRequest, prompts: Iterator[Prompt], num: int
) -> Iterator[router_pb2.GenerateRequest]:
    """template once per prompt. Raises TOO_LARGE where what they share is too much for so many."""
    shared = template.ByteSize() * num
    if shared > MAX_SHARED_BYTES:
        message = f"{num} prompts share options of {template.ByteSize()} bytes: send fewer at once"
        raise MeshError(
            ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(shared), "max": str(MAX_SHARED_BYTES)}
        )
    for prompt in prompts:
        request = router_pb2.GenerateRequest()
        request.CopyFrom(template)
        set_prompt(request, prompt)
        del prompt  # While the request is sent on, its text is there once.
        yield request


def set_prompt(request: router_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.prompt_ids = prompt.tobytes()


def name_requests(requests: Sequence[router_pb2.GenerateRequest], request_id: str) -> None:
    """Several requests get ids "<request_id>-<index>"."""
    for index, request in enumerate(requests):
        request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"


def context_of(contexts: Mapping[str, int], model: str | None) -> int:
    """The most ids, less one, that a prompt for this model can have."""
    return contexts.get(model or "") or max(contexts.values(), default=MAX_IDS)


def prompt_too_long(num: int, context: int) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
        f"{num} prompt tokens leave no room in a context of {context}: shorten the prompt",
        {"prompt_tokens": str(num), "max_total_len": str(context)},
    )


def _slice_of_ids(raw: bytes, field: str) -> list[int]:
    try:
        return _IDS.decode(b"[" + raw + b"]")
    except msgspec.DecodeError:
        pass
    try:
        _ANY_IDS.decode(b"[" + raw + b"]")
    except msgspec.DecodeError:
        raise no_form(field) from None
    raise invalid(field, f"{field} holds a number that no token id can be: ids are 32-bit integers")


def _first(raw: Bytes) -> bytes:
    """The first byte that is no space: values that msgspec gives as Raw begin with it."""
    return bytes(memoryview(raw)[:1])


def no_form(field: str) -> MeshError:
    return invalid(
        field, f"{field} is no prompt: send a text, a list of texts, a list of ids, or a list of lists of ids"
    )
