"""The four forms of a prompt: text, texts, ids, lists of ids."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.options import TokenId
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

Prompt = str | list[TokenId]
# Unions are told apart from the left: an empty list is a list of ids, and so an empty prompt.
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]

# Each is a request of its own.
MAX_PROMPTS = 1024


def split_prompts(prompts: Prompts, field: str) -> list[Prompt]:
    """One entry per prompt. Raises INVALID_ARGUMENT for more than MAX_PROMPTS."""
    if isinstance(prompts, str):
        return [prompts]
    several: list[Prompt] = []
    single: list[TokenId] = []
    for prompt in prompts:
        if isinstance(prompt, int):
            single.append(prompt)
        else:
            several.append(prompt)
    if len(several) > MAX_PROMPTS:
        message = f"{field} holds {len(several)} prompts: send at most {MAX_PROMPTS} at once"
        metadata = {"field": field, "max": str(MAX_PROMPTS)}
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, metadata)
    return several or [single]


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
            request.prompt_ids = pack_ints(prompt)
        requests.append(request)
    return requests
