"""Tiny DeepSeek models with random weights, written by transformers: the oracle of the CPU worker's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

TINY_DEEPSEEK = Path(__file__).parents[2] / "compose" / "models" / "tiny-deepseek"

_BASE: Mapping[str, object] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_V2: Mapping[str, object] = {**_BASE, "topk_method": "greedy", "n_shared_experts": 2}
_V3: Mapping[str, object] = {**_BASE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}

# Each differs from the first of its version in what its name says.
V2_SHAPES: Mapping[str, Mapping[str, object]] = {
    "v2_greedy": _V2,
    "v2_plain_query": {**_V2, "q_lora_rank": None, "first_k_dense_replace": 0, "routed_scaling_factor": 1.7},
    "v2_groups_yarn": {
        **_V2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 3.0,
        "rope_parameters": _YARN,
    },
}
V3_SHAPES: Mapping[str, Mapping[str, object]] = {
    "v3_groups": _V3,
    "v3_yarn_plain_query": {**_V3, "q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 1.0}},
    "v3_biases_tied": {**_V3, "attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "v3_one_group_halves_not_normed": {
        **_V3,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "rope_parameters": {**_YARN, "mscale_all_dim": 0},
    },
    "v3_odd_sizes": {
        **_V3,
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 13,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "moe_intermediate_size": 11,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
    },
}
SHAPES: Mapping[str, Mapping[str, object]] = {**V2_SHAPES, **V3_SHAPES}


def random_deepseek(shape: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model whose weights are large enough for every part of it to matter in the logits. changes: of its config."""
    torch.manual_seed(seed)
    if shape in V2_SHAPES:
        model: PreTrainedModel = DeepseekV2ForCausalLM(DeepseekV2Config(**{**V2_SHAPES[shape], **changes}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**V3_SHAPES[shape], **changes}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("e_score_correction_bias"):
                # Wide enough to change what is chosen.
                tensor.normal_(0, 0.2)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.3)
            elif "embed" in name:
                tensor.normal_(0, 1.0)
            elif "mlp.gate." in name:
                tensor.normal_(0, 2 * tensor.shape[1] ** -0.5)
            else:
                tensor.normal_(0, 1.2 * tensor.shape[-1] ** -0.5)
    # The other implementations want sizes that are multiples of 16 bytes.
    model.set_experts_implementation("eager")
    return model.eval()


def save_deepseek(model: PreTrainedModel, folder: Path, *, is_fused: bool = False) -> Path:
    """`is_fused`: all experts of a layer in two tensors, else three tensors an expert as in published checkpoints."""
    model.save_pretrained(folder, save_original_format=not is_fused)
    return folder
