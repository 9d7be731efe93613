"""Every model family against transformers in float32, and the bits of its rows over schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.model_folders import SHAPES, random_model, save_model
from support.rounding import model_tolerance, typical_model_error
from support.segments import Stream, generate, scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.checkpoint.config_reader import ConfigReader
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.models.decoder.config import DecoderConfig
from radixmesh.daemons.worker.models.mistral.config import read_mistral_config
from radixmesh.daemons.worker.models.qwen2.config import read_qwen2_config
from radixmesh.daemons.worker.models.qwen3_moe.config import read_qwen3_moe_config

_LENGTH = 150
_ROUTED = ("mixtral", "qwen3_moe", "qwen3_moe_some_layers")
_SETTINGS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Oracle(NamedTuple):
    model: PreTrainedModel
    folder: Path


Make = Callable[[str], Oracle]
Load = Callable[[str, int], CpuRunner]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Models by shape, each made once."""
    torch.set_num_threads(1)
    made: dict[str, Oracle] = {}

    def get(shape: str) -> Oracle:
        if shape not in made:
            model = random_model(shape)
            made[shape] = Oracle(model, save_model(model, tmp_path_factory.mktemp(shape)))
        return made[shape]

    return get


@pytest.fixture(scope="module")
def load(make: Make) -> Load:
    """Runners by (shape, page size), each loaded once."""
    runners: dict[tuple[str, int], CpuRunner] = {}

    def get(shape: str, page_size: int) -> CpuRunner:
        if (shape, page_size) not in runners:
            runners[shape, page_size] = _load(make(shape).folder, page_size=page_size)
            assert runners[shape, page_size].is_deterministic
        runners[shape, page_size].clear()
        return runners[shape, page_size]

    return get


def _load(folder: Path, **changed: object) -> CpuRunner:
    runner = load_cpu_runner(
        folder, **{"num_pages": 640 // int(str(changed.get("page_size", 1))), "threads": 1, **changed}
    )
    assert isinstance(runner, CpuRunner)
    runner.clear()
    return runner


def _prompt(runner: CpuRunner, length: int = _LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, length).astype(np.int32)


def _logits_in_chunks(runner: CpuRunner, ids: np.ndarray, chunk: int) -> np.ndarray:
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [len(ids)], seed=chunk)[0])
    parts = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        parts += runner.logits([stream.segment(length, runner.page_size, samples=False)])
        stream.computed += length
    return np.concatenate(parts)


def _expected(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert logits.std() > 0.5, "a test on flat logits would show nothing"
    return logits


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("page_size", "chunk"), [(16, _LENGTH), (1, 64), (16, 7), (1, 1)])
def test_logits_equal_those_of_transformers(make: Make, load: Load, shape: str, page_size: int, chunk: int) -> None:
    runner = load(shape, page_size)
    ids = _prompt(runner)
    expected = _expected(make(shape).model, ids)
    tolerance = model_tolerance(make(shape).model.config, len(ids), np.abs(expected).max())
    assert np.abs(_logits_in_chunks(runner, ids, chunk) - expected).max() <= tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_ids_equal_those_of_transformers(make: Make, load: Load, shape: str) -> None:
    model, runner = make(shape).model, load(shape, 16)
    prompts = [_prompt(runner, length, seed) for seed, length in enumerate((5, 1, 90))]
    pages = scattered_pages(runner, [len(prompt) + 64 for prompt in prompts])
    streams = [Stream(i, prompt.tolist(), pages[i]) for i, prompt in enumerate(prompts)]
    generate(runner, streams, 64, chunk=11)
    for stream, prompt in zip(streams, prompts, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        with torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert stream.output == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_have_the_bits_of_decode(load: Load, shape: str) -> None:
    ids = _prompt(load(shape, 1), 120, seed=3)
    expected = _logits_in_chunks(load(shape, 1), ids, 1)
    for page_size, chunk in ((16, 1000), (1, 64), (16, 7)):
        assert _same_bits(_logits_in_chunks(load(shape, page_size), ids, chunk), expected), (page_size, chunk)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "llama"])
@_SETTINGS
@given(data=st.data(), page_size=st.sampled_from([1, 16]), seed=st.integers(0, 1000))
def test_any_schedule_gives_the_same_bits(
    load: Load, shape: str, data: st.DataObject, page_size: int, seed: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=5), label="lengths")
    prompts = [_prompt(load(shape, 1), length, seed + i) for i, length in enumerate(lengths)]
    # 64 rows at a time: what chunks give alone is held to decodes above.
    expected = [_logits_in_chunks(load(shape, 1), ids, 64) for ids in prompts]
    runner = load(shape, page_size)
    pages = scattered_pages(runner, lengths, seed)
    streams = [Stream(i, ids.tolist(), pages[i]) for i, ids in enumerate(prompts)]
    rows: list[list[np.ndarray]] = [[] for _ in streams]
    while waiting := [s for s in streams if s.remaining]:
        chosen = data.draw(st.permutations(waiting), label="order")[: data.draw(st.integers(1, len(waiting)))]
        chunks = [data.draw(st.sampled_from([1, 2, 7, 33, 64]), label="chunk") for _ in chosen]
        chunks = [min(chunk, s.remaining) for chunk, s in zip(chunks, chosen, strict=True)]
        segments = [s.segment(n, page_size, samples=False) for s, n in zip(chosen, chunks, strict=True)]
        for stream, length, logits in zip(chosen, chunks, runner.logits(segments), strict=True):
            rows[stream.slot].append(logits)
            stream.computed += length
    for parts, alone in zip(rows, expected, strict=True):
        assert _same_bits(np.concatenate(parts), alone)


