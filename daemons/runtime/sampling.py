"""Sampling options and stop conditions of a request, with every default filled in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_floats, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError

SAMPLER_VERSION = 1
MAX_TOP_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 256
MAX_LOGIT_BIASES = 1024

_MASK64 = (1 << 64) - 1
# Of options that are remembered: messages of each kind, and bytes of one.
_REMEMBERED, _REMEMBERED_BYTES = 512, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Domain form of `radixmesh.common.v1.SamplingParams`; `num_top_logprobs` None = no logprobs."""

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    num_top_logprobs: int | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_start: int = 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        return self.num_top_logprobs is not None or self.prompt_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Domain form of `radixmesh.common.v1.StopParams`; `max_tokens` None = as many as the context holds."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True


def output_seed(seed: int, index: int) -> int:
    """Seed of output `index`: the request's own for 0, else SplitMix64 of both (Steele, Lea, Flood: OOPSLA 2014)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def sampling_from_proto(message: common_pb2.SamplingParams) -> Sampling:
    """Checks and converts. Raises INVALID_ARGUMENT naming the field and its range."""
    # A request is checked several times, and most clients use the same few options: short ones are remembered, without
    # their seed, which hardly comes again (what reaches schedulers and workers has one).
    if message.ByteSize() > _REMEMBERED_BYTES:
        return _sampling_of(message)
    if not message.HasField("seed"):
        return known_sampling(message.SerializeToString(deterministic=True))
    others = common_pb2.SamplingParams()
    others.CopyFrom(message)
    others.ClearField("seed")
    return with_seed(known_sampling(others.SerializeToString(deterministic=True)), message.seed)


def _sampling_of(message: common_pb2.SamplingParams) -> Sampling:
    m = message
    sampling = Sampling(
        repetition_penalty=_or(m, "repetition_penalty", 1.0),
        frequency_penalty=_or(m, "frequency_penalty", 0.0),
        presence_penalty=_or(m, "presence_penalty", 0.0),
        logit_bias=_logit_bias(m),
        temperature=_or(m, "temperature", 1.0),
        top_k=m.top_k,
        top_p=_or(m, "top_p", 1.0),
        min_p=_or(m, "min_p", 0.0),
        seed=m.seed if m.HasField("seed") else None,
        num_top_logprobs=m.num_top_logprobs if m.HasField("num_top_logprobs") else None,
        prompt_logprobs=m.prompt_logprobs,
        prompt_logprobs_start=max(1, m.prompt_logprobs_start),
    )
    _check_range("temperature", sampling.temperature, 0.0, 100.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 1e-6, 1e6)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("top_p", sampling.top_p, 1e-9, 1.0)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("top_k", sampling.top_k, 0, 2**31 - 1)
    _check_range("prompt_logprobs_start", sampling.prompt_logprobs_start, 0, 2**31 - 1)
    _check_range("num_top_logprobs", sampling.num_top_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    return sampling


def with_seed(options: Sampling, seed: int | None) -> Sampling:
    """The options with another seed. Not replace(), which takes as long as reading them from the message."""
    return Sampling(
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=options.logit_bias,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=seed,
        num_top_logprobs=options.num_top_logprobs,
        prompt_logprobs=options.prompt_logprobs,
        prompt_logprobs_start=options.prompt_logprobs_start,
    )


def sampling_to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    """Every field set, but for `seed` and `num_top_logprobs` where they are None."""
    message = common_pb2.SamplingParams(
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        num_top_logprobs=sampling.num_top_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        # 1 is written as 0, as routers of an older contract do.
        prompt_logprobs_start=sampling.prompt_logprobs_start if sampling.prompt_logprobs_start > 1 else 0,
    )
    if sampling.logit_bias:
        message.logit_bias_ids = pack_ints([token for token, _ in sampling.logit_bias])
        message.logit_bias_values = pack_floats([bias for _, bias in sampling.logit_bias])
    return message


def stop_from_proto(message: common_pb2.StopParams) -> Stop:
    """Checks and converts. Raises INVALID_ARGUMENT or TOO_MANY_STOPS."""
    if message.ByteSize() > _REMEMBERED_BYTES:
        return _stop_of(message)
    return known_stop(message.SerializeToString(deterministic=True))


def _stop_of(message: common_pb2.StopParams) -> Stop:
    m = message
    if m.HasField("max_tokens"):
        _check_range("max_tokens", m.max_tokens, 1, 2**31 - 1)
    _check_range("min_tokens", m.min_tokens, 0, m.max_tokens if m.HasField("max_tokens") else 2**31 - 1)
    check_stops(m.stop)
    stop_ids = unpack_ints(m.stop_ids, "stop_ids")
    if len(stop_ids) > MAX_STOP_IDS:
        raise _too_many("stop_ids", len(stop_ids), MAX_STOP_IDS)
    return Stop(
        max_tokens=m.max_tokens if m.HasField("max_tokens") else None,
        min_tokens=m.min_tokens,
        stop=tuple(m.stop),
        stop_ids=tuple(int(token) for token in stop_ids),
        ignore_eos=m.ignore_eos,
        include_stop=m.include_stop,
        skip_special_tokens=m.skip_special_tokens if m.HasField("skip_special_tokens") else True,
    )


def stop_to_proto(stop: Stop) -> common_pb2.StopParams:
    """Every field set, but for `max_tokens` where it is None."""
    return common_pb2.StopParams(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop=stop.stop,
        stop_ids=pack_ints(stop.stop_ids),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop,
        skip_special_tokens=stop.skip_special_tokens,
    )


def check_stops(stops: Collection[str]) -> None:
    """Raises TOO_MANY_STOPS or INVALID_ARGUMENT unless `stops` (strings) keep the contract's limits."""
    if len(stops) > MAX_STOPS:
        raise _too_many("stop", len(stops), MAX_STOPS)
    for string in stops:
        size = len(string.encode())
        if size == 0:
            raise _invalid("stop", "a stop string is empty: leave it out")
        if size > MAX_STOP_BYTES:
            raise _too_many("stop (bytes of one string)", size, MAX_STOP_BYTES)


