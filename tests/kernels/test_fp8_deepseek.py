"""DeepSeek with FP8 weights in blocks, against transformers on the dequantised weights: the CPU worker, which
dequantises them too, and the device's model, whose rows are FP8 as well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.deepseek_folders import TINY_DEEPSEEK, random_deepseek, save_deepseek
from support.device_settings import TINY_SETTINGS
from support.fp8_folders import FP8, Form, dequantised_model, edit, write_fp8
from support.replaying_device import ReplayingDevice
from support.rounding import model_tolerance, typical_fp8_error
from support.segments import Stream
from transformers import AutoConfig

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda import kernel_choice
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.fp8.expert_weights import PlainExpertWeights
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.model.deepseek import LoadedDeepseek
from radixmesh.daemons.worker.cuda.weights.loading import load_model
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.runner import ModelRunner, Segment
from radixmesh.kernels.fp8.quantized import QuantizedMatrix
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_SETTINGS = replace(
    TINY_SETTINGS, page_size=4, num_pages=400, num_slots=4, max_total_len=1200, max_tokens_per_step=1200
)
_IDS = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
# More than one block along each size, and the last one smaller.
_BLOCKS = {"hidden_size": 160, "moe_intermediate_size": 136, "q_lora_rank": 144, "intermediate_size": 200}
_EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
_NUM_TEXTS = 8


def _folder(tmp_path: Path, shape: str = "v3_groups", kept: tuple[str, ...] = (), **changes: object) -> Path:
    source = save_deepseek(random_deepseek(shape, **changes), tmp_path / "plain")
    return write_fp8(source, tmp_path / "fp8", Form.BLOCK, kept=kept)


def _logits(runner: ModelRunner, ids: np.ndarray = _IDS) -> torch.Tensor:
    pages = np.arange(-(-len(ids) // 4), dtype=np.int32)
    (logits,) = runner.logits([Segment(slot=1, ids=ids, start=0, pages=pages)])  # type: ignore[attr-defined]
    return torch.from_numpy(logits)


def _cpu_logits(folder: Path, ids: np.ndarray = _IDS) -> torch.Tensor:
    runner = load_cpu_runner(folder, num_pages=len(ids), threads=1)
    segment = Stream(0, ids.tolist(), np.arange(len(ids), dtype=np.int32)).segment(len(ids), 1, samples=False)
    (logits,) = runner.logits([segment])
    return torch.from_numpy(logits)


@torch.inference_mode()
def _wanted(folder: Path) -> torch.Tensor:
    logits: torch.Tensor = dequantised_model(folder)(torch.from_numpy(_IDS).long()[None]).logits[0]
    return logits


def _median_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of rows: where FP8 makes a router choose another expert, a row of random weights differs by much."""
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


@pytest.mark.parametrize(
    ("shape", "changes"),
    [("v3_groups", _BLOCKS), pytest.param("v2_groups_yarn", _BLOCKS, marks=pytest.mark.full), ("v3_biases_tied", {})],
)
def test_logits_are_near_those_of_the_dequantised_weights(
    shape: str, changes: dict[str, object], tmp_path: Path
) -> None:
    folder = _folder(tmp_path, shape, **changes)
    want, config = _wanted(folder), AutoConfig.from_pretrained(folder)
    exact = model_tolerance(config, len(_IDS), float(want.abs().max()))
    torch.testing.assert_close(_cpu_logits(folder), want, rtol=0, atol=exact)
    dequantised = load_device_runner(folder, replace(_SETTINGS, quantization="none"), HostDevice())
    torch.testing.assert_close(_logits(dequantised), want, rtol=0, atol=exact)
    error = _median_error(_logits(load_device_runner(folder, _SETTINGS, HostDevice())), want)
    # Rows that are made FP8 are off, by more than float32 would be.
    assert 0.01 < error < typical_fp8_error(config), error


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_kernels_compute_what_torch_does(
    is_deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path)
    want = _logits(load_device_runner(folder, _SETTINGS, HostDevice()), _IDS[:9])
    monkeypatch.setattr(kernel_choice, "kernels_name", lambda settings, device: "triton")
    runner = load_device_runner(folder, replace(_SETTINGS, deterministic=is_deterministic), HostDevice())
    assert _median_error(_logits(runner, _IDS[:9]), want) < 0.01


def test_a_model_that_was_taught_texts_still_knows_them(tmp_path: Path) -> None:
    """Every token of the shortest texts from the true ones before it, 8-bit weights and rows, in captured steps."""
    folder = write_fp8(TINY_DEEPSEEK, tmp_path / "fp8", Form.BLOCK)
    runner = load_device_runner(folder, replace(_SETTINGS, cuda_graphs=True), ReplayingDevice())
    texts = json.loads((TINY_DEEPSEEK / "recitations.json").read_text(encoding="utf-8"))
    num_wrong = num_tokens = 0
    for text in sorted(texts, key=lambda text: len(text["expected_ids"]))[:_NUM_TEXTS]:
        ids, first = np.array([*text["prompt_ids"], *text["expected_ids"]], np.int32), len(text["prompt_ids"])
        got = _logits(runner, ids)
        num_wrong += int((got[first - 1 : -1].argmax(-1).numpy() != ids[first:]).sum())
        num_tokens += len(ids) - first
        error = _median_error(got, _cpu_logits(folder, ids))
        assert error < typical_fp8_error(AutoConfig.from_pretrained(TINY_DEEPSEEK)), error
    assert num_wrong == 0 and num_tokens > 100, (num_wrong, num_tokens)


