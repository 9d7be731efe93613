"""Checkpoints whose weights are FP8: the CPU worker computes what transformers does of the weights dequantised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fp8_folders import FP8, Form, dequantised_model, edit, quantization_config, write_fp8
from support.llama_folders import TINY_LLAMA, random_llama, save_llama
from support.rounding import model_tolerance
from support.segments import Stream
from transformers import AutoConfig

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization, Fp8Form, read_quantization
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

_O = "model.layers.1.self_attn.o_proj.weight"
_IDS = range(5, 45)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _random_folder(tmp_path: Path, form: Form, **options: tuple[str, ...]) -> Path:
    return write_fp8(save_llama(random_llama("biases"), tmp_path / "plain"), tmp_path / "fp8", form, **options)


def _logits(folder: Path) -> torch.Tensor:
    runner = load_cpu_runner(folder, num_pages=64, threads=1)
    assert isinstance(runner, CpuRunner)
    pages = np.arange(len(_IDS), dtype=np.int32)
    (logits,) = runner.logits([Stream(0, _IDS, pages).segment(len(_IDS), 1, samples=False)])
    return torch.from_numpy(logits)


@torch.inference_mode()
def _wanted(folder: Path) -> torch.Tensor:
    logits: torch.Tensor = dequantised_model(folder)(torch.tensor([list(_IDS)])).logits[0]
    return logits


def _assert_near(got: torch.Tensor, wanted: torch.Tensor, folder: Path) -> None:
    tolerance = model_tolerance(AutoConfig.from_pretrained(folder), len(_IDS), float(wanted.abs().max()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", Form)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, form: Form) -> None:
    folder = _random_folder(tmp_path, form)
    _assert_near(_logits(folder), _wanted(folder), folder)


@pytest.mark.parametrize("form", [Form.BLOCK, Form.TENSOR, Form.COMPRESSED_CHANNEL])
def test_a_model_that_was_taught_texts_gives_the_same_greedy_tokens(tmp_path: Path, form: Form) -> None:
    folder = write_fp8(TINY_LLAMA, tmp_path / "fp8", form)
    got, want = _logits(folder), _wanted(folder)
    assert got.argmax(-1).tolist() == want.argmax(-1).tolist()
    _assert_near(got, want, folder)


def test_modules_that_stayed_as_they_were_are_read_as_they_are(tmp_path: Path) -> None:
    folder = _random_folder(tmp_path, Form.TENSOR, kept=("layers.1.self_attn.o_proj", "down_proj"))
    _assert_near(_logits(folder), _wanted(folder), folder)


def test_a_shard_may_hold_the_scales_of_anothers_weight(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _random_folder(tmp_path, Form.BLOCK)
    wanted = _wanted(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    parts = {f"model-{index}.safetensors": [*sorted(tensors)[index::3]] for index in range(3)}
    for name, names in parts.items():
        save_file({tensor: tensors[tensor] for tensor in names}, folder / name)
    weight_map = {tensor: name for name, names in parts.items() for tensor in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _assert_near(_logits(folder), wanted, folder)


def _error(folder: Path, reason: str = "BAD_CHECKPOINT") -> MeshError:
    with pytest.raises(MeshError) as caught:
        load_cpu_runner(folder, num_pages=32, threads=1)
    assert caught.value.reason_name == reason
    return caught.value


def _configure(folder: Path, quantization: dict[str, object] | None) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = quantization
    file.write_text(json.dumps(config))


def test_fp8_weights_without_scales_or_with_others_are_named(tmp_path: Path) -> None:
    folder = _random_folder(tmp_path, Form.BLOCK)
    edit(folder, {f"{_O}_scale_inv": torch.ones(2, 3)})
    error = _error(folder)
    assert error.metadata["tensor"] == f"{_O}_scale_inv" and "[2, 3]" in error.message and "[1, 1]" in error.message
    edit(folder, {f"{_O}_scale_inv": torch.tensor([[float("nan")]])})
    assert "no positive numbers" in _error(folder).message
    edit(folder, {f"{_O}_scale_inv": None})
    error = _error(folder)
    assert error.metadata["tensor"] == _O and f"{_O}_scale" in error.message


def test_fp8_where_the_config_says_there_is_none_is_named(tmp_path: Path) -> None:
    folder = _random_folder(tmp_path, Form.TENSOR)
    _configure(folder, {**quantization_config(Form.TENSOR), "modules_to_not_convert": ["model.layers.1.self_attn"]})
    error = _error(folder)
    assert "layers.1.self_attn" in error.metadata["tensor"] and "not quantised" in error.message
    _configure(folder, None)
    assert "no quantization_config" in _error(folder).message


def test_scales_of_a_weight_that_is_not_fp8_have_no_place(tmp_path: Path) -> None:
    folder = _random_folder(tmp_path, Form.TENSOR, kept=("o_proj",))
    edit(folder, {f"{_O}_scale": torch.tensor(1.0)})
    assert _error(folder).metadata["tensor"] == f"{_O}_scale"


@pytest.mark.parametrize("scales", [torch.ones(48), torch.tensor(2.0)], ids=["channel", "tensor"])
def test_fp8_that_is_no_matrix_is_named(scales: torch.Tensor, tmp_path: Path) -> None:
    folder = _random_folder(tmp_path, Form.TENSOR)
    name = "model.norm.weight"
    edit(folder, {name: torch.ones(48).to(FP8), f"{name}_scale": scales})
    assert _error(folder).metadata["tensor"] == name


_GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
          "input_activations": {"num_bits": 8, "type": "float"}}  # fmt: skip


def _compressed(**changes: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {**_GROUP, **changes}}}


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"bits": 4}, "quantization_config", "UNSUPPORTED"),
        ({"quant_method": "awq"}, "quantization_config", "UNSUPPORTED"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt", "UNSUPPORTED"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme", "UNSUPPORTED"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "weight_block_size", "UNSUPPORTED"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size", "BAD_CHECKPOINT"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert", "BAD_CHECKPOINT"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format", "UNSUPPORTED"),
        ({"quant_method": "compressed-tensors"}, "config_groups", "BAD_CHECKPOINT"),
        (_compressed(weights=None), "weights", "BAD_CHECKPOINT"),
        (_compressed(input_activations=None), "input_activations", "UNSUPPORTED"),
        (_compressed(weights={"num_bits": 4, "type": "int"}), "num_bits", "UNSUPPORTED"),
        (_compressed(weights={"num_bits": 8, "type": "int"}), "type", "UNSUPPORTED"),
        (_compressed(weights={**_GROUP["weights"], "strategy": "group"}), "strategy", "UNSUPPORTED"),
        (_compressed(weights={**_GROUP["weights"], "symmetric": False}), "symmetric", "UNSUPPORTED"),
    ],
)
def test_other_quantisation_is_refused_by_key(tmp_path: Path, values: dict[str, object], key: str, reason: str) -> None:
    folder = _random_folder(tmp_path, Form.TENSOR)
    _configure(folder, values)
    error = _error(folder, reason)
    assert error.metadata["key"].endswith(key) and str(folder) in error.message


def _read(tmp_path: Path, values: dict[str, object]) -> CheckpointQuantization | None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    return read_quantization(ConfigReader.open(tmp_path))


def test_forms_are_told_apart(tmp_path: Path) -> None:
    forms = {form: read.form if (read := _read(tmp_path, quantization_config(form))) else None for form in Form}
    assert forms == {form: Fp8Form.BLOCK if form is Form.BLOCK else Fp8Form.CHANNEL for form in Form}
    block = _compressed(weights={**_GROUP["weights"], "strategy": "block", "block_structure": [128, 128]})
    assert _read(tmp_path, block) == CheckpointQuantization(form=Fp8Form.BLOCK)
    (tmp_path / "config.json").write_text("{}")
    assert read_quantization(ConfigReader.open(tmp_path)) is None


def test_names_of_modules_that_stay_as_they_are() -> None:
    kept = ("lm_head", "model.layers.0", "re:.*down_proj$")
    quantization = CheckpointQuantization(form=Fp8Form.BLOCK, kept=kept)
    for module, is_kept in (
        ("lm_head", True),
        ("model.lm_head", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("model.layers.01.mlp.up_proj", False),
        ("model.layers.10.mlp.up_proj", False),
        ("model.layers.7.mlp.down_proj", True),
    ):
        assert quantization.keeps(module) is is_kept, module


def test_the_flag_takes_what_the_backend_can() -> None:
    def settings(backend: Backend, quantization: str) -> WorkerSettings:
        return WorkerSettings(backend=backend, model=Path("m"), quantization=quantization)

    for name in ("auto", "none"):
        assert settings(Backend.CPU, name).quantization == name
    assert settings(Backend.CUDA, "fp8-block").quantization == "fp8-block"
    with pytest.raises(ValueError, match="--backend cuda"):
        settings(Backend.CPU, "fp8")
    with pytest.raises(ValueError, match=r"--quantization .* must be one of"):
        settings(Backend.CUDA, "int8")
