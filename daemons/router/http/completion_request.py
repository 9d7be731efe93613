"""The body of /v1/completions."""

from __future__ import annotations

from radixmesh.daemons.router.http.options import GenerationOptions, Uint32, unsupported
from radixmesh.daemons.router.http.prompts import Prompt, Prompts, split_prompts
from radixmesh.router.v1 import router_pb2

_DEFAULT_MAX_TOKENS = 16  # OpenAI's.


class CompletionRequest(GenerationOptions):
    """OpenAI's fields. max_tokens 0 with echo asks for the prompt's own logprobs."""

    prompt: Prompts
    max_tokens: Uint32 | None = None
    echo: bool | None = None
    logprobs: Uint32 | None = None
    best_of: Uint32 | None = None
    suffix: str | None = None

    @property
    def is_prompt_only(self) -> bool:
        """Nothing but the prompt is wanted. A model makes one token at least: it is left out of the answer."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[Prompt]:
        """One entry per prompt. Raises INVALID_ARGUMENT."""
        return split_prompts(self.prompt, "prompt")

    def to_template(self) -> router_pb2.GenerateRequest:
        """The request of any of the prompts, without it. Raises MeshError naming the field."""
        if self.suffix:
            raise unsupported("suffix", "suffix is not offered: models here only continue")
        if self.best_of is not None and self.best_of != self.num_outputs:
            raise unsupported("best_of", "best_of is not offered: ask for n outputs and choose")
        if self.stream and self.echo and (self.is_prompt_only or self.logprobs is not None):
            raise unsupported("echo", "echo with logprobs is not streamed: leave one of echo, logprobs and stream out")
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.to_request(
            max_tokens=1 if self.is_prompt_only else max_tokens,
            num_top_logprobs=self.logprobs,
            prompt_logprobs=bool(self.echo) and self.logprobs is not None,
        )
