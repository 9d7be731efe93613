"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from radixmesh.daemons.router.http.bodies.body import Contexts
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.client_names import names_of
from radixmesh.daemons.router.http.request_types.options import GenerationOptions, Uint32, with_prompt_logprobs
from radixmesh.daemons.router.http.request_types.prompts import RawPrompts, context_of, requests_of, split_prompts
from radixmesh.router.v1 import router_pb2

_DEFAULT_MAX_TOKENS = 16  # OpenAI's.
_NAMES = names_of("/v1/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationOptions):
    """OpenAI's fields. max_tokens 0 with echo asks for the prompt's own logprobs."""

    prompt: MaybeRaw
    max_tokens: Uint32 | None = None
    echo: bool | None = None
    logprobs: Uint32 | None = None
    best_of: Uint32 | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Uint32 | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Nothing but the prompt is wanted. A model makes one token at least: it is left out of the answer."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> RawPrompts:
        """One entry per prompt. Raises INVALID_ARGUMENT."""
        assert self.prompt is not None
        return split_prompts(self.prompt, "prompt")

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        template, prompts = self.to_template(), self.prompts()
        max_ids = context_of(contexts, self.model)
        yield from requests_of(template, prompts.decoded(max_ids), len(prompts.entries))

    def to_template(self) -> router_pb2.GenerateRequest:
        """The request of any of the prompts, without it. Raises MeshError naming the field."""
        if self.best_of is not None and self.best_of != self.num_outputs:
            raise unsupported("best_of", "best_of is not offered: ask for n outputs and choose")
        if self.stream and self.echo and (self.is_prompt_only or self.logprobs is not None):
            raise unsupported("echo", "echo with logprobs is not streamed: leave one of echo, logprobs and stream out")
        names, num_top = with_prompt_logprobs(self.stream, self.prompt_logprobs, self.logprobs, _NAMES)
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.to_request(
            max_tokens=1 if self.is_prompt_only else max_tokens,
            num_top_logprobs=num_top,
            prompt_logprobs=self.prompt_logprobs is not None or (bool(self.echo) and self.logprobs is not None),
            names=names,
        )
