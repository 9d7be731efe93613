"""Tiny models of architectures that have no family here, by transformers, with random weights by which every part
matters."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# LayerNorm and a scale of logits; experts; parallel blocks; windows; a family that exists, by force.
FALLBACK_MODELS: dict[str, dict[str, object]] = {
    "CohereForCausalLM": {"logit_scale": 0.4},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Starcoder2ForCausalLM": {"sliding_window": 13},
    "LlamaForCausalLM": {},
}


def fallback_model(architecture: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model_class = getattr(transformers, architecture)
    model: PreTrainedModel = model_class(model_class.config_class(**{**_SIZES, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
    return model
