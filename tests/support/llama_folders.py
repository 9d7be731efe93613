"""Tiny Llama models with random weights, written by transformers: the oracle of the CPU worker's tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

TINY_LLAMA = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"

_BASE: Mapping[str, object] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Each differs from the base in what its name says.
SHAPES: Mapping[str, Mapping[str, object]] = {
    "llama1": {},
    "llama2_grouped": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "llama3_rope": {"num_key_value_heads": 1, "rope_parameters": _LLAMA3_ROPE},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "wide_heads_tied": {"head_dim": 20, "tie_word_embeddings": True, "num_key_value_heads": 2},
    "odd_sizes": {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 37},
}


def random_llama(shape: str, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**_BASE, **SHAPES[shape]})).eval()
    randomise(model)
    return model


def randomise(model: PreTrainedModel) -> None:
    """Weights by which every part of the model matters in the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "embed" in name:
                parameter.normal_(0, 1.0)
            else:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)


def save_llama(model: LlamaForCausalLM, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
