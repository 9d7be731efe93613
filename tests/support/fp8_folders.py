"""Model folders whose weights are FP8, in the forms that are in use, and what transformers makes of those weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

FP8 = torch.float8_e4m3fn
_MAX = 448.0
_BLOCK = 128
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PROJECTIONS += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


class Form(StrEnum):
    """As the three kinds of checkpoints have it; channels also in the shape [N] that some have."""

    BLOCK = "block"
    TENSOR = "tensor"
    STATIC_TENSOR = "static tensor"
    COMPRESSED_TENSOR = "compressed tensor"
    COMPRESSED_CHANNEL = "compressed channel"


def quantization_config(form: Form) -> dict[str, object]:
    """Entry of config.json for such weights."""
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
    match form:
        case Form.BLOCK:
            return {**fp8, "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
        case Form.TENSOR | Form.STATIC_TENSOR:
            return {**fp8, "activation_scheme": "static" if form is Form.STATIC_TENSOR else "dynamic"}
    strategy = form.value.split()[1]
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "weights": {**eight, "strategy": strategy, "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
        "output_activations": None,
        "targets": ["Linear"],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*embed_tokens"],
        "kv_cache_scheme": None,
    }


def write_fp8(source: Path, folder: Path, form: Form, *, kept: tuple[str, ...] = ()) -> Path:
    """A copy of a model folder with its projections quantised, but for modules whose names end with one of `kept`."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _keeping(quantization_config(form), kept)
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name == module or not module.endswith(_PROJECTIONS) or module.endswith(kept or ("/",)):
            tensors[name] = tensor
            continue
        stored, scales = _quantised(tensor.float(), form)
        tensors[name] = stored
        tensors[f"{name}_scale_inv" if form is Form.BLOCK else f"{name}_scale"] = scales
        if form is Form.STATIC_TENSOR:
            tensors[f"{module}.input_scale"] = torch.tensor(0.02)
    save_file(tensors, folder / "model.safetensors")
    return folder


def dequantised_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model, FP8 ones multiplied by their scales, as float32."""
    stored = load_file(folder / "model.safetensors")
    result: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        scales = stored.get(f"{name}_scale", stored.get(f"{name}_scale_inv"))
        result[name] = tensor.float() if scales is None else tensor.float() * _expanded(scales.float(), tensor.shape)
    return result


def dequantised_model(folder: Path) -> PreTrainedModel:
    """transformers' model of these tensors in float32."""
    plain = folder.with_name(f"{folder.name}-dequantised")
    if not plain.exists():
        plain.mkdir()
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (plain / "config.json").write_text(json.dumps(config))
        save_file(dequantised_tensors(folder), plain / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def edit(folder: Path, changes: Mapping[str, torch.Tensor | None]) -> Path:
    """Puts tensors of these names into the folder; None takes one out."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return folder


def _quantised(weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    if form is Form.BLOCK:
        blocks = [rows.split(_BLOCK, 1) for rows in weight.split(_BLOCK)]
        scales = torch.tensor([[float(block.abs().max()) / _MAX for block in row] for row in blocks])
    elif form is Form.COMPRESSED_CHANNEL:
        # As such checkpoints have them: in two bytes.
        scales = (weight.abs().amax(1, keepdim=True) / _MAX).bfloat16()
    else:
        scales = weight.abs().max() / _MAX
    quotient = weight / _expanded(scales.float(), weight.shape)
    return quotient.clamp(-_MAX, _MAX).to(FP8), scales


def _expanded(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if scales.dim() < 2 or scales.shape[1] == 1 != -(-shape[1] // _BLOCK):
        return scales.reshape(-1, 1) if scales.dim() == 1 else scales
    if scales.shape == (shape[0], 1):
        return scales
    return scales.repeat_interleave(_BLOCK, 0)[: shape[0]].repeat_interleave(_BLOCK, 1)[:, : shape[1]]


def _keeping(config: dict[str, object], kept: tuple[str, ...]) -> dict[str, object]:
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    names = config[key]
    assert isinstance(names, list)
    return {**config, key: [*names, *kept]}
