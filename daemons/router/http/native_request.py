"""The body of /generate: SGLang's native form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.body import Body
from radixmesh.daemons.router.http.options import GenerationOptions, Int32, RequestId, Seed, TokenId, Uint32, invalid
from radixmesh.daemons.router.http.prompts import MAX_PROMPTS, Prompt, Prompts, split_prompts
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.router.v1 import router_pb2

_DEFAULT_MAX_TOKENS = 128


class NativeSampling(Body):
    """sampling_params. json_schema, regex, ebnf and structural_tag constrain the output."""

    n: Uint32 | None = None
    max_new_tokens: Uint32 | None = None
    min_new_tokens: Uint32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Seed | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def to_options(self) -> GenerationOptions:
        """The same in the names that all endpoints share."""
        shared = (
            *("n", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
            *("presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens"),
        )
        return GenerationOptions.model_construct(
            **{name: getattr(self, name) for name in shared},
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            include_stop_str_in_output=self.no_stop_trim,
        )

    def grammar(self) -> common_pb2.Grammar | None:
        given = {name: getattr(self, name) for name in ("json_schema", "regex", "ebnf", "structural_tag")}
        set_ones = {name: source for name, source in given.items() if source is not None}
        if len(set_ones) > 1:
            raise invalid(
                "sampling_params", f"sampling_params has {' and '.join(set_ones)}: a constraint is one of them"
            )
        return common_pb2.Grammar(**set_ones) if set_ones else None


class NativeRequest(Body):
    """One prompt or a batch; sampling_params of a batch are one for all, or one each.

    incremental: events carry what is new, in place of all there is.
    """

    text: str | list[str] | None = None
    input_ids: Prompts | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: RequestId | None = None
    return_logprob: bool | None = None
    logprob_start_len: Int32 | None = None
    top_logprobs_num: Uint32 | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    model: str | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    tenant: str | None = None
    deadline_ms: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    incremental: bool | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list: the prompts were."""
        ids = self.input_ids
        return isinstance(self.text, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))

    @property
    def prompt_logprobs_from(self) -> int | None:
        """The first prompt position whose logprob is wanted; None: none are."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    def prompts(self) -> list[Prompt]:
        """One entry per prompt. Raises MISSING_FIELD or INVALID_ARGUMENT."""
        if (self.text is None) == (self.input_ids is None):
            message = "set text or input_ids, and not both: what to continue"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "text"})
        if self.input_ids is None:
            return split_prompts(self.text, "text")
        return split_prompts(self.input_ids, "input_ids")

    def to_templates(self, num_prompts: int) -> list[router_pb2.GenerateRequest]:
        """One request per prompt, without it. Raises MeshError naming the field."""
        assert num_prompts <= MAX_PROMPTS
        params = self.sampling_params
        each = params if isinstance(params, list) else [params or NativeSampling()] * num_prompts
        if len(each) != num_prompts:
            message = f"{len(each)} sampling_params for {num_prompts} prompts: send one, or one for each"
            raise invalid("sampling_params", message)
        return [self._template(sampling) for sampling in each]

    def _template(self, sampling: NativeSampling) -> router_pb2.GenerateRequest:
        options = sampling.to_options().model_copy(
            update={
                "model": self.model,
                "cache_salt": self.cache_salt,
                "priority": self.priority,
                "tenant": self.tenant,
                "deadline_ms": self.deadline_ms,
            }
        )
        most = sampling.max_new_tokens
        request = options.to_request(
            max_tokens=_DEFAULT_MAX_TOKENS if most is None else most,
            num_top_logprobs=(self.top_logprobs_num or 0) if self.return_logprob else None,
            prompt_logprobs=self.prompt_logprobs_from is not None,
        )
        grammar = sampling.grammar()
        if grammar is not None:
            request.grammar.CopyFrom(grammar)
        return request
