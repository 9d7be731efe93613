"""The sizes of a DeepSeek model, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.models.rope_config import RopeConfig, read_rope
from radixmesh.daemons.worker.models.yarn import YarnScaling


class TopkMethod(Enum):
    """Scoring of a router's experts. The values are those of config.json."""

    GREEDY = "greedy"
    """Softmax scores; the highest."""
    GROUP_LIMITED = "group_limited_greedy"
    """Softmax scores; the highest within the groups whose best expert is highest."""
    BIASED = "noaux_tc"
    """Sigmoid scores, a learned bias added for choosing only; the highest within the groups whose two best are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """`num_groups` divides `num_experts`; both group counts are 1 where the method knows no groups."""

    method: TopkMethod
    num_experts: int
    num_picks: int
    num_groups: int
    num_picked_groups: int
    is_normed: bool
    """The weights of a row's picks are divided by their sum."""
    weight_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """q_lora_rank None: queries are projected at once. `router` None: all layers are dense."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    """Of each query head, the part without RoPE."""
    rope_dim: int
    value_dim: int
    has_attention_bias: bool
    max_total_len: int
    norm_eps: float
    rope: RopeConfig
    is_rope_interleaved: bool
    router: RouterConfig | None
    expert_mlp_size: int
    shared_mlp_size: int
    """Of all shared experts together; 0 = none."""
    num_dense_layers: int
    moe_layer_freq: int
    num_mtp_layers: int
    """Layers after the last for predicting further tokens, where the checkpoint has them."""
    is_tied: bool

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def first_query_size(self) -> int:
        """Of the query's first or only projection."""
        return self.num_heads * self.query_dim if self.q_lora_rank is None else self.q_lora_rank

    @property
    def latent_dim(self) -> int:
        """Numbers that are cached per token and layer."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def softmax_scale(self) -> float:
        scaling = self.rope.scaling
        factor = scaling.softmax_factor if isinstance(scaling, YarnScaling) else 1.0
        root: float = self.query_dim**0.5
        return factor / root

    def is_moe(self, layer: int) -> bool:
        return self.router is not None and layer >= self.num_dense_layers and layer % self.moe_layer_freq == 0


def read_deepseek_config(reader: ConfigReader) -> DeepseekConfig:
    """Raises MeshError BAD_CHECKPOINT or UNSUPPORTED naming the key; defaults are those of the published configs."""
    _refuse_unsupported(reader)
    is_v3 = reader.strings("architectures")[0] == "DeepseekV3ForCausalLM"
    num_heads = reader.integer("num_attention_heads")
    if reader.integer("num_key_value_heads", num_heads) != num_heads:
        raise reader.error("num_key_value_heads", f"num_attention_heads ({num_heads}): latent attention has no groups")
    rope_dim = reader.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise reader.error("qk_rope_head_dim", "an even number: rotary embedding turns pairs")
    max_total_len = reader.integer("max_position_embeddings")
    router = _read_router(reader, is_v3) if reader.has("n_routed_experts") else None
    expert_mlp_size = reader.integer("moe_intermediate_size") if router is not None else 0
    return DeepseekConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        mlp_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        q_lora_rank=reader.integer("q_lora_rank") if reader.has("q_lora_rank") else None,
        kv_lora_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=reader.integer("v_head_dim"),
        has_attention_bias=reader.boolean("attention_bias", False),
        max_total_len=max_total_len,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=read_rope(reader, max_total_len, head_dim=rope_dim),
        is_rope_interleaved=reader.boolean("rope_interleave", True),
        router=router,
        expert_mlp_size=expert_mlp_size,
        shared_mlp_size=expert_mlp_size * reader.integer("n_shared_experts", 0, low=0),
        num_dense_layers=reader.integer("first_k_dense_replace", 0, low=0),
        moe_layer_freq=reader.integer("moe_layer_freq", 1),
        num_mtp_layers=reader.integer("num_nextn_predict_layers", 0, low=0),
        is_tied=reader.boolean("tie_word_embeddings", False),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    if reader.string("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", "silu")
    if reader.boolean("mlp_bias", False):
        raise reader.unsupported("mlp_bias", "false")


def _read_router(reader: ConfigReader, is_v3: bool) -> RouterConfig:
    methods = (TopkMethod.BIASED,) if is_v3 else (TopkMethod.GREEDY, TopkMethod.GROUP_LIMITED)
    name = reader.string("topk_method", methods[0].value)
    if name not in {method.value for method in methods}:
        raise reader.unsupported("topk_method", ", ".join(method.value for method in methods))
    scoring = "sigmoid" if is_v3 else "softmax"
    if reader.string("scoring_func", scoring) != scoring:
        raise reader.unsupported("scoring_func", scoring)
    is_normed = reader.boolean("norm_topk_prob", is_v3)
    if is_normed and not is_v3:
        # DeepSeek's own code then drops routed_scaling_factor, transformers does not normalise; no checkpoint has it.
        raise reader.unsupported("norm_topk_prob", "false")
    method, num_experts = TopkMethod(name), reader.integer("n_routed_experts")
    num_groups = num_picked_groups = 1
    if method is not TopkMethod.GREEDY:
        num_groups = reader.integer("n_group", 1)
        num_picked_groups = reader.integer("topk_group", 1)
    # A group of the biased method is judged by its two best.
    smallest_group = 2 if method is TopkMethod.BIASED else 1
    if num_experts % num_groups or num_experts // num_groups < smallest_group:
        raise reader.error("n_group", f"a divisor of n_routed_experts ({num_experts}), groups of >= {smallest_group}")
    if num_picked_groups > num_groups:
        raise reader.error("topk_group", f"at most n_group ({num_groups})")
    num_picks, num_open = reader.integer("num_experts_per_tok"), num_picked_groups * num_experts // num_groups
    if num_picks > num_open:
        raise reader.error("num_experts_per_tok", f"at most the {num_open} experts of topk_group groups")
    return RouterConfig(
        method=method,
        num_experts=num_experts,
        num_picks=num_picks,
        num_groups=num_groups,
        num_picked_groups=num_picked_groups,
        is_normed=is_normed,
        weight_scale=reader.number("routed_scaling_factor", 1.0),
    )
