"""Options that all generating endpoints share: OpenAI's names, and extensions under the names other engines use."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.http.body import Body
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.request_ids import HTTP_REQUEST_ID_PATTERN
from radixmesh.router.v1 import router_pb2

# Bounds are those of the wire; what a value may be is the router's to say, the same over HTTP and gRPC.
Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
TokenId = Int32
# It comes back as a header, and names the request in logs.
RequestId = Annotated[str, Field(pattern=HTTP_REQUEST_ID_PATTERN)]
# OpenAI's seeds are signed; ours count modulo 2^64.
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]

_MAX_U64 = (1 << 64) - 1


class StreamOptions(Body):
    """include_usage: one more event at the end, with usage and no choices."""

    include_usage: bool | None = None


class GenerationOptions(Body):
    """Every field may be null or absent: then the default of router.proto holds."""

    model: str | None = None
    n: Uint32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    # Extensions.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    tenant: str | None = None
    request_id: RequestId | None = None
    deadline_ms: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_outputs(self) -> int:
        return 1 if self.n is None else self.n

    def to_request(
        self, *, max_tokens: int | None, num_top_logprobs: int | None, prompt_logprobs: bool = False
    ) -> router_pb2.GenerateRequest:
        """The request without its input and id. Raises INVALID_ARGUMENT for a logit_bias that names no ids."""
        sampling = sampling_of(self)
        if num_top_logprobs is not None:
            sampling.num_top_logprobs = num_top_logprobs
        if prompt_logprobs:
            sampling.prompt_logprobs = True
        stop = stop_of(self)
        if max_tokens is not None:
            stop.max_tokens = max_tokens
        return router_pb2.GenerateRequest(
            model=self.model or "",
            n=self.n,
            sampling=sampling,
            stop=stop,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            deadline_ms=self.deadline_ms,
            tenant=self.tenant or "",
        )


def sampling_of(options: GenerationOptions) -> common_pb2.SamplingParams:
    """How tokens are drawn; what is absent stays unset. top_k -1 is 0: keep all."""
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
        sampling.seed = o.seed & _MAX_U64
    if o.top_k is not None:
        if o.top_k < -1:
            raise invalid("top_k", f"top_k is {o.top_k}: choose 1 or more, or -1 for all")
        sampling.top_k = max(0, o.top_k)
    if o.logit_bias:
        sampling.logit_bias_ids, sampling.logit_bias_values = packed_biases(o.logit_bias)
    return sampling


def stop_of(options: GenerationOptions) -> common_pb2.StopParams:
    """What ends an output, but for max_tokens."""
    o = options
    stop = common_pb2.StopParams(
        min_tokens=o.min_tokens,
        stop=[o.stop] if isinstance(o.stop, str) else o.stop,
        stop_ids=pack_ints(o.stop_token_ids or ()),
    )
    if o.ignore_eos is not None:
        stop.ignore_eos = o.ignore_eos
    if o.include_stop_str_in_output is not None:
        stop.include_stop = o.include_stop_str_in_output
    if o.skip_special_tokens is not None:
        stop.skip_special_tokens = o.skip_special_tokens
    return stop


def packed_biases(biases: dict[str, float]) -> tuple[bytes, bytes]:
    """Ids and values of {"id": bias}. Raises INVALID_ARGUMENT."""
    try:
        ids = [int(token) for token in biases]
        return pack_ints(ids), pack_floats(list(biases.values()))
    except (ValueError, OverflowError) as error:
        raise invalid("logit_bias", 'logit_bias has keys that are no token ids: write {"id": bias}') from error


def invalid(field: str, message: str) -> MeshError:
    """An option's value cannot be. field: as the client wrote it."""
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def unsupported(feature: str, message: str) -> MeshError:
    """An option that is known and not offered."""
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": feature, "field": feature})
