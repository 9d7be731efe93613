"""Model folders: single and sharded, dtypes, tied weights; every fault of a folder names its file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.llama_folders import random_llama, save_llama
from support.segments import Stream

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.tensor_index import index_tensors
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

_Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return save_llama(random_llama("llama2_grouped"), tmp_path / "model")


def _logits(folder: Path) -> np.ndarray:
    runner = load_cpu_runner(folder, num_pages=32, threads=1)
    assert isinstance(runner, CpuRunner)
    (logits,) = runner.logits([Stream(0, range(20), np.arange(20, dtype=np.int32)).segment(20, 1, samples=False)])
    return logits


def _error(folder: Path, reason: str = "BAD_CHECKPOINT") -> MeshError:
    with pytest.raises(MeshError) as caught:
        load_cpu_runner(folder, num_pages=32, threads=1)
    assert caught.value.reason_name == reason
    return caught.value


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def _configure(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in {**config, **values}.items() if v is not ...}))


def test_shards_give_the_same_model_as_one_file(folder: Path, tmp_path: Path) -> None:
    sharded = save_llama(random_llama("llama2_grouped"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert not (sharded / "model.safetensors").exists()
    assert np.array_equal(_logits(sharded), _logits(folder))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def rounded(model_dtype: torch.dtype) -> Path:
        model = random_llama("llama2_grouped").to(dtype).to(model_dtype)
        return save_llama(model, tmp_path / str(model_dtype))

    assert np.array_equal(_logits(rounded(dtype)), _logits(rounded(torch.float32)))


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = save_llama(random_llama("wide_heads_tied"), tmp_path / "tied")
    expected = _logits(folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.full_like(embedding, 7.0)}))
    assert np.array_equal(_logits(folder), expected), "a tied model takes no head of its own"
    _edit(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    _configure(folder, tie_word_embeddings=False)
    assert np.array_equal(_logits(folder), expected)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    expected = _logits(folder)
    _edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert np.array_equal(_logits(folder), expected)


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.pop(_Q))
    error = _error(folder)
    assert error.metadata["tensor"] == _Q
    assert "[48, 48]" in error.message and str(folder) in error.message


def test_a_missing_head_is_named(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert _error(folder).metadata["tensor"] == "lm_head.weight"


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    file = _edit(folder, lambda tensors: tensors.update({"model.layers.9.extra": torch.ones(2)}))
    error = _error(folder)
    assert error.metadata == {"file": str(file), "tensor": "model.layers.9.extra"}


def test_a_wrong_shape_says_what_was_expected(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({_Q: torch.ones(48, 40)}))
    error = _error(folder)
    assert error.metadata["tensor"] == _Q
    assert "[48, 40]" in error.message and "[48, 48]" in error.message


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.uint8, "U8")])
def test_a_dtype_without_meaning_here_is_named(dtype: torch.dtype, name: str, folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({_Q: torch.ones(48, 48, dtype=dtype)}))
    error = _error(folder)
    assert error.metadata["tensor"] == _Q and f"as {name}" in error.message


@pytest.mark.parametrize("kept", [0, 5, 100, 5000, -1])
def test_a_truncated_file_is_found_out(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    error = _error(folder)
    assert error.metadata["file"] == str(file)
    if kept in (5000, -1):
        assert error.metadata["tensor"] and "truncated" in error.message


def test_a_file_of_garbage_is_found_out(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json at all!" * 9)
    assert "no safetensors file" in _error(folder).message


def test_missing_weights_config_and_folder_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "model.safetensors" in _error(folder).message
    (folder / "config.json").unlink()
    assert "config.json" in _error(folder).message
    assert "no folder" in _error(folder / "nowhere").message


def test_an_index_that_disagrees_with_its_shards_is_found_out(tmp_path: Path) -> None:
    folder = save_llama(random_llama("llama2_grouped"), tmp_path / "sharded", max_shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    for change, expected in (
        ({_Q: next(s for s in shards if s != content["weight_map"][_Q])}, _Q),
        ({"model.norm.weight": "absent.safetensors"}, "absent.safetensors"),
        ({"model.norm.weight": "../model.safetensors"}, "outside"),
    ):
        index.write_text(json.dumps({"weight_map": {**content["weight_map"], **change}}))
        assert expected in _error(folder).message
    index.write_text("{}")
    assert "weight_map" in _error(folder).message


def test_index_tells_shapes_without_reading_data(folder: Path) -> None:
    entry = index_tensors(folder)[_Q]
    assert (entry.shape, entry.dtype, entry.file) == ((48, 48), "F32", folder / "model.safetensors")


@pytest.mark.parametrize(
    ("values", "reason", "expected"),
    [
        ({"hidden_size": ...}, "BAD_CHECKPOINT", "hidden_size"),
        ({"hidden_size": "48"}, "BAD_CHECKPOINT", "hidden_size"),
        ({"num_hidden_layers": 0}, "BAD_CHECKPOINT", "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "BAD_CHECKPOINT", "model.layers.2"),
        ({"num_key_value_heads": 3}, "BAD_CHECKPOINT", "num_key_value_heads"),
        ({"head_dim": 7}, "BAD_CHECKPOINT", "head_dim"),
        ({"rms_norm_eps": "tiny"}, "BAD_CHECKPOINT", "rms_norm_eps"),
        ({"attention_bias": 1}, "BAD_CHECKPOINT", "attention_bias"),
        ({"architectures": []}, "BAD_CHECKPOINT", "architectures"),
        ({"architectures": ["MambaForCausalLM"]}, "UNSUPPORTED", "LlamaForCausalLM"),
        ({"hidden_act": "mish"}, "UNSUPPORTED", "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "UNSUPPORTED", "quantization_config"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "magic", "factor": 2.0}}, "UNSUPPORTED", "magic"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear"}}, "BAD_CHECKPOINT", "rope_scaling.factor"),
        ({"rope_parameters": ..., "rope_scaling": "linear"}, "BAD_CHECKPOINT", "rope_scaling"),
    ],
)
def test_config_faults_name_the_key(folder: Path, values: dict[str, object], reason: str, expected: str) -> None:
    _configure(folder, **values)
    assert expected in _error(folder, reason).message


def test_both_spellings_of_rope_are_read_alike(tmp_path: Path) -> None:
    folder = save_llama(random_llama("llama3_rope"), tmp_path / "model")
    expected = _logits(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    _configure(folder, rope_parameters=..., rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert np.array_equal(_logits(folder), expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"page_size": 0}, "INVALID_ARGUMENT"),
        ({"num_pages": 0}, "INVALID_ARGUMENT"),
        ({"num_pages": 10**15}, "INVALID_ARGUMENT"),
        ({"threads": -1}, "INVALID_ARGUMENT"),
        ({"dtype": "float8"}, "INVALID_ARGUMENT"),
        ({"attention_backend": "magic"}, "UNSUPPORTED"),
    ],
)
def test_bad_settings_are_refused(folder: Path, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(MeshError) as caught:
        load_cpu_runner(folder, **settings)
    assert caught.value.reason_name == reason
