"""The sizes and switches of a decoder, and the reading of what all families call the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.activations import ACTIVATIONS
from radixmesh.daemons.worker.models.decoder.names import CheckpointNames
from radixmesh.daemons.worker.models.rope_config import RopeConfig, read_rope


class NormKind(Enum):
    """RMS: x / rms(x) x w. RMS_PLUS_ONE: x / rms(x) x (1 + w), in float32 up to the end. LAYER: LayerNorm with a
    bias."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class HeadNorm(Enum):
    """Norms of queries and keys before RoPE: EACH head by itself, or ALL heads of a token as one vector. AFTER_ROPE:
    each head after RoPE, without a weight, in the layers that have RoPE."""

    NONE = "none"
    EACH = "each"
    ALL = "all"
    AFTER_ROPE = "after_rope"


class RouterKind(Enum):
    """Weights of a row's picks. SOFTMAX: their probabilities among all experts. PICKED_SOFTMAX: those among the picks.
    SIGMOID: the sigmoid of each one's score, which multiplies what the expert reads, not what it gives."""

    SOFTMAX = "softmax"
    PICKED_SOFTMAX = "picked_softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Routed experts in place of the MLP of some layers; a row picks the `num_picks` most probable ones.

    is_normalised: the weights of a row's picks are scaled to a sum of 1. has_bias: router and experts have biases.
    swiglu_limit, swiglu_alpha: those of `clamped_gated`, in place of the decoder's activation. shared_mlp_size: of an
    MLP that every row goes through beside its experts, multiplied by the sigmoid of a projection if has_shared_gate;
    0 = none.
    """

    num_experts: int
    num_picks: int
    mlp_size: int
    is_normalised: bool
    layers: frozenset[int]
    router: RouterKind = RouterKind.SOFTMAX
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    shared_mlp_size: int = 0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTemperature:
    """Queries of layers without RoPE are multiplied by 1 + scale x log(1 + floor((position + 1) / floor_scale))."""

    scale: float
    floor_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Everything that the decoders of different families differ in, as data; the defaults are Llama's.

    rope: of all layers, unless `layer_ropes` says it by layer; None = no RoPE. has_position_embedding: a learned
    vector for each position below max_total_len is added to the embedding. windows: by layer, how many tokens one
    sees, itself among them; None = all before it. chunks: by layer, sequences are cut at multiples of that many tokens,
    and a token sees those of its own chunk; None = in no layer.

    Norms: has_input_norms before attention and MLP, has_output_norms behind them, before the sum with the residual;
    is_parallel: attention and MLP both read the input of the layer, each through its own norm.

    Scales: attention_scale multiplies scores (None: 1 / sqrt(head_dim)); embedding_scale the embedding;
    residual_scale what attention and MLP add; logits are divided by logits_divisor. Soft caps limit a number to
    +-cap, by cap x tanh(x / cap): scores before the mask and final logits.

    has_sinks: a learned score per head joins each softmax and has no value. activation: a name of `activations.py`, of
    MLPs, shared MLPs and routed experts. is_gated: act(gate) x up in place of act(up). is_tied: the output projection
    is the embedding. is_scoring: there is no output projection but one that gives a score. names: of the tensors in a
    checkpoint.
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
    rope: RopeConfig | None
    windows: tuple[int | None, ...]
    is_tied: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    is_scoring: bool = False
    layer_ropes: tuple[RopeConfig | None, ...] | None = None
    has_position_embedding: bool = False
    norm_kind: NormKind = NormKind.RMS
    head_norm: HeadNorm = HeadNorm.NONE
    has_input_norms: bool = True
    has_output_norms: bool = False
    is_parallel: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    has_sinks: bool = False
    chunks: tuple[int | None, ...] | None = None
    query_temperature: QueryTemperature | None = None
    activation: str = "silu"
    is_gated: bool = True
    names: CheckpointNames = CheckpointNames()

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Multiplier of scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def for_length(self, max_total_len: int) -> DecoderConfig:
        """The same for a worker that serves sequences of at most that length."""
        length = min(max_total_len, self.max_total_len)
        ropes = None if self.layer_ropes is None else tuple(r and r.for_length(length) for r in self.layer_ropes)
        return replace(self, rope=self.rope and self.rope.for_length(length), layer_ropes=ropes)

    def rope_of(self, layer: int) -> RopeConfig | None:
        return self.rope if self.layer_ropes is None else self.layer_ropes[layer]

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDefaults:
    """A family's defaults for a config.json that says nothing; None: as many KV heads as heads, hidden / heads.

    activation_key: the config's name of the activation. rotary_share: of each head that RoPE turns.
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rotary_share: float = 1.0
    is_tied: bool = False
    activation: str = "silu"
    activation_key: str = "hidden_act"


def read_decoder_config(reader: ConfigReader, defaults: DecoderDefaults | None = None) -> DecoderConfig:
    """A decoder with all switches off, no windows and no experts. Raises MeshError BAD_CHECKPOINT or UNSUPPORTED."""
    defaults = defaults or DecoderDefaults()
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
        rope=read_rope(
            reader,
            max_total_len,
            head_dim=head_dim,
            default_theta=defaults.rope_theta,
            default_share=defaults.rotary_share,
        ),
        windows=(None,) * num_layers,
        is_tied=reader.boolean("tie_word_embeddings", defaults.is_tied) and not is_scoring,
        is_scoring=is_scoring,
        activation=read_activation(reader, defaults.activation_key, defaults.activation),
    )


def read_activation(reader: ConfigReader, key: str, default: str) -> str:
    """Raises MeshError UNSUPPORTED for one that `activations.py` does not have."""
    name = reader.string(key, default)
    if name not in ACTIVATIONS:
        raise reader.unsupported(key, ", ".join(sorted(ACTIVATIONS)))
    return name


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
