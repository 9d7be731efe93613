"""The GPU's decoder with its kernels, under Triton's interpreter where there is no GPU, against transformers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.family_folders import family_model
from support.llama_folders import random_llama
from support.model_folders import random_model
from support.rounding import model_tolerance, typical_model_error

from radixmesh.daemons.worker.cuda import load
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.model.device_model import Kernels
from radixmesh.daemons.worker.cuda.ops import TritonOps
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.runner import Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

_IDS = np.array([5, 99, 3, 42, 42, 7, 130], np.int32)
_SETTINGS = replace(
    TINY_SETTINGS,
    page_size=4,
    num_pages=8,
    num_slots=2,
    max_tokens_per_step=16,
    max_total_len=16,
)
# Between them: grouped heads, biases of every projection, norms of heads, tied and other output projections.
_MODELS = {
    "llama_tied": lambda: random_llama("wide_heads_tied"),
    "llama_biases": lambda: random_llama("biases"),
    "qwen2": lambda: random_model("qwen2"),
    "qwen3": lambda: random_model("qwen3"),
    "mixtral": lambda: random_model("mixtral"),
    "qwen3_moe": lambda: random_model("qwen3_moe"),
    "qwen3_moe_some_layers": lambda: random_model("qwen3_moe_some_layers"),
    "gpt_oss": lambda: family_model("gpt_oss", vocab_size=131, sliding_window=3),
    "llama4": lambda: family_model("llama4", vocab_size=131, attention_chunk_size=4, floor_scale=3),
}


def _assert_near(got, want, model):
    tolerance = model_tolerance(model.config, len(_IDS), float(want.abs().max()))
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "deterministic"), [*((name, False) for name in _MODELS), ("llama_biases", True), ("qwen3_moe", True)]
)
def test_logits_are_those_of_transformers(name, deterministic, tmp_path, monkeypatch):
    model = _MODELS[name]()
    got = _logits(model, tmp_path, monkeypatch, replace(_SETTINGS, deterministic=deterministic))
    _assert_near(got, _wanted(model), model)


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "llama_tied"), pytest.param("float16", "qwen2", marks=pytest.mark.full)]
)
def test_logits_in_two_bytes_are_near_those_in_four(dtype, name, tmp_path, monkeypatch):
    model = _MODELS[name]()
    want = _wanted(model)
    error = _logits(model, tmp_path, monkeypatch, replace(_SETTINGS, dtype=dtype)) - want
    assert error.abs().mean() < typical_model_error(model.config, float(want.std()), getattr(torch, dtype))


def test_float16_does_not_multiply_rows_that_were_not_normed(tmp_path, monkeypatch):
    """GEMMs of rows that large would pass 65,504."""
    model = random_llama("llama1")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(5000)
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.mul_(40)
            layer.mlp.up_proj.weight.mul_(0.025)
    want = _wanted(model)
    error = _logits(model, tmp_path, monkeypatch, replace(_SETTINGS, dtype="float16")) - want
    assert error.abs().mean() < typical_model_error(model.config, float(want.std()), torch.float16)


def test_logits_of_several_segments_are_those_of_each(tmp_path, monkeypatch):
    model = _MODELS["llama_tied"]()
    runner = _runner(model, tmp_path, monkeypatch, _SETTINGS)
    chunks = [_IDS[:4], _IDS[2:]]
    segments = [
        Segment(slot=slot, ids=ids, start=0, pages=np.array([2 * slot, 2 * slot + 1], np.int32))
        for slot, ids in enumerate(chunks)
    ]
    for ids, got in zip(chunks, runner.logits(segments), strict=True):
        _assert_near(torch.from_numpy(got), _wanted(model, ids), model)


def _logits(
    model: torch.nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: load.DeviceSettings
) -> torch.Tensor:
    """Of all ids: some rows at once, then one, which other kernels compute."""
    runner = _runner(model, folder, monkeypatch, settings)
    pages = np.array([3, 1], np.int32)
    parts = [
        runner.logits([Segment(slot=1, ids=_IDS[first:end], start=first, pages=pages)])[0]
        for first, end in ((0, 5), (5, 6), (6, 7))
    ]
    return torch.from_numpy(np.concatenate(parts))


def _runner(
    model: torch.nn.Module, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: load.DeviceSettings
) -> DeviceRunner:
    ops = TritonOps(is_deterministic=settings.deterministic)
    monkeypatch.setattr(load, "create_kernels", lambda *_: Kernels(ops))
    model.save_pretrained(folder)
    runner = load.load_device_runner(folder, settings, HostDevice())
    assert isinstance(runner, DeviceRunner)
    return runner


@torch.inference_mode()
def _wanted(model: torch.nn.Module, ids: np.ndarray = _IDS) -> torch.Tensor:
    logits: torch.Tensor = model(torch.from_numpy(ids).long()[None]).logits[0]
    return logits
