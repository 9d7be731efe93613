"""Tiny models with random weights of the families that differ from Llama by their config, written by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

_BASE: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.0, 5.0],
}


class Family(NamedTuple):
    """architecture: a class of transformers. settings: of its config, beside the base. folder: of our code."""

    architecture: str
    folder: str
    settings: Mapping[str, object]


FAMILIES: Mapping[str, Family] = {
    "llama_dynamic_rope": Family(
        "LlamaForCausalLM",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "hidden_act": "gelu"},
    ),
    "gemma": Family("GemmaForCausalLM", "gemma", {"head_dim": 12}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma",
        {
            "head_dim": 12,
            "sliding_window": 19,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        },
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", {"sliding_window": 23, "tie_word_embeddings": False}),
    "phi4_longrope": Family(
        "Phi3ForCausalLM",
        "phi3",
        {
            "rope_parameters": {**_LONGROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", {}),
    "granite": Family(
        "GraniteForCausalLM",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", {"no_rope_layers": [1, 0, 1]}),
    "glm": Family("GlmForCausalLM", "glm4", {"head_dim": 16}),
    "glm4": Family("Glm4ForCausalLM", "glm4", {"head_dim": 16}),
    "gpt2": Family(
        "GPT2LMHeadModel", "gpt2", {"n_positions": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 50}
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", "gpt_neox", {"num_key_value_heads": 4, "rope_parameters": {"partial_rotary_factor": 0.5}}
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 28,
            "use_sliding_window": True,
            "sliding_window": 20,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 18,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "llama4",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 22,
            "no_rope_layers": [1, 0, 1, 1],
            "floor_scale": 16,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neox_serial": Family(
        "GPTNeoXForCausalLM", "gpt_neox", {"num_key_value_heads": 4, "use_parallel_residual": False}
    ),
}


def family_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """changes: to the config."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    model_class = getattr(transformers, family.architecture)
    config = model_class.config_class(**{**_BASE, **family.settings, **changes})
    if "attn_logit_softcapping" in family.settings:
        # The default attention of transformers 5.17 takes no soft cap, and says nothing of it.
        config._attn_implementation = "eager"
    model: PreTrainedModel = model_class(config).eval()
    _randomise(model)
    for module in model.modules():
        if name == "gpt_oss" and hasattr(module, "limit"):
            # Experts of transformers 5.17 have the one of the published models, whatever the config says.
            module.limit = model.config.swiglu_limit
    return model


def family_folder(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def _randomise(model: PreTrainedModel) -> None:
    """Weights by which every part of the model matters in the logits."""
    # Gemma's norms multiply by 1 + weight.
    centre = 0.0 if type(model).__name__.startswith("Gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            if is_norm:
                parameter.uniform_(centre - 0.5, centre + 0.5)
            elif parameter.dim() == 1 or "bias" in name:
                parameter.normal_(0, 0.3)
            elif parameter is model.get_input_embeddings().weight or "wpe" in name:
                parameter.normal_(0, 0.8)
            else:
                parameter.normal_(0, 1.2 * min(parameter.shape[-2:]) ** -0.5)
