"""Families that are a config and names of Llama's decoder, against transformers in float32 through the CPU runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import family_table
from support.family_folders import FAMILIES, family_folder, family_model
from support.segments import Stream, generate, scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.models.registry import model_families

_LENGTH = 90
_PAGE_SIZE = 8
# In float32; what the table in docs/models.md promises.
_TOLERANCE = 1e-4
_REWRITE = "the table in docs/models.md is old: PYTHONPATH=tests python -m support.family_table"


class Loaded(NamedTuple):
    model: PreTrainedModel
    folder: Path
    runner: CpuRunner


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Families by name, each made and loaded once."""
    torch.set_num_threads(1)
    loaded: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        if name not in loaded:
            model = family_model(name)
            folder = family_folder(model, tmp_path_factory.mktemp(name))
            loaded[name] = Loaded(model, folder, _runner(folder, page_size=_PAGE_SIZE, num_pages=64))
        loaded[name].runner.clear()
        return loaded[name]

    return get


def _runner(folder: Path, **settings: object) -> CpuRunner:
    runner = load_cpu_runner(folder, threads=1, **settings)  # type: ignore[arg-type]
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    return runner


def _prompt(runner: CpuRunner, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, length).astype(np.int32)


def _expected(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert logits.std() > 0.3, "a test on flat logits would show nothing"
    return logits


def _logits(runner: CpuRunner, ids: np.ndarray, chunk: int) -> np.ndarray:
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [len(ids)], seed=chunk)[0])
    parts = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        parts += runner.logits([stream.segment(length, runner.page_size, samples=False)])
        stream.computed += length
    return np.concatenate(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(load: Callable[[str], Loaded], name: str) -> None:
    model, _, runner = load(name)
    ids = _prompt(runner, _LENGTH)
    expected, whole = _expected(model, ids), _logits(runner, ids, _LENGTH)
    assert np.abs(whole - expected).max() <= _TOLERANCE
    # A row's bits depend on its own sequence alone.
    for chunk in (33, 7):
        assert np.array_equal(_logits(runner, ids, chunk).view(np.int32), whole.view(np.int32)), chunk


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_equal_those_of_transformers_with_a_cached_prefix(load: Callable[[str], Loaded], name: str) -> None:
    model, _, runner = load(name)
    shared = 3 * _PAGE_SIZE
    first = _prompt(runner, 40)
    second = np.concatenate((first[:shared], _prompt(runner, 30, seed=1)))
    pages = scattered_pages(runner, [len(prompt) + 64 for prompt in (first, second)])
    pages[1][:3] = pages[0][:3]
    streams = [Stream(slot, prompt.tolist(), pages[slot]) for slot, prompt in enumerate((first, second))]
    generate(runner, streams[:1], 4, chunk=11)
    # The second begins behind the prefix that the first has computed.
    streams[1].computed = shared
    generate(runner, streams, 64, chunk=11)
    for stream in streams:
        ids = torch.from_numpy(stream.prompt).long()[None]
        with torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert stream.output == expected[0, len(stream.prompt) :].tolist()


def test_longrope_takes_the_short_factors_where_no_sequence_is_longer_than_the_original(
    load: Callable[[str], Loaded],
) -> None:
    model, folder, long = load("phi4_longrope")
    short = _runner(folder, max_total_len=32, num_pages=64)
    ids = _prompt(short, 32)
    expected = _expected(model, ids)
    assert np.abs(_logits(short, ids, 9) - expected).max() <= _TOLERANCE
    # A worker that serves longer sequences has the long ones for all of them, as keys are shared.
    assert np.abs(_logits(long, ids, 32) - expected).max() > 100 * _TOLERANCE


def test_workers_with_other_factors_of_longrope_are_other_models(load: Callable[[str], Loaded]) -> None:
    folder = load("phi4_longrope").folder

    def fingerprint(max_total_len: int | None) -> str:
        settings = WorkerSettings(
            listen="127.0.0.1:0", model=folder, num_pages=64, cpu_threads=1, max_total_len=max_total_len
        )
        return load_model(settings).identity.model_fingerprint

    assert fingerprint(32) != fingerprint(33) == fingerprint(None)


@pytest.mark.parametrize("name", ["qwen2_moe", "llama4"])
def test_experts_and_the_shared_mlp_have_the_activation_of_the_config(name: str, tmp_path: Path) -> None:
    model = family_model(name, hidden_act="gelu")
    runner = _runner(family_folder(model, tmp_path), num_pages=64)
    ids = _prompt(runner, 40)
    expected = _expected(model, ids)
    assert np.abs(_logits(runner, ids, 9) - expected).max() <= _TOLERANCE
    silu = _expected(family_model(name), ids)
    assert np.abs(silu - expected).max() > 100 * _TOLERANCE, "the activation is to matter"


@pytest.mark.parametrize("name", ["qwen2_moe", "llama4"])
def test_a_gpu_refuses_experts_of_an_activation_that_its_kernels_lack(name: str, tmp_path: Path) -> None:
    for activation in ("silu", "swish"):
        family_table.check_on_gpu(family_folder(family_model(name, hidden_act=activation), tmp_path / activation))
    with pytest.raises(MeshError, match=r"routed experts with gelu.*use --backend cpu") as refused:
        family_table.check_on_gpu(family_folder(family_model(name, hidden_act="gelu"), tmp_path / "gelu"))
    assert refused.value.reason_name == "UNSUPPORTED"


def test_gpt2_loads_without_the_prefix_that_its_first_checkpoint_lacks(
    load: Callable[[str], Loaded], tmp_path: Path
) -> None:
    _, folder, runner = load("gpt2")
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    ids = _prompt(runner, 20)
    assert np.array_equal(_logits(_runner(tmp_path, num_pages=64), ids, 20), _logits(runner, ids, 20))


def test_the_table_of_families_names_all_and_counts_their_lines() -> None:
    rows, known = family_table.rows_of_page(), model_families().names
    generating = {name for name in known if not name.endswith("ForSequenceClassification")}
    assert set(rows) == generating == set(family_table.examples()), "a family has no example or no row"
    for row in rows.values():
        assert row.lines == family_table.num_lines(row.folder), f"{row}: {_REWRITE}"
        assert row.folder == family_table.folders()[row.architecture] and row.difference <= _TOLERANCE
        assert row.equal_ids == family_table.NUM_IDS, f"{row}: ids that transformers does not give"
        assert row.lines < 150 or row.folder == "deepseek", f"{row}: a family is a config and a mapping"


@pytest.mark.parametrize("architecture", family_table.examples())
def test_the_table_of_families_says_where_each_runs(architecture: str, tmp_path: Path) -> None:
    row = family_table.rows_of_page()[architecture]
    family_table.examples()[architecture]().save_pretrained(tmp_path)
    assert row.gpu == family_table.runs_on_gpu(tmp_path), _REWRITE
    assert row.fallback == family_table.runs_by_transformers(tmp_path), _REWRITE
