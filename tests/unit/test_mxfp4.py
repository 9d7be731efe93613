"""Experts stored as MXFP4, as GPT-OSS has them, are the numbers that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_folders import family_folder, family_model
from support.segments import Stream, scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.mxfp4 import numbers
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _expected(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """By definition, number by number: float32 [experts, in, out]."""
    result = torch.empty(blocks.shape[0], 32 * blocks.shape[2], blocks.shape[1])
    for index in np.ndindex(*blocks.shape):
        byte, scale = int(blocks[index]), 2.0 ** (int(scales[index[:3]]) - 127)
        for half, bits in enumerate((byte & 15, byte >> 4)):
            value = _E2M1[bits & 7] * (-1 if bits & 8 else 1)
            result[index[0], 32 * index[2] + 2 * index[3] + half, index[1]] = value * scale
    return result


def _parts(num_experts: int, num_in: int, num_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(256, (num_experts, num_out, num_in // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)


def test_numbers_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    blocks, scales = _parts(2, 64, 3)
    scales[0, 0] = torch.tensor([1, 250], dtype=torch.uint8)
    assert torch.equal(numbers(blocks, scales).float(), _expected(blocks, scales))


def _folder(tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A model with weights that MXFP4 holds exactly, and its folder with them in that form."""
    torch.manual_seed(0)
    model = family_model("gpt_oss", intermediate_size=64)
    folder = family_folder(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = _parts(*parameter.shape)
            with torch.no_grad():
                parameter.copy_(_expected(blocks, scales))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, folder


def test_logits_are_those_of_the_dequantised_model(tmp_path: Path) -> None:
    model, folder = _folder(tmp_path)
    runner = load_cpu_runner(folder, threads=1, num_pages=64, page_size=4)
    assert isinstance(runner, CpuRunner)
    ids = np.random.default_rng(0).integers(0, runner.vocab_size, 40).astype(np.int32)
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [len(ids)])[0])
    (got,) = runner.logits([stream.segment(len(ids), 4, samples=False)])
    with torch.inference_mode():
        want = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert want.std() > 0.3 and np.abs(got - want).max() <= 1e-4 * max(1.0, want.std())


@pytest.mark.parametrize("what", ["scales are missing", "scales of another shape"])
def test_blocks_without_their_scales_are_named(what: str, tmp_path: Path) -> None:
    _, folder = _folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    if "missing" in what:
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MeshError, match=r"layers\.1\.mlp\.experts\.down_proj") as caught:
        load_cpu_runner(folder, threads=1, num_pages=64)
    assert caught.value.reason_name == "BAD_CHECKPOINT"
