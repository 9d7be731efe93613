"""The body of /generate: SGLang's native form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from radixmesh.daemons.router.http.bodies.body import Body, Contexts, read_object
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, check_values, invalid, list_of
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.request_types.client_names import NATIVE_SAMPLING, names_of
from radixmesh.daemons.router.http.request_types.constraints import constraining_field
from radixmesh.daemons.router.http.request_types.options import (
    GenerationOptions,
    Int32,
    Milliseconds,
    Name,
    RequestId,
    TokenOptions,
    Uint32,
)
from radixmesh.daemons.router.http.request_types.prompts import (
    MAX_PROMPTS,
    RawPrompts,
    context_of,
    requests_of,
    split_prompts,
)
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.router.v1 import router_pb2

_DEFAULT_MAX_TOKENS = 128
_FIELD = "sampling_params"
_NAMES = names_of("/generate")
_SHARED = (
    *("n", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens"),
    *("regex", "json_schema", "ebnf", "structural_tag"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSampling(TokenOptions):
    """sampling_params."""

    max_new_tokens: Uint32 | None = None
    min_new_tokens: Uint32 | None = None
    sampling_seed: MaybeRaw = None
    no_stop_trim: bool | None = None

    def to_options(self) -> GenerationOptions:
        """The same in the names that all endpoints share."""
        return GenerationOptions(
            **{name: getattr(self, name) for name in _SHARED},
            min_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            include_stop_str_in_output=self.no_stop_trim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(Body):
    """One prompt or a batch; sampling_params of a batch are one for all, or one each.

    incremental: events carry what is new, in place of all there is. constrained_by: the field that brings the grammar,
    of several the first's.
    """

    OWN_FIELDS: ClassVar[frozenset[str]] = Body.OWN_FIELDS | {"params", "constrained_by"}
    BULK: ClassVar[frozenset[str]] = frozenset(("params",))

    text: MaybeRaw = None
    input_ids: MaybeRaw = None
    sampling_params: MaybeRaw = None
    rid: RequestId | None = None
    return_logprob: bool | None = None
    logprob_start_len: Int32 | None = None
    top_logprobs_num: Uint32 | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    model: Name | None = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    tenant: Name | None = None
    deadline_ms: Milliseconds | None = None
    ttft_deadline_ms: Milliseconds | None = None
    prompt_cache_key: Name | None = None
    incremental: bool | None = None
    params: tuple[NativeSampling, ...] = ()
    constrained_by: str = ""

    def settled(self) -> Self:
        params, is_list = _params_of(self.sampling_params)
        if is_list and len(params) != len(self.prompts().entries):
            message = (
                f"{len(params)} sampling_params for {len(self.prompts().entries)} prompts: send one, or one for each"
            )
            raise invalid(_FIELD, message)
        unread = dict.fromkeys(name for sampling in params for name in sampling.ignored)
        by = next((f"{_FIELD}.{name}" for name in map(constraining_field, params) if name), "")
        ignored = (*self.ignored, *unread)
        return replace(self, params=params, is_batch=self.prompts().is_list, ignored=ignored, constrained_by=by)

    @property
    def prompt_logprobs_from(self) -> int | None:
        """The first prompt position whose logprob is wanted; None: none are."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    def prompts(self) -> RawPrompts:
        """One entry per prompt. Raises MISSING_FIELD or INVALID_ARGUMENT."""
        if (self.text is None) == (self.input_ids is None):
            message = "set text or input_ids, and not both: what to continue"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "text"})
        if self.text is not None:
            return split_prompts(self.text, "text")
        assert self.input_ids is not None
        return split_prompts(self.input_ids, "input_ids")

    @classmethod
    def message_type(cls) -> type[router_pb2.GenerateRequest]:
        return router_pb2.GenerateRequest

    def to_messages(self, contexts: Contexts) -> Iterator[router_pb2.GenerateRequest]:
        prompts = self.prompts()
        decoded = prompts.decoded(context_of(contexts, self.model))
        if len(self.params) == 1:
            yield from requests_of(self._template(self.params[0]), decoded, len(prompts.entries))
            return
        for sampling, prompt in zip(self.params, decoded, strict=True):
            yield from requests_of(self._template(sampling), iter((prompt,)), 1)

    def _template(self, sampling: NativeSampling) -> router_pb2.GenerateRequest:
        options = replace(
            sampling.to_options(),
            model=self.model,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            deadline_ms=self.deadline_ms,
            ttft_deadline_ms=self.ttft_deadline_ms,
            prompt_cache_key=self.prompt_cache_key,
        )
        most = sampling.max_new_tokens
        return options.to_request(
            max_tokens=_DEFAULT_MAX_TOKENS if most is None else most,
            num_top_logprobs=(self.top_logprobs_num or 0) if self.return_logprob else None,
            prompt_logprobs=self.prompt_logprobs_from is not None,
            names={**_NAMES, **NATIVE_SAMPLING},
        )


def _params_of(raw: Bytes | None) -> tuple[tuple[NativeSampling, ...], bool]:
    """The parameters, and whether there is a list of them."""
    if raw is None:
        return (NativeSampling(),), False
    check_values(raw, _FIELD)
    if bytes(memoryview(raw)[:1]) == b"[":
        entries = list_of(raw, _FIELD, MAX_PROMPTS, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
        return tuple(read_object(entry, NativeSampling, _FIELD) for entry in entries), True
    return (read_object(raw, NativeSampling, _FIELD),), False
