"""Models divided among ranks, as threads of this process: logits, refusals, and the bits of a row."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.deepseek_folders import random_deepseek, save_deepseek
from support.family_table import examples
from support.fp8_folders import Form, write_fp8
from support.model_folders import random_model, save_model
from support.segments import Stream, scattered_pages
from support.thread_group import ThreadGroup

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.determinism import common_tiles
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.tiles import RowTiles

NUM_TOKENS = 40


def load(folder: Path, **changes: object) -> CpuRunner:
    settings = {"page_size": 4, "num_pages": 32, "threads": 1, **changes}
    runner = load_cpu_runner(folder, **settings)  # type: ignore[arg-type]
    assert isinstance(runner, CpuRunner)
    return runner


def logits_of(runner: CpuRunner, cuts: list[int]) -> np.ndarray:
    """Of one sequence, its prompt cut into chunks of these lengths."""
    runner.clear()
    ids = np.random.default_rng(0).integers(0, runner.vocab_size, NUM_TOKENS).astype(np.int32)
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [NUM_TOKENS])[0])
    parts = []
    for cut in cuts:
        parts.append(runner.logits([stream.segment(cut, 4, samples=False)])[0])
        stream.computed += cut
    return np.concatenate(parts)


def by_ranks(folder: Path, size: int, cuts: list[int], **changes: object) -> list[np.ndarray]:
    """Logits on every rank."""

    def rank(number: int) -> np.ndarray:
        runner = load(folder, group=group.groups[number], **changes)
        runner.formed()
        return logits_of(runner, cuts)

    with closing(ThreadGroup(size)) as group:
        return group.run(rank)


# Of these the ranks would need sums between heads, or pieces of tensors that slices do not name.
REFUSED = {"Olmo2ForCausalLM", "GPTNeoXForCausalLM", "GptOssForCausalLM"}


@pytest.mark.parametrize("architecture", sorted(examples()))
def test_every_architecture_has_the_logits_of_one_rank(architecture: str, tmp_path: Path) -> None:
    """Or says that it is not divided."""
    folder = tmp_path / "model"
    examples()[architecture]().save_pretrained(folder)
    if architecture in REFUSED:
        with pytest.raises(MeshError, match="--tp-size 1"):
            by_ranks(folder, 2, [NUM_TOKENS], is_deterministic=False)
        return
    alone = logits_of(load(folder, is_deterministic=False), [NUM_TOKENS])
    first, second = by_ranks(folder, 2, [NUM_TOKENS], is_deterministic=False)
    assert np.array_equal(first, second)
    assert np.abs(first - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


@pytest.mark.parametrize(
    ("model", "size"),
    [
        pytest.param("llama", 2, marks=pytest.mark.full),
        ("llama", 3),
        ("llama", 4),
        ("deepseek", 2),
        pytest.param("deepseek", 4, marks=pytest.mark.full),
    ],
)
def test_a_row_has_the_same_bits_in_every_chunk_and_on_every_rank(model: str, size: int, tmp_path: Path) -> None:
    """Three ranks: uneven shares. Four ranks of llama: KV heads are on two ranks each."""
    if model == "llama":
        folder = save_model(random_model("llama"), tmp_path)
    else:
        folder = save_deepseek(random_deepseek("v3_groups"), tmp_path)
    ranks = by_ranks(folder, size, [NUM_TOKENS])
    assert all(np.array_equal(ranks[0], other) for other in ranks[1:])
    again = by_ranks(folder, size, [1, 2, 7, 13, 17])
    assert all(np.array_equal(ranks[0], other) for other in again)
    alone = logits_of(load(folder), [NUM_TOKENS])
    assert np.abs(ranks[0] - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
def test_experts_are_cut_in_both_layouts_of_a_checkpoint(model: str, is_fused: bool, tmp_path: Path) -> None:
    if model == "mixtral":
        folder = save_model(random_model("mixtral"), tmp_path, is_fused=is_fused)
    else:
        folder = save_deepseek(random_deepseek("v3_groups"), tmp_path, is_fused=is_fused)
    alone = logits_of(load(folder, is_deterministic=False), [NUM_TOKENS])
    for logits in by_ranks(folder, 2, [NUM_TOKENS], is_deterministic=False):
        assert np.abs(logits - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


def test_ranks_that_verified_other_tiles_agree_on_those_of_all(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)

    def rank(number: int) -> tuple[object, int]:
        runner = load(folder, group=group.groups[number])
        functions = [probe.function for probe in runner.model.row_probes()]
        sizes = (4, 8, 32) if number else (2, 8, 32, 64)
        runner.own_tiles = RowTiles(sizes, [functions[number]])
        runner.formed()
        assert runner.tiles.row_by_row == {functions[0], functions[1]}
        by_row = [functions.index(function) for function in runner.tiles.row_by_row]
        logits_of(runner, [NUM_TOKENS])
        return runner.tiles.sizes, len(by_row)

    with closing(ThreadGroup(2)) as group:
        assert group.run(rank) == [((8, 32), 2)] * 2


@pytest.mark.parametrize(("sizes", "agreed"), [(((2, 4), (8, 16)), (1,)), (((2, 4), None), None)])
def test_ranks_without_common_tiles(sizes: tuple[object, object], agreed: object) -> None:
    def rank(number: int) -> object:
        return common_tiles(RowTiles(sizes[number]), [], group.groups[number]).sizes  # type: ignore[arg-type]

    with closing(ThreadGroup(2)) as group:
        assert group.run(rank) == [agreed] * 2


def test_ranks_of_different_builds_meet_in_no_other_collective() -> None:
    """Over gloo a collective of other shapes ends a process, or gives numbers that nobody sent."""

    def rank(number: int) -> object:
        functions = [lambda x: x] * (2 + number)
        with pytest.raises(CollectiveAborted, match=r"not of one build, their row functions are \[10, 11\]"):
            common_tiles(RowTiles((2, 4)), functions, group.groups[number])
        return group.groups[number].communicator.num_calls  # type: ignore[union-attr]

    with closing(ThreadGroup(2)) as group:
        assert group.run(rank) == [1, 1]


@settings(max_examples=12, deadline=None)
@given(
    num_kv_heads=st.sampled_from((1, 2, 3)),
    group=st.sampled_from((1, 2, 4)),
    mlp_size=st.integers(8, 50),
    vocab_size=st.integers(60, 130),
    is_tied=st.booleans(),
    num_ranks=st.integers(2, 4),
    cuts=st.sampled_from(([NUM_TOKENS], [13, 27], [1, 38, 1])),
)
def test_any_sizes_over_any_number_of_ranks(
    num_kv_heads: int, group: int, mlp_size: int, vocab_size: int, is_tied: bool, num_ranks: int, cuts: list[int]
) -> None:
    changes = {
        "num_hidden_layers": 2,
        "num_attention_heads": num_kv_heads * group,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8,
        "intermediate_size": mlp_size,
        "vocab_size": vocab_size,
        "tie_word_embeddings": is_tied,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(random_model("llama", **changes), Path(name))
        if num_ranks > num_kv_heads * group:
            with pytest.raises(MeshError, match="--tp-size of at most"):
                by_ranks(folder, num_ranks, cuts, is_deterministic=False)
            return
        try:
            ranks = by_ranks(folder, num_ranks, cuts, is_deterministic=False)
        except MeshError as error:
            # Ranks share a KV head unevenly: one of them would have no query head.
            assert "--tp-size of at most" in str(error) and num_ranks > num_kv_heads
            return
        alone = logits_of(load(folder, is_deterministic=False), cuts)
    assert all(np.array_equal(ranks[0], other) for other in ranks[1:])
    assert np.abs(ranks[0] - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


@given(st.lists(st.sets(st.sampled_from((2, 4, 8, 16, 32, 64, 128)), min_size=1), min_size=2, max_size=4))
def test_common_tiles_are_verified_on_every_rank(sizes: list[set[int]]) -> None:
    with closing(ThreadGroup(len(sizes))) as group:
        agreed = group.run(lambda rank: common_tiles(RowTiles(tuple(sizes[rank])), [], group.groups[rank]).sizes)
    common = set.intersection(*sizes)
    assert agreed == [tuple(sorted(common)) or (1,)] * len(sizes)


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    folder = save_model(random_model("llama"), tmp_path)
    with pytest.raises(MeshError, match="set a --tp-size of at most 4"):
        by_ranks(folder, 5, [NUM_TOKENS])


def test_blocks_of_fp8_bound_the_cuts(tmp_path: Path) -> None:
    plain = save_model(
        random_model("llama", hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=4),
        tmp_path,
    )
    folder = write_fp8(plain, tmp_path / "fp8", Form.BLOCK)
    alone = logits_of(load(folder, is_deterministic=False), [NUM_TOKENS])
    for logits in by_ranks(folder, 2, [NUM_TOKENS], is_deterministic=False):
        assert np.abs(logits - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_quantise_their_heads_by_the_scales_of_these(size: int, tmp_path: Path) -> None:
    """By the first head's scales much is clamped, by the second one's nothing: heads are not mixed up. Four ranks share
    two KV heads."""
    folder = save_model(random_model("qwen3", seed=3), tmp_path / "qwen")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(json.loads((folder / "config.json").read_text())["num_hidden_layers"]):
        for plane in "kv":
            tensors[f"model.layers.{layer}.self_attn.{plane}_scale"] = torch.tensor([0.0005, 0.05])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected, cuts = load(folder, kv_dtype="fp8"), [25, 1, 14]
    want, unscaled = logits_of(expected, cuts), logits_of(load(folder), cuts)
    assert np.abs(want - unscaled).max() > 0.1 * np.abs(unscaled).max(), "clamped"
    for logits in by_ranks(folder, size, cuts, kv_dtype="fp8"):
        # A number may be rounded to its neighbour.
        np.testing.assert_allclose(logits, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_ranks_with_other_rows_than_their_kv_says_are_other_models(tmp_path: Path) -> None:
    """gloo ends a process that gets more bytes than it expects, so such ranks must never meet."""
    folder = save_model(random_model("llama"), tmp_path)

    def model(dtype: str) -> tuple[str, str]:
        settings = WorkerSettings(
            backend=Backend.CPU, model=folder, num_pages=8, cpu_threads=1, dtype=dtype, kv_dtype="fp8"
        )
        loaded = load_model(settings)
        return loaded.runner.kv_dtype, loaded.identity.model_fingerprint

    assert model("float32") == model("auto")
    assert model("float32")[0] == model("bfloat16")[0] and model("float32")[1] != model("bfloat16")[1]
