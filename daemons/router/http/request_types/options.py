"""Options that all generating endpoints share: OpenAI's names, and extensions under the names other engines use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import Meta

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.http.bodies.body import Body, read_object
from radixmesh.daemons.router.http.bodies.field_decoders import MaybeRaw, check_entries, decode, invalid, list_of
from radixmesh.daemons.router.http.bodies.json_shape import Bytes
from radixmesh.daemons.router.http.bodies.known_fields import unsupported
from radixmesh.daemons.router.http.request_types.client_names import renamed
from radixmesh.daemons.router.http.request_types.constraints import NAMES, constraining_field, grammar_of, with_field
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import grammar_source
from radixmesh.daemons.runtime.request_ids import HTTP_REQUEST_ID_PATTERN
from radixmesh.daemons.runtime.sampling import (
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    MAX_STOPS,
    sampling_from_proto,
    stop_from_proto,
)
from radixmesh.router.v1 import router_pb2

# Bounds are those of the wire; what a value may be is the router's to say, the same over HTTP and gRPC.
Uint32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Milliseconds = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
# Texts that travel with every message of a request.
Name = Annotated[str, Meta(max_length=256)]
# It comes back as a header, and names the request in logs.
RequestId = Annotated[str, Meta(pattern=HTTP_REQUEST_ID_PATTERN)]

_MAX_U64 = (1 << 64) - 1
_constraints_of: Callable[[object], tuple[Bytes | None, ...]] = attrgetter(*NAMES)
_INT = msgspec.json.Decoder(int)
_IDS = msgspec.json.Decoder(list[Int32])
_STOPS = msgspec.json.Decoder(list[str])
_STOP = msgspec.json.Decoder(str)
_BIASES = msgspec.json.Decoder(dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(Body):
    """include_usage: one more event at the end, with usage and no choices."""

    include_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions(Body):
    """Sampling parameters and stop conditions. Null or absent: the default of router.proto."""

    n: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: MaybeRaw = None
    stop: MaybeRaw = None
    stop_token_ids: MaybeRaw = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # Constraints: of all of them one at most.
    regex: MaybeRaw = None
    json_schema: MaybeRaw = None
    ebnf: MaybeRaw = None
    structural_tag: MaybeRaw = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(TokenOptions):
    """Every field may be null or absent: then the default of router.proto holds. includes_usage: of stream_options.
    constrained_by: the field that brings the grammar, empty where none does."""

    OWN_FIELDS: ClassVar[frozenset[str]] = TokenOptions.OWN_FIELDS | {"includes_usage", "constrained_by"}

    model: Name | None = None
    stream: bool | None = None
    stream_options: MaybeRaw = None
    # OpenAI's seeds are signed; ours count modulo 2^64.
    seed: MaybeRaw = None
    response_format: MaybeRaw = None
    # Extensions.
    structured_outputs: MaybeRaw = None
    guided_json: MaybeRaw = None
    guided_json_object: MaybeRaw = None
    guided_regex: MaybeRaw = None
    guided_choice: MaybeRaw = None
    guided_grammar: MaybeRaw = None
    min_tokens: Uint32 | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Name | None = None
    priority: Int32 | None = None
    tenant: Name | None = None
    request_id: RequestId | None = None
    deadline_ms: Milliseconds | None = None
    ttft_deadline_ms: Milliseconds | None = None
    # OpenAI's name for what requests with one beginning have in common: the session that routers go by.
    prompt_cache_key: Name | None = None
    includes_usage: bool = False
    constrained_by: str = ""

    def settled(self) -> Self:
        sent = _constraints_of(self)
        by = "" if sent.count(None) == len(sent) else constraining_field(self)
        own: dict[str, object] = {"constrained_by": by} if by else {}
        if self.stream_options is not None:
            options = read_object(self.stream_options, StreamOptions, "stream_options")
            if options.include_usage or options.ignored:
                own["includes_usage"], own["ignored"] = bool(options.include_usage), (*self.ignored, *options.ignored)
        # It was made a moment ago, and nobody else has it: a copy of so many fields costs more than reading them.
        for name, value in own.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def num_outputs(self) -> int:
        return 1 if self.n is None else self.n

    def to_request(
        self,
        *,
        max_tokens: int | None,
        num_top_logprobs: int | None,
        prompt_logprobs: bool = False,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> router_pb2.GenerateRequest:
        """The request without its input and id, checked as far as no model is needed for it.

        names: the names of fields that its client knows otherwise. Raises MeshError naming the field as the client
        does.
        """
        with named_as_sent(names):
            return self._to_request(max_tokens, num_top_logprobs, prompt_logprobs)

    def _to_request(
        self, max_tokens: int | None, num_top_logprobs: int | None, prompt_logprobs: bool
    ) -> router_pb2.GenerateRequest:
        sampling = sampling_of(self)
        if num_top_logprobs is not None:
            sampling.num_top_logprobs = num_top_logprobs
        if prompt_logprobs:
            sampling.prompt_logprobs = True
        stop = stop_of(self)
        if max_tokens is not None:
            stop.max_tokens = max_tokens
        sampling_from_proto(sampling)
        stop_from_proto(stop)
        sent = _constraints_of(self)
        # Of a dozen fields, as a rule none is there.
        if sent.count(None) == len(sent):
            grammar, field = None, ""
        else:
            grammar, field = grammar_of(dict(zip(NAMES, sent, strict=True)))
        if grammar is not None:
            try:
                grammar_source(grammar)
            except MeshError as error:
                raise with_field(error, field) from None
        return router_pb2.GenerateRequest(
            model=self.model or "",
            n=self.n,
            sampling=sampling,
            stop=stop,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            deadline_ms=self.deadline_ms,
            ttft_deadline_ms=self.ttft_deadline_ms,
            session=self.prompt_cache_key or "",
            tenant=self.tenant or "",
            grammar=grammar,
        )


def with_prompt_logprobs(
    stream: bool | None, num_prompt: int | None, num_own: int | None, names: Mapping[str, str]
) -> tuple[Mapping[str, str], int | None]:
    """vLLM's prompt_logprobs beside an output's: the larger number of alternatives, which both are asked for with, and
    the names of fields, of which that one is the one to blame. Raises UNSUPPORTED."""
    if num_prompt is None:
        return names, num_own
    if stream:
        raise unsupported(
            "prompt_logprobs", "prompt_logprobs are not streamed: leave one of prompt_logprobs and stream out"
        )
    if num_own is not None and num_own >= num_prompt:
        return names, num_own
    return {**names, "num_top_logprobs": "prompt_logprobs"}, num_prompt


def sampling_of(options: GenerationOptions) -> common_pb2.SamplingParams:
    """Sampling options; absent ones stay unset. top_k -1 is 0: keep all."""
    o = options
    sampling = common_pb2.SamplingParams(
        repetition_penalty=o.repetition_penalty,
        frequency_penalty=o.frequency_penalty,
        presence_penalty=o.presence_penalty,
        temperature=o.temperature,
        top_p=o.top_p,
        min_p=o.min_p,
    )
    if o.seed is not None:
        sampling.seed = seed_of(o.seed, "seed") & _MAX_U64
    if o.top_k is not None:
        if o.top_k < -1:
            raise invalid("top_k", f"top_k is {o.top_k}: choose 1 or more, or -1 for all")
        sampling.top_k = max(0, o.top_k)
    if o.logit_bias is not None:
        sampling.logit_bias_ids, sampling.logit_bias_values = packed_biases(o.logit_bias)
    return sampling


def stop_of(options: GenerationOptions) -> common_pb2.StopParams:
    """Stop conditions, but for max_tokens."""
    o = options
    stop = common_pb2.StopParams(
        min_tokens=o.min_tokens,
        stop=None if o.stop is None else stops_of(o.stop),
        stop_ids=b"" if o.stop_token_ids is None else stop_ids_of(o.stop_token_ids),
    )
    if o.ignore_eos is not None:
        stop.ignore_eos = o.ignore_eos
    if o.include_stop_str_in_output is not None:
        stop.include_stop = o.include_stop_str_in_output
    if o.skip_special_tokens is not None:
        stop.skip_special_tokens = o.skip_special_tokens
    return stop


def seed_of(raw: Bytes, field: str) -> int:
    """Any 64-bit number, signed or not. Raises INVALID_ARGUMENT."""
    seed = decode(_INT, raw, field)
    if not -(1 << 63) <= seed <= _MAX_U64:
        raise invalid(field, f"{field} is beyond 64 bits: choose a number from -2^63 to 2^64 - 1")
    return seed


def stops_of(data: Bytes) -> list[str]:
    """A text or texts. Raises TOO_MANY_STOPS, INVALID_ARGUMENT."""
    if bytes(memoryview(data)[:1]) == b'"':
        return [decode(_STOP, data, "stop")]
    list_of(data, "stop", MAX_STOPS, ErrorReason.ERROR_REASON_TOO_MANY_STOPS)
    return decode(_STOPS, data, "stop")


def stop_ids_of(data: Bytes) -> bytes:
    """Packed ids. Raises TOO_MANY_STOPS, INVALID_ARGUMENT."""
    list_of(data, "stop_token_ids", MAX_STOP_IDS, ErrorReason.ERROR_REASON_TOO_MANY_STOPS)
    return pack_ints(decode(_IDS, data, "stop_token_ids"))


def packed_biases(data: Bytes) -> tuple[bytes, bytes]:
    """Ids and values of {"id": bias}. Raises INVALID_ARGUMENT."""
    check_entries(data, "logit_bias", MAX_LOGIT_BIASES, ErrorReason.ERROR_REASON_INVALID_ARGUMENT)
    biases = decode(_BIASES, data, "logit_bias")
    try:
        return pack_ints([int(token) for token in biases]), pack_floats(list(biases.values()))
    except (ValueError, OverflowError) as error:
        raise invalid("logit_bias", 'logit_bias has keys that are no token ids: write {"id": bias}') from error


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the router's fields told of the client's. names: the client's by the router's, where they differ."""
    try:
        yield
    except MeshError as error:
        raise renamed(error, names) from None