@pytest.mark.parametrize("shape", ["mistral", "mixtral", "qwen3_moe_some_layers"])
@pytest.mark.parametrize("changed", [{"is_deterministic": False}, {"attention_backend": "naive"}], ids=str)
def test_fast_mode_and_naive_attention_are_as_near(make: Make, shape: str, changed: dict[str, object]) -> None:
    model, folder = make(shape)
    runner = _load(folder, **changed)
    ids = _prompt(runner)
    expected = _expected(model, ids)
    tolerance = model_tolerance(model.config, len(ids), np.abs(expected).max())
    assert np.abs(_logits_in_chunks(runner, ids, 50) - expected).max() <= tolerance


@pytest.mark.parametrize("shape", ["qwen3_late_windows", "mixtral", "qwen3_moe"])
def test_bfloat16_is_near_float32(make: Make, load: Load, shape: str) -> None:
    ids = _prompt(exact := load(shape, 1))
    runner = _load(make(shape).folder, dtype="bfloat16")
    logits, expected = _logits_in_chunks(runner, ids, 64), _logits_in_chunks(exact, ids, 64)
    # Some rows go to other experts, so not every row is near.
    tolerance = typical_model_error(make(shape).model.config, expected.std(), torch.bfloat16)
    assert np.median(np.abs(logits - expected).mean(axis=1)) < tolerance


@pytest.mark.parametrize("shape", _ROUTED)
def test_experts_in_two_tensors_a_layer_load_to_the_same(make: Make, load: Load, tmp_path: Path, shape: str) -> None:
    folder = save_model(make(shape).model, tmp_path, is_fused=True)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    assert any(".experts.0." in name for name in load_file(make(shape).folder / "model.safetensors"))
    ids = _prompt(runner := _load(folder))
    assert _same_bits(_logits_in_chunks(runner, ids, 64), _logits_in_chunks(load(shape, 1), ids, 64))


def test_an_expert_that_is_missing_is_named(make: Make, tmp_path: Path) -> None:
    folder = save_model(make("mixtral").model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.4.w3.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MeshError, match=r"layers\.2\.block_sparse_moe\.experts\.4\.w3") as caught:
        _load(folder)
    assert caught.value.reason_name == "BAD_CHECKPOINT"


def test_both_layouts_at_once_are_refused(make: Make, tmp_path: Path) -> None:
    folder = save_model(make("qwen3_moe").model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    fused = load_file(save_model(make("qwen3_moe").model, tmp_path / "fused", is_fused=True) / "model.safetensors")
    save_file({**tensors, **fused}, folder / "model.safetensors")
    with pytest.raises(MeshError, match=r"no place for") as caught:
        _load(folder)
    assert caught.value.reason_name == "BAD_CHECKPOINT"


def _config(make: Make, tmp_path: Path, shape: str, drop: tuple[str, ...] = (), **changed: object) -> ConfigReader:
    values = json.loads((make(shape).folder / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in drop} | changed
    (tmp_path / "config.json").write_text(json.dumps(values))
    return ConfigReader.open(tmp_path)


def test_windows_of_configs_without_layer_types(make: Make, tmp_path: Path) -> None:
    def windows(**changed: object) -> tuple[int | None, ...]:
        reader = _config(make, tmp_path, "qwen2_late_windows", drop=("layer_types",), **changed)
        return read_qwen2_config(reader).windows

    assert windows() == (None, None, 20, 20)
    assert windows(max_window_layers=0) == (20,) * 4
    assert windows(max_window_layers=28) == (None,) * 4
    assert windows(use_sliding_window=False) == (None,) * 4
    assert windows(sliding_window=None) == (None,) * 4


def test_windows_of_mistral_are_the_default_where_absent_and_off_where_null(make: Make, tmp_path: Path) -> None:
    def window(config: ConfigReader) -> int | None:
        return read_mistral_config(config).windows[0]

    assert window(_config(make, tmp_path, "mistral")) == 25
    assert window(_config(make, tmp_path, "mistral", drop=("sliding_window",))) == 4096
    assert window(_config(make, tmp_path, "mistral", sliding_window=None)) is None
    with pytest.raises(MeshError, match="layer_types") as caught:
        window(_config(make, tmp_path, "mistral", layer_types=["full_attention"] * 4))
    assert caught.value.reason_name == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("changed", "key", "reason"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types", "BAD_CHECKPOINT"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types", "UNSUPPORTED"),
        ({"use_sliding_window": False}, "layer_types", "BAD_CHECKPOINT"),
        ({"sliding_window": 0}, "sliding_window", "BAD_CHECKPOINT"),
        ({"hidden_act": "mish"}, "hidden_act", "UNSUPPORTED"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_key(
    make: Make, tmp_path: Path, changed: dict[str, object], key: str, reason: str
) -> None:
    with pytest.raises(MeshError, match=key) as caught:
        read_qwen2_config(_config(make, tmp_path, "qwen2_late_windows", **changed))
    assert caught.value.reason_name == reason


def test_layers_with_experts(make: Make, tmp_path: Path) -> None:
    def layers(**changed: object) -> list[int]:
        decoder: DecoderConfig = read_qwen3_moe_config(_config(make, tmp_path, "qwen3_moe_some_layers", **changed))
        return [layer for layer in range(decoder.num_layers) if decoder.has_experts(layer)]

    assert layers() == [3]
    assert layers(mlp_only_layers=[]) == [1, 3]
    assert layers(mlp_only_layers=None, decoder_sparse_step=1) == [0, 1, 2, 3, 4]
    assert layers(num_local_experts=0) == []
    with pytest.raises(MeshError, match="num_experts_per_tok"):
        layers(num_experts_per_tok=9)
    with pytest.raises(MeshError, match="mlp_only_layers"):
        layers(mlp_only_layers=[-1])
