"""The rotary embedding (RoPE) that a config.json asks for."""

from __future__ import annotations

from dataclasses import dataclass

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
class RopeConfig:
    """`theta` is the base of the wave lengths."""

    theta: float
    scaling: RopeScaling | YarnScaling | None = None


def read_rope(reader: ConfigReader, max_total_len: int, *, default_theta: float = 10000.0) -> RopeConfig:
    """Older configs have rope_theta and rope_scaling, newer ones both in rope_parameters.

    Raises MeshError BAD_CHECKPOINT, and UNSUPPORTED for a scaling that is not default, linear, llama3 or yarn.
    """
    theta = reader.number("rope_theta", default_theta)
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    if section is None:
        return RopeConfig(theta=theta)
    return RopeConfig(theta=section.number("rope_theta", theta), scaling=_read_scaling(section, max_total_len))


def _read_scaling(section: ConfigReader, max_total_len: int) -> RopeScaling | YarnScaling | None:
    # "type" is the oldest spelling of the key.
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.string(key)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=section.number("factor"))
    if kind == "yarn":
        return _read_yarn(section, max_total_len)
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
    # "dynamic" takes a token's angles from the length that its sequence has at that moment, so keys would depend on how
    # the prompt was cut into chunks.
    raise section.unsupported(key, "default, linear, llama3, yarn")


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
