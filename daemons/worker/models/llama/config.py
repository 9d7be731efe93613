"""The sizes of a Llama model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader


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
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_total_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    has_attention_bias: bool
    has_mlp_bias: bool
    is_tied: bool
    """The output projection is the embedding."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_llama_config(reader: ConfigReader) -> LlamaConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED naming the key; defaults are those of the format."""
    if reader.has("quantization_config"):
        raise reader.unsupported("quantization_config", "none: use the unquantised weights")
    if reader.string("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "silu")
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if not reader.has("head_dim") and hidden_size % num_heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads}), or head_dim set")
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", "an even number: rotary embedding turns pairs")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    max_total_len = reader.integer("max_position_embeddings")
    theta, scaling = _read_rope(reader, max_total_len)
    return LlamaConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        mlp_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_total_len=max_total_len,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        has_attention_bias=reader.boolean("attention_bias", False),
        has_mlp_bias=reader.boolean("mlp_bias", False),
        is_tied=reader.boolean("tie_word_embeddings", False),
    )


def _read_rope(reader: ConfigReader, max_total_len: int) -> tuple[float, RopeScaling | None]:
    """Older configs have rope_theta and rope_scaling, newer ones both in rope_parameters."""
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    if section is None:
        return reader.number("rope_theta", 10000.0), None
    theta = section.number("rope_theta", reader.number("rope_theta", 10000.0))
    # "type" is the oldest spelling of the key.
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.string(key)
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=section.number("factor"))
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
        return theta, scaling
    # "dynamic" rotates a token by the length that its sequence has at that moment, so cached keys would depend on how
    # the prompt was cut into chunks.
    raise section.unsupported(key, "default, linear, llama3")
