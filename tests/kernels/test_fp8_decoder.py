"""Decoders with FP8 weights on the host: one row against transformers on the dequantised weights, more rows, which are
made FP8 too, against the references; and whether a model that was taught texts still knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.device_settings import TINY_SETTINGS
from support.fp8_folders import Form, dequantised_model, quantization_config, write_fp8
from support.llama_folders import TINY_LLAMA, random_llama
from support.model_folders import random_model
from support.recite import recited_wrongly
from support.replaying_device import ReplayingDevice
from support.rounding import model_tolerance, typical_fp8_error

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.quantization import CheckpointQuantization, Fp8Form
from radixmesh.daemons.worker.cuda import load
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.fp8.gemm import TritonFp8Gemm
from radixmesh.daemons.worker.cuda.fp8.ops import TorchFp8Ops, TritonFp8Ops
from radixmesh.daemons.worker.cuda.fp8.weights import chosen_form
from radixmesh.daemons.worker.cuda.model.decoder import LoadedDecoder
from radixmesh.daemons.worker.cuda.model.device_model import Kernels
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.weights import loading as load_weights
from radixmesh.daemons.worker.models.model import Placement
from radixmesh.daemons.worker.ranks.group import LocalGroup
from radixmesh.daemons.worker.runner import Segment
from radixmesh.kernels.fp8.quantized import QuantizedMatrix, quantize_matrix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_IDS = np.array([5, 99, 3, 42, 42, 7, 130], np.int32)
_SETTINGS = replace(
    TINY_SETTINGS,
    page_size=4,
    num_pages=200,
    num_slots=2,
    max_tokens_per_step=512,
    max_total_len=700,
)
# A part of a matrix, and whole ones.
_KEPT = ("layers.0.mlp.up_proj", "layers.1.self_attn.o_proj", "layers.2.mlp.down_proj")
_MODELS = {
    "llama_biases": lambda: random_llama("biases"),
    "qwen3": lambda: random_model("qwen3"),
}


def _runner(folder: Path, ops: Ops, **changes: object) -> DeviceRunner:
    """With the kernels where `ops` are kernels."""
    settings = replace(_SETTINGS, **changes)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        fp8 = TritonFp8Ops(ops, TritonFp8Gemm()) if isinstance(ops, TritonOps) else TorchFp8Ops(ops)
        patch.setattr(load, "create_kernels", lambda *_: Kernels(ops, fp8))
        runner = load.load_device_runner(folder, settings, HostDevice())
    assert isinstance(runner, DeviceRunner)
    return runner


def _logits(runner: DeviceRunner, chunk_len: int, ids: np.ndarray = _IDS) -> torch.Tensor:
    pages = np.arange(-(-len(ids) // runner.page_size), dtype=np.int32)
    parts = [
        runner.logits([Segment(slot=1, ids=ids[start : start + chunk_len], start=start, pages=pages)])[0]
        for start in range(0, len(ids), chunk_len)
    ]
    return torch.from_numpy(np.concatenate(parts))


@torch.inference_mode()
def _wanted(model: torch.nn.Module, ids: np.ndarray = _IDS) -> torch.Tensor:
    logits: torch.Tensor = model(torch.from_numpy(ids).long()[None]).logits[0]
    return logits


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("name", "form", "kept"),
    [
        ("llama_biases", Form.STATIC_TENSOR, ()),
        ("llama_biases", Form.BLOCK, ()),
        ("qwen3", Form.COMPRESSED_CHANNEL, _KEPT),
    ],
)
def test_one_row_is_computed_with_the_numbers_of_the_checkpoint(name, form, kept, tmp_path):
    source = tmp_path / "plain"
    _MODELS[name]().save_pretrained(source)
    folder = write_fp8(source, tmp_path / "fp8", form, kept=kept)
    want = _wanted(dequantised_model(folder))
    runner = _runner(folder, TritonOps())
    config = _MODELS[name]().config
    tolerance = model_tolerance(config, 2, float(want.abs().max()))
    torch.testing.assert_close(_logits(runner, 1, _IDS[:2]), want[:2], rtol=0, atol=tolerance)
    many = _logits(runner, len(_IDS))
    # Rows that are made FP8 are off, by more than float32 would be.
    assert tolerance < _error(many, want) < typical_fp8_error(config)
    # If a number lies between two of FP8, the last bits of float32 decide, and the layers after it round anew.
    assert _error(many, _logits(_runner(folder, TorchOps()), len(_IDS))) < typical_fp8_error(config)


@pytest.mark.parametrize("quantization", list(Fp8Form))
def test_weights_are_quantised_when_they_are_loaded(quantization, tmp_path):
    source = tmp_path / "plain"
    _MODELS["qwen3"]().save_pretrained(source)
    loaded = _load(source, quantization)
    assert loaded.num_plain == 0 and loaded.quantization == quantization
    tensors = load_file(source / "model.safetensors")
    gate_up = torch.cat([tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    want = quantize_matrix(gate_up, is_grouped=quantization is Fp8Form.BLOCK)
    got = loaded.matrices[1].gate_up
    assert isinstance(got, QuantizedMatrix) and torch.equal(got.dequantized(), want.dequantized())
    runner = _runner(source, TorchOps(), quantization=str(quantization))
    model = _MODELS["qwen3"]()
    assert _error(_logits(runner, len(_IDS)), _wanted(model)) < typical_fp8_error(model.config, has_fp8_weights=True)


def test_random_weights_are_those_that_are_not_quantised(tmp_path):
    _MODELS["qwen3"]().save_pretrained(tmp_path)
    placement = Placement(device=torch.device("cpu"), dtype=torch.bfloat16, group=LocalGroup(), is_out_first=True)
    plain, loaded = (
        load_weights.load_model(tmp_path, placement, load_format="dummy", quantization=quantization)
        for quantization in ("none", "fp8")
    )
    assert isinstance(plain, LoadedDecoder) and isinstance(loaded, LoadedDecoder)
    assert (loaded.quantization, plain.quantization) == ("fp8", "none")
    for matrices, of_plain in zip(loaded.matrices, plain.matrices, strict=True):
        for got, want in ((matrices.qkv, of_plain.qkv), (matrices.o, of_plain.o)):
            assert isinstance(got, QuantizedMatrix) and isinstance(want, torch.Tensor)
            assert torch.equal(got.dequantized(), quantize_matrix(want, is_grouped=False).dequantized())
    assert torch.equal(loaded.weights.embedding_VD, plain.weights.embedding_VD)


def _load(folder: Path, quantization: str) -> LoadedDecoder:
    placement = Placement(device=torch.device("cpu"), dtype=torch.float32, group=LocalGroup(), is_out_first=True)
    loaded = load_weights.load_model(folder, placement, load_format="auto", quantization=quantization)
    assert isinstance(loaded, LoadedDecoder)
    return loaded


def test_modules_that_stayed_as_they_were_stay_so(tmp_path):
    folder = write_fp8(
        TINY_LLAMA, tmp_path / "fp8", Form.BLOCK, kept=("layers.2.self_attn.k_proj", "layers.3.mlp.down_proj")
    )
    layers = _load(folder, "auto").matrices
    assert isinstance(layers[2].qkv, torch.Tensor) and isinstance(layers[3].down, torch.Tensor)
    assert sum(isinstance(matrix, torch.Tensor) for layer in layers for matrix in layer.all()) == 2
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(layers[2].qkv[128:192], stored["model.layers.2.self_attn.k_proj.weight"])
    # Queries of 128 rows end a block, keys of 64 do not.
    assert isinstance(layers[0].qkv, QuantizedMatrix) and layers[0].qkv.group_rows == 1
    assert isinstance(layers[0].gate_up, QuantizedMatrix) and layers[0].gate_up.group_rows == 128
    plain = _load(folder, "none")
    # The norm before it is folded in where it is in the model's dtype.
    norm = stored["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(plain.matrices[0].qkv, layers[0].qkv.dequantized() * norm, rtol=0, atol=0)


@pytest.mark.parametrize("quantization", list(Fp8Form))
def test_a_model_that_was_taught_texts_still_knows_them(quantization):
    """Every token of all texts from the true ones before it, in one step: 8-bit weights, 8-bit rows, bfloat16 else."""
    runner = _runner(
        TINY_LLAMA,
        TorchOps(),
        quantization=str(quantization),
        dtype="bfloat16",
        max_total_len=1200,
        max_tokens_per_step=1200,
        num_pages=300,
    )
    num_wrong = num_tokens = 0
    for text in json.loads((TINY_LLAMA / "recitations.json").read_text(encoding="utf-8")):
        ids = np.array([*text["prompt_ids"], *text["expected_ids"]], np.int32)
        first = len(text["prompt_ids"])
        got = _logits(runner, len(ids), ids)[first - 1 : -1].argmax(-1)
        num_wrong += int((got.numpy() != ids[first:]).sum())
        num_tokens += len(got)
    assert num_tokens == 9336 and num_wrong == 0, (num_wrong, num_tokens)


@pytest.mark.parametrize("quantization", list(Fp8Form))
def test_captured_steps_recite(quantization):
    """Decodes beside chunks and alone, in steps that are recorded and replayed: 8-bit weights, 8-bit rows."""
    settings = replace(
        _SETTINGS, quantization=str(quantization), num_slots=8, page_size=1, num_pages=2048, cuda_graphs=True
    )
    runner = load.load_device_runner(TINY_LLAMA, settings, ReplayingDevice())
    runner.warm_up()
    num_wrong, num_tokens = recited_wrongly(runner, lag=2, chunk_len=16)
    assert num_wrong == 0 and num_tokens > 200


def test_a_row_does_not_depend_on_others_in_deterministic_mode(tmp_path):
    gemm = TritonFp8Gemm(is_deterministic=True)
    for form in Fp8Form:
        is_grouped = form is Fp8Form.BLOCK
        ops = TritonFp8Ops(TritonOps(is_deterministic=True), gemm)
        w = quantize_matrix(torch.randn(70, 300), is_grouped=is_grouped)
        x = torch.randn(130, 300)
        together = ops.linear(ops.rows(x, w), w, torch.float32)
        for row in (0, 64, 129):
            assert torch.equal(ops.linear(ops.rows(x[row : row + 1], w), w, torch.float32)[0], together[row])


def test_flag_and_checkpoint_come_to_one_form():
    block, channel = (CheckpointQuantization(form=form) for form in (Fp8Form.BLOCK, Fp8Form.CHANNEL))
    assert [chosen_form("auto", found) for found in (None, block, channel)] == [None, Fp8Form.BLOCK, Fp8Form.CHANNEL]
    assert [chosen_form("none", found) for found in (None, block)] == [None, None]
    assert chosen_form("fp8", None) is chosen_form("fp8", channel) is Fp8Form.CHANNEL
    assert chosen_form("fp8-block", block) is Fp8Form.BLOCK
    for flag, found in (("fp8", block), ("fp8-block", channel), ("int8", None)):
        with pytest.raises(MeshError) as caught:
            chosen_form(flag, found)
        assert caught.value.metadata["field"] == "quantization" and caught.value.reason_name == "INVALID_ARGUMENT"


def test_models_with_experts_are_refused_before_they_are_read(tmp_path):
    random_model("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": quantization_config(Form.BLOCK)})
    )
    with pytest.raises(MeshError, match="routed experts"):
        load.load_device_runner(tmp_path, _SETTINGS, HostDevice())


def test_gpus_that_do_not_know_fp8_are_told_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(MeshError, match="--quantization none") as caught:
        load_weights.check_device(torch.device("cuda"), Fp8Form.BLOCK)
    assert caught.value.reason_name == "UNSUPPORTED"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    load_weights.check_device(torch.device("cuda"), Fp8Form.BLOCK)
