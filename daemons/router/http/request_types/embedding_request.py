"""The bodies of /v1/embeddings and /classify: one vector or score for each input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.bodies.body import Body, Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw
from radixmesh.daemons.router.http.request_types.options import Int32, Name, RequestId, Uint32
from radixmesh.daemons.router.http.request_types.prompts import context_of, requests_of, split_prompts
from radixmesh.router.v1 import router_pb2

# As OpenAI's API takes.
MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequest(Body):
    """The inputs, in the forms of a prompt, and the extensions that concern no tokens."""

    TASK: ClassVar[common_pb2.Task]

    input: MaybeRaw
    model: Name | None = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    tenant: Name | None = None
    request_id: RequestId | None = None

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        template = router_pb2.GenerateRequest(
            model=self.model or "",
            task=self.TASK,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            tenant=self.tenant or "",
        )
        assert self.input is not None
        inputs = split_prompts(self.input, "input", MAX_INPUTS)
        max_ids = context_of(contexts, self.model)
        yield from requests_of(template, inputs.decoded(max_ids), len(inputs.entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(PooledRequest):
    """OpenAI's fields. dimensions: so many of the first, scaled to length 1 again. normalize: to length 1."""

    TASK: ClassVar[common_pb2.Task] = common_pb2.TASK_EMBED

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Uint32 | None = None
    normalize: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(PooledRequest):
    """activation: false for the score as the head gives it, else its sigmoid."""

    TASK: ClassVar[common_pb2.Task] = common_pb2.TASK_SCORE

    activation: bool | None = None
