"""The rotary embedding (RoPE) that a config.json asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.yarn import YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Stretching of the rotary frequencies. kind "linear": all by `factor`. kind "llama3": wave lengths above
    original_max_len / low_freq_factor by `factor`, those below original_max_len / high_freq_factor not at all,
    between them a blend."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A factor for each pair, of two lists (Ding et al. 2024): `short` up to original_max_len, `long` beyond.

    One list serves all sequences of a worker, chosen by the longest that it serves: cached keys would be of either
    list otherwise. rope_scale: what cos and sin are multiplied by.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_len: int
    rope_scale: float
    is_long: bool = True

    @property
    def factors(self) -> tuple[float, ...]:
        return self.long if self.is_long else self.short


AnyScaling = RopeScaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """`theta` is the base of the wave lengths. rotary_dim: only the first so many numbers of a head are turned; None =
    all. is_interleaved: pairs are (x[2i], x[2i + 1]) in place of (x[i], x[i + rotary_dim / 2])."""

    theta: float
    scaling: AnyScaling | None = None
    rotary_dim: int | None = None
    is_interleaved: bool = False

    @property
    def scale(self) -> float:
        """Multiplier of cos and sin."""
        return self.scaling.rope_scale if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0

    def for_length(self, max_total_len: int) -> RopeConfig:
        """The same for a worker whose sequences are at most so long."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        is_long = max_total_len > self.scaling.original_max_len
        return replace(self, scaling=replace(self.scaling, is_long=is_long))


def read_rope(
    reader: ConfigReader,
    max_total_len: int,
    *,
    head_dim: int,
    default_theta: float = 10000.0,
    default_share: float = 1.0,
    layer_type: str | None = None,
) -> RopeConfig:
    """Older configs have rope_theta and rope_scaling, newer ones both in rope_parameters, by layer type in some.

    default_share: of each head that is turned, where neither partial_rotary_factor nor rotary_pct says it.
    Raises MeshError BAD_CHECKPOINT, and UNSUPPORTED for a scaling that is not default, dynamic, linear, llama3,
    longrope or yarn.
    """
    theta = reader.number("rope_theta", default_theta)
    share = _read_share(reader, default_share)
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    if section is not None and layer_type is not None and section.has(layer_type):
        section = section.section(layer_type)
    scaling: AnyScaling | None = None
    if section is not None:
        theta, share = section.number("rope_theta", theta), _read_share(section, share)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise reader.error("partial_rotary_factor", f"an even number of the {head_dim} numbers of a head")
    if section is not None:
        scaling = _read_scaling(section, reader, max_total_len, rotary_dim)
    return RopeConfig(theta=theta, scaling=scaling, rotary_dim=None if rotary_dim == head_dim else rotary_dim)


def _read_share(reader: ConfigReader, default: float) -> float:
    return reader.number("partial_rotary_factor", reader.number("rotary_pct", default))


def _read_scaling(
    section: ConfigReader, reader: ConfigReader, max_total_len: int, rotary_dim: int
) -> AnyScaling | None:
    # "type" is the oldest spelling of the key.
    key = "rope_type" if section.has("rope_type") or not section.has("type") else "type"
    kind = section.string(key, "default")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=section.number("factor"))
    if kind == "yarn":
        return _read_yarn(section, max_total_len)
    if kind in ("longrope", "su"):
        return _read_longrope(section, reader, max_total_len, rotary_dim)
    if kind == "llama3":
        scaling = RopeScaling(
            kind=kind,
            factor=section.number("factor"),
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
            original_max_len=section.integer("original_max_position_embeddings", max_total_len),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise section.error("high_freq_factor", f"more than low_freq_factor ({scaling.low_freq_factor:g})")
        return scaling
    # "dynamic" stretches the frequencies of sequences beyond max_position_embeddings, which is what we end at.
    if kind not in ("default", "dynamic"):
        raise section.unsupported(key, "default, dynamic, linear, llama3, longrope, yarn")
    return None


def _read_yarn(section: ConfigReader, max_total_len: int) -> YarnScaling:
    original_len = section.integer("original_max_position_embeddings", max_total_len)
    return YarnScaling(
        factor=section.number("factor", max_total_len / original_len),
        original_max_len=original_len,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        mscale=section.number("mscale", 0.0, can_be_zero=True),
        mscale_all_dim=section.number("mscale_all_dim", 0.0, can_be_zero=True),
        attention_factor=section.number("attention_factor") if section.has("attention_factor") else None,
        is_truncated=section.boolean("truncate", True),
    )


def _read_longrope(section: ConfigReader, reader: ConfigReader, max_total_len: int, rotary_dim: int) -> LongRopeScaling:
    # Phi-3 has the original length beside the sizes of the model, and that one counts.
    owner = reader if reader.has("original_max_position_embeddings") else section
    original_len = owner.integer("original_max_position_embeddings", max_total_len, low=2)
    factor = section.number("factor", max_total_len / original_len)
    scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original_len))
    return LongRopeScaling(
        short=section.numbers("short_factor", rotary_dim // 2),
        long=section.numbers("long_factor", rotary_dim // 2),
        original_max_len=original_len,
        rope_scale=section.number("attention_factor", scale),
    )