def _load(folder: Path, quantization: str = "auto", load_format: str = "auto") -> LoadedDeepseek:
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, group=LocalGroup(), is_out_first=True)
    loaded = load_model(folder, placement, load_format=load_format, quantization=quantization)
    assert isinstance(loaded, LoadedDeepseek)
    return loaded


def test_weights_are_the_numbers_of_the_checkpoint(tmp_path: Path) -> None:
    folder = _folder(tmp_path, kept=("layers.2.self_attn.o_proj", "layers.1.mlp.shared_experts.up_proj"), **_BLOCKS)
    loaded, stored = _load(folder), load_file(folder / "model.safetensors")
    layer = loaded.matrices[1]
    assert loaded.quantization == "fp8-block" and loaded.num_plain == 2 and isinstance(layer.experts, QuantizedExperts)
    for name, matrix in (("gate", layer.experts.gate(2)), ("up", layer.experts.up(2)), ("down", layer.experts.down(2))):
        weight = stored[f"model.layers.1.mlp.experts.2.{name}_proj.weight"]
        assert torch.equal(matrix.data_NK.view(torch.uint8), weight.view(torch.uint8))
        assert torch.equal(matrix.scales, stored[f"model.layers.1.mlp.experts.2.{name}_proj.weight_scale_inv"])
    assert isinstance(layer.w_in, QuantizedMatrix) and isinstance(loaded.matrices[2].w_out, torch.Tensor)
    # 144 rows of queries end within a block: each row of this matrix has scales of its own.
    assert layer.w_in.group_rows == 1
    dummy = _load(folder, load_format="dummy").matrices[1]
    assert isinstance(dummy.experts, QuantizedExperts) and isinstance(dummy.w_out, QuantizedMatrix)


@pytest.mark.parametrize("is_fused", [False, True])
def test_weights_are_quantised_when_they_are_loaded(is_fused: bool, tmp_path: Path) -> None:
    folder = save_deepseek(random_deepseek("v3_groups", **_BLOCKS), tmp_path / "plain", is_fused=is_fused)
    loaded, plain = _load(folder, "fp8-block"), _load(folder, "none")
    experts, want = loaded.matrices[1].experts, plain.matrices[1].experts
    assert loaded.num_plain == 0 and isinstance(experts, QuantizedExperts) and isinstance(want, PlainExpertWeights)
    up = want.w_gate_up_E2FD[3, 136:]
    # Numbers of FP8 have 4 significant bits.
    assert float((experts.up(3).dequantized() - up).abs().max()) <= float(up.abs().max()) / 16
    assert float((experts.up(3).dequantized() - up).norm() / up.norm()) < 0.05


def test_experts_that_stayed_as_they_were_stay_so(tmp_path: Path) -> None:
    names = tuple(
        f"layers.1.mlp.experts.{expert}.{part}_proj" for expert in range(8) for part in ("gate", "up", "down")
    )
    loaded = _load(_folder(tmp_path, kept=names))
    assert isinstance(loaded.matrices[1].experts, PlainExpertWeights) and loaded.num_plain == 1
    assert isinstance(loaded.matrices[2].experts, QuantizedExperts)


def test_experts_without_scales_or_with_others_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path, **_BLOCKS)
    edit(folder, {f"{_EXPERT}_scale_inv": torch.ones(3, 2)})
    error = _error(folder)
    assert error.metadata["tensor"] == f"{_EXPERT}_scale_inv" and "[2, 2]" in error.message
    edit(folder, {f"{_EXPERT}_scale_inv": None})
    error = _error(folder)
    assert error.metadata["tensor"] == _EXPERT and "_scale_inv" in error.message
    edit(folder, {_EXPERT: torch.ones(128, 160).to(FP8), f"{_EXPERT}_scale_inv": torch.ones(1, 2)})
    error = _error(folder)
    assert error.metadata["tensor"] == _EXPERT and "[136, 160]" in error.message


def test_layers_of_which_some_experts_are_fp8_are_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, kept=("layers.1.mlp.experts.2.up_proj",))
    error = _error(folder)
    assert error.metadata["tensor"] == _EXPERT and "--quantization none" in error.message
    assert _load(folder, "none").quantization == "none"


@pytest.mark.parametrize("form", [Form.COMPRESSED_CHANNEL, Form.TENSOR])
def test_scales_by_channel_are_refused_before_weights_are_read(form: Form, tmp_path: Path) -> None:
    source = save_deepseek(random_deepseek("v3_groups"), tmp_path / "plain")
    error = _error(write_fp8(source, tmp_path / "fp8", form), "UNSUPPORTED")
    assert "--quantization" in error.message
    with pytest.raises(MeshError, match="fp8-block"):
        _load(source, "fp8")


def _error(folder: Path, reason: str = "BAD_CHECKPOINT") -> MeshError:
    with pytest.raises(MeshError) as caught:
        _load(folder)
    assert caught.value.reason_name == reason, caught.value.message
    return caught.value
