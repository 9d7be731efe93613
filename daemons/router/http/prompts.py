"""The four forms of a prompt: text, texts, ids, lists of ids.

A prompt may hold a million ids: they are checked whole, by the kinds of their entries, not one by one by a schema.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.options import invalid
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

Prompt: TypeAlias = "str | array[int]"
# As JSON gave it: split_prompts() says whether it is one of the four forms.
Prompts = object

# Each is a request of its own.
MAX_PROMPTS = 1024


def split_prompts(prompts: Prompts, field: str) -> list[Prompt]:
    """One entry per prompt; an empty list is one prompt without tokens. Raises INVALID_ARGUMENT."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise _no_form(field)
    kinds = set(map(type, prompts))
    if kinds <= {int}:
        return [_ids_of(prompts, field)]
    if len(prompts) > MAX_PROMPTS:
        message = f"{field} holds {len(prompts)} prompts: send at most {MAX_PROMPTS} at once"
        metadata = {"field": field, "max": str(MAX_PROMPTS)}
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, metadata)
    if kinds == {str}:
        return list(prompts)
    if kinds == {list}:
        return [_ids_of(ids, field) for ids in prompts]
    raise _no_form(field)


def requests_of(
    template: router_pb2.GenerateRequest, prompts: Sequence[Prompt], request_id: str
) -> list[router_pb2.GenerateRequest]:
    """template once per prompt. Several prompts get ids "<request_id>-<place>"."""
    requests = []
    for place, prompt in enumerate(prompts):
        request = router_pb2.GenerateRequest()
        request.CopyFrom(template)
        request.request_id = request_id if len(prompts) == 1 else f"{request_id}-{place}"
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.prompt_ids = prompt.tobytes()
        requests.append(request)
    return requests


def _ids_of(ids: Sequence[object], field: str) -> array[int]:
    if not set(map(type, ids)) <= {int}:  # True is no id, though Python takes it for one.
        raise _no_form(field)
    try:
        return array("i", ids)  # type: ignore[arg-type]
    except OverflowError as error:
        raise invalid(field, f"{field} holds a number that no token id can be: ids are 32-bit integers") from error


def _no_form(field: str) -> MeshError:
    return invalid(field, f"{field} is none of: a text, a list of texts, a list of ids, a list of lists of ids")
