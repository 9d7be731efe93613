"""The sizes and switches of a decoder, and the reading of what all families call the same."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.rope_config import RopeConfig, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Routed experts in place of the MLP of some layers; a row picks the `num_picks` most probable ones.

    is_normalised: the weights of a row's picks are scaled to a sum of 1.
    """

    num_experts: int
    num_picks: int
    mlp_size: int
    is_normalised: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """windows: by layer, how many tokens one sees, itself among them; None = all before it.

    has_head_norm: queries and keys are normed per head before RoPE. is_tied: the output projection is the
    embedding. is_scoring: there is no output projection but one that gives a score.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_total_len: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    is_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norm: bool = False
    experts: ExpertsConfig | None = None
    is_scoring: bool = False

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDefaults:
    """A family's defaults for a config.json that says nothing; None: as many KV heads as heads, hidden / heads."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0


def read_decoder_config(reader: ConfigReader, defaults: DecoderDefaults | None = None) -> DecoderConfig:
    """A decoder with all switches off, no windows and no experts. Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    defaults = defaults or DecoderDefaults()
    if reader.string("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "silu")
    max_total_len, num_layers = reader.integer("max_position_embeddings"), reader.integer("num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _read_heads(reader, defaults)
    is_scoring = reader.strings("architectures")[0].endswith("ForSequenceClassification")
    if is_scoring and len(reader.keys("id2label")) != 1:
        raise reader.unsupported("id2label", "one label, whose logit is the score")
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_total_len=max_total_len,
        norm_eps=reader.number("rms_norm_eps", defaults.norm_eps),
        rope=read_rope(reader, max_total_len, default_theta=defaults.rope_theta),
        windows=(None,) * num_layers,
        is_tied=reader.boolean("tie_word_embeddings", False) and not is_scoring,
        is_scoring=is_scoring,
    )


def read_experts(
    reader: ConfigReader, *, num_key: str, mlp_size: int, is_normalised: bool, layers: frozenset[int]
) -> ExpertsConfig:
    """`num_key`: what the config calls the number of experts."""
    num_experts, num_picks = reader.integer(num_key), reader.integer("num_experts_per_tok")
    if num_picks > num_experts:
        raise reader.error("num_experts_per_tok", f"at most {num_key} ({num_experts})")
    return ExpertsConfig(
        num_experts=num_experts, num_picks=num_picks, mlp_size=mlp_size, is_normalised=is_normalised, layers=layers
    )


def _read_heads(reader: ConfigReader, defaults: DecoderDefaults) -> tuple[int, int, int]:
    """Heads, KV heads, head_dim."""
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if defaults.head_dim is None and not reader.has("head_dim") and hidden_size % num_heads:
        raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads}), or head_dim set")
    head_dim = reader.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", "an even number: rotary embedding turns pairs")
    num_kv_heads = reader.integer("num_key_value_heads", defaults.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_heads, num_kv_heads, head_dim
