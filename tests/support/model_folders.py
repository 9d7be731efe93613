"""Tiny models of all families with random weights, written by transformers: the oracle of the CPU worker's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from .llama_folders import randomise

_BASE: Mapping[str, object] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Shape(NamedTuple):
    """A model class, its config class, and what of the config differs from the base."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    settings: Mapping[str, object]


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 20}

SHAPES: dict[str, Shape] = {
    "llama": Shape(LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": Shape(Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_late_windows": Shape(
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    ),
    "qwen2_yarn": Shape(Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": _YARN}),
    "qwen3": Shape(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3_late_windows": Shape(
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 1,
        },
    ),
    "mistral": Shape(MistralForCausalLM, MistralConfig, {"sliding_window": 25, "head_dim": 16}),
    "mistral_without_window": Shape(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mixtral": Shape(MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_window": Shape(
        MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 33}
    ),
    "qwen3_moe": Shape(Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_EXPERTS, "num_experts": 7, "norm_topk_prob": True}),
    "qwen3_moe_some_layers": Shape(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **_EXPERTS,
            "num_experts": 6,
            "num_hidden_layers": 5,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
}


_SCORING = {"num_labels": 1}
SCORING_SHAPES: dict[str, Shape] = {
    "llama_scoring": Shape(LlamaForSequenceClassification, LlamaConfig, _SCORING),
    "qwen2_scoring": Shape(Qwen2ForSequenceClassification, Qwen2Config, {**_SCORING, "tie_word_embeddings": True}),
    "mixtral_scoring": Shape(MixtralForSequenceClassification, MixtralConfig, {**_SCORING, "num_local_experts": 5}),
}


def random_model(shape: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """changes: to the shape's config."""
    torch.manual_seed(seed)
    model_class, config_class, settings = (SHAPES | SCORING_SHAPES)[shape]
    model = model_class(config_class(**{**_BASE, **settings, **changes})).eval()
    randomise(model)
    return model


def save_model(model: PreTrainedModel, folder: Path, *, is_fused: bool = False) -> Path:
    """is_fused: all experts of a layer in two tensors, as transformers has them in memory."""
    model.save_pretrained(folder, save_original_format=not is_fused)
    return folder