@lru_cache(_REMEMBERED)
def known_sampling(data: bytes) -> Sampling:
    return _sampling_of(common_pb2.SamplingParams.FromString(data))


@lru_cache(_REMEMBERED)
def known_stop(data: bytes) -> Stop:
    return _stop_of(common_pb2.StopParams.FromString(data))


def _or(message: common_pb2.SamplingParams, field: str, default: float) -> float:
    return float(getattr(message, field)) if message.HasField(field) else default


def _logit_bias(message: common_pb2.SamplingParams) -> tuple[tuple[int, float], ...]:
    if not message.logit_bias_ids and not message.logit_bias_values:
        return ()
    ids = unpack_ints(message.logit_bias_ids, "logit_bias_ids")
    values = unpack_floats(message.logit_bias_values, "logit_bias_values")
    if len(ids) != len(values):
        raise _invalid("logit_bias", f"{len(ids)} ids but {len(values)} values: give one value per id")
    _check_range("logit_bias (entries)", len(ids), 0, MAX_LOGIT_BIASES)
    for value in values.tolist():
        _check_range("logit_bias", value, -100.0, 100.0)
    if len(set(ids.tolist())) != len(ids):
        raise _invalid("logit_bias", "an id occurs twice: give each id once")
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _check_range(field: str, value: float, low: float, high: float) -> None:
    # NaN is within nothing.
    if not low <= value <= high:
        raise MeshError(
            common_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"{field} is {_in_full(value)}: choose a value in [{_in_full(low)}, {_in_full(high)}]",
            {"field": field, "min": _in_full(low), "max": _in_full(high)},
        )


def _in_full(value: float) -> str:
    """2147483647, and not 2.14748e+09: a bound is to be read and sent back."""
    return str(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) < 1e16) else repr(value)


def _invalid(field: str, message: str) -> MeshError:
    return MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def _too_many(field: str, count: int, most: int) -> MeshError:
    return MeshError(
        common_pb2.ERROR_REASON_TOO_MANY_STOPS,
        f"{field}: {count} given, at most {most} are kept",
        {"field": field, "max": str(most)},
    )
