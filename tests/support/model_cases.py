"""Implementations that the contracts of `model_contract.py` are held to, on any device: tiny models with random weights
beside transformers' own layers."""

from __future__ import annotations

from pathlib import Path

import torch

from radixmesh.daemons.worker.cuda.model.decoder import DeviceDecoder, LoadedDecoder
from radixmesh.daemons.worker.cuda.model.device_model import Kernels
from radixmesh.daemons.worker.cuda.weights.loading import load_model
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup
from support.fallback_models import FALLBACK_MODELS, fallback_model
from support.family_folders import FAMILIES, family_model
from support.model_contract import NUM_PAGES, PAGE_SIZE, ModelCase, PartCase
from support.model_folders import random_model

# Fused parts, general ones, and FP8 in both.
CASES = (("qwen3", "none"), ("qwen3", "fp8"), ("llama", "fp8-block"), ("gemma3", "none"), ("glm4", "fp8"))
# Those without parts of ours.
FALLBACK_CASES = (("CohereForCausalLM", "none"), ("OlmoeForCausalLM", "none"))
# FP8 has 3 bits behind the leading one, in weights and rows.
_FP8_TOLERANCE, _TOLERANCE = 0.2, 1e-4


def model_case(name: str, quantization: str, folder: Path, device: torch.device, kernels: Kernels) -> ModelCase:
    if name in FALLBACK_MODELS:
        oracle = fallback_model(name, **FALLBACK_MODELS[name])
    else:
        oracle = family_model(name) if name in FAMILIES else random_model(name)
    oracle.save_pretrained(folder)
    placement = Placement(device=device, dtype=torch.float32, group=LocalGroup(), is_out_first=True)
    loaded = load_model(folder, placement, load_format="auto", quantization=quantization)
    with torch.inference_mode():
        pool = KvPool(loaded.kv_layout, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=torch.float32, device=device)
        pool.clear()
        model = loaded.create(kernels, pool, 64)

    def expected(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            hidden: torch.Tensor = oracle.base_model(ids[None]).last_hidden_state[0]
            logits: torch.Tensor = oracle(ids[None]).logits[0]
        return logits, hidden

    tolerance = _TOLERANCE if quantization == "none" else _FP8_TOLERANCE
    return ModelCase(loaded, model, expected, oracle.config.vocab_size, tolerance, device)


def part_case(kind: str, case: ModelCase, name: str) -> PartCase:
    """The attention or the MLP of the first layer of a model case. Expected is what plain maths in float32 gives."""
    loaded, model = case.loaded, case.model
    assert isinstance(loaded, LoadedDecoder) and isinstance(model, DeviceDecoder)
    oracle = family_model(name) if name in FAMILIES else random_model(name)
    layer = oracle.base_model.layers[0]
    part = getattr(model.parts[0], kind)

    @torch.inference_mode()
    def attention(x_TD: torch.Tensor) -> torch.Tensor:
        x = x_TD.cpu()
        positions = torch.arange(len(x))[None]
        options = {"layer_type": oracle.config.layer_types[0]} if name == "gemma3" else {}
        angles = oracle.base_model.rotary_emb(x[None], positions, **options)
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
        y = layer.self_attn(layer.input_layernorm(x[None]), position_embeddings=angles, attention_mask=mask)[0][0]
        if name == "gemma3":
            y = layer.post_attention_layernorm(y)
        elif name == "glm4":
            y = layer.post_self_attn_layernorm(y)
        return (x + y).to(x_TD.device)

    @torch.inference_mode()
    def mlp(x_TD: torch.Tensor) -> torch.Tensor:
        x = x_TD.cpu()
        if name == "gemma3":
            y = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
        elif name == "glm4":
            y = layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(x)))
        else:
            y = layer.mlp(layer.post_attention_layernorm(x))
        return (x + y).to(x_TD.device)

    planes = (part.keys_SKd, part.values_SKd) if kind == "attention" else ()
    return PartCase(
        part,
        attention if kind == "attention" else mlp,
        loaded.hidden_size,
        case.tolerance,
        case.device,
        loaded.attention_shape,
        planes,
    )
