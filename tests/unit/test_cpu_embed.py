"""Embed tasks: the pooled hidden states of transformers, whose bits depend on neither chunks nor batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.llama_folders import TINY_LLAMA
from support.model_folders import random_model, save_model
from support.plans import admit
from support.rounding import model_tolerance
from support.segments import scattered_pages
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Chunk, Grant, StepPlan, Task
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import SampleInput, Segment

_SHAPES = ("llama", "qwen3_late_windows", "mixtral")

Load = Callable[[str], CpuRunner]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    made = {shape: save_model(random_model(shape), tmp_path_factory.mktemp(shape)) for shape in _SHAPES}
    return {**made, "tiny": TINY_LLAMA}


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Load:
    runners: dict[str, CpuRunner] = {}

    def get(shape: str) -> CpuRunner:
        if shape not in runners:
            runner = load_cpu_runner(folders[shape], num_pages=640, threads=1)
            assert isinstance(runner, CpuRunner)
            runners[shape] = runner
        runners[shape].clear()
        return runners[shape]

    return get


def _ids(runner: CpuRunner, length: int, seed: int = 0) -> IntArray:
    return as_ints(np.random.default_rng(seed).integers(0, runner.vocab_size, length))


def _segment(slot: int, ids: IntArray, start: int, end: int, pages: IntArray) -> Segment:
    return Segment(
        slot=slot,
        ids=ids[start:end],
        start=start,
        pages=pages[:end],
        task=Task.EMBED,
        is_last_chunk=end == len(ids),
    )


def _embed(runner: CpuRunner, ids: IntArray, chunk: int = 10_000) -> np.ndarray:
    pages = scattered_pages(runner, [len(ids)])[0]
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        (output,) = runner.forward([_segment(0, ids, start, end, pages)])
        assert output.token is None
        assert (output.vector is not None) == (end == len(ids))
    assert output.vector is not None and output.vector.dtype == np.float32
    return output.vector


def _hidden(folder: Path, ids: IntArray) -> np.ndarray:
    """[positions, hidden] after the final norm."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model.model(torch.from_numpy(ids).long()[None]).last_hidden_state[0].numpy()


def _config(folder: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("shape", [*_SHAPES, "tiny"])
@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (150, 150), (150, 7), (400, 128)])
def test_the_mean_equals_that_of_transformers(
    folders: dict[str, Path], load: Load, shape: str, length: int, chunk: int
) -> None:
    ids = _ids(runner := load(shape), length)
    hidden = _hidden(folders[shape], ids)
    assert hidden.std() > 0.5
    tolerance = model_tolerance(_config(folders[shape]), length, np.abs(hidden).max())
    assert np.abs(_embed(runner, ids, chunk) - hidden.mean(axis=0, dtype=np.float64)).max() <= tolerance


@pytest.mark.parametrize("chunk", [150, 7])
def test_the_last_state_equals_that_of_transformers(folders: dict[str, Path], chunk: int) -> None:
    runner = load_cpu_runner(folders["llama"], num_pages=200, threads=1, embed_pooling="last")
    assert isinstance(runner, CpuRunner)
    ids = _ids(runner, 150)
    hidden = _hidden(folders["llama"], ids)
    tolerance = model_tolerance(_config(folders["llama"]), len(ids), np.abs(hidden).max())
    assert np.abs(_embed(runner, ids, chunk) - hidden[-1]).max() <= tolerance


def test_another_pooling_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MeshError, match="cls, last, mean") as caught:
        load_cpu_runner(TINY_LLAMA, num_pages=8, threads=1, embed_pooling="max")
    assert caught.value.reason_name == "UNSUPPORTED"


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=st.sampled_from(_SHAPES), seed=st.integers(0, 1000))
def test_bits_depend_on_neither_chunks_nor_batch(load: Load, data: st.DataObject, shape: str, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=4), label="lengths")
    prompts = [_ids(load(shape), length, seed + i) for i, length in enumerate(lengths)]
    expected = [_embed(load(shape), ids) for ids in prompts]
    runner = load(shape)
    pages = scattered_pages(runner, [*lengths, 30], seed)
    # A request that generates goes along, and must neither matter nor get a vector.
    other = _ids(runner, 30, seed + 99)
    sample = SampleInput(sampling=Sampling(temperature=0.0), prompt_ids=other, output_ids=other[:0], position=30)
    neighbour = Segment(slot=9, ids=other, start=0, pages=pages[-1], sample=sample)
    computed = [0] * len(prompts)
    vectors: dict[int, np.ndarray] = {}
    while waiting := [i for i, ids in enumerate(prompts) if computed[i] < len(ids)]:
        chosen = data.draw(st.permutations(waiting), label="order")[: data.draw(st.integers(1, len(waiting)))]
        segments = []
        for i in chosen:
            end = min(computed[i] + data.draw(st.sampled_from([1, 7, 33, 64, 140]), label="chunk"), lengths[i])
            segments.append(_segment(i, prompts[i], computed[i], end, pages[i]))
            computed[i] = end
        outputs = runner.forward([*segments, neighbour])
        assert outputs[-1].vector is None and outputs[-1].token is not None
        vectors.update((i, o.vector) for i, o in zip(chosen, outputs, strict=False) if o.vector is not None)
    for i, alone in enumerate(expected):
        assert np.array_equal(vectors[i].view(np.int32), alone.view(np.int32)), i


def test_a_prompt_that_was_given_up_leaves_nothing_to_the_next_in_its_slot(load: Load) -> None:
    runner = load("tiny")
    ids, given_up = _ids(runner, 20), _ids(runner, 30, seed=5)
    expected = _embed(load("tiny"), ids)
    runner.forward([_segment(0, given_up, 0, 11, scattered_pages(runner, [30])[0])])
    assert np.array_equal(_embed(runner, ids, 6), expected)


def _plan(step_id: int, **parts: object) -> StepPlan:
    return StepPlan(epoch=1, step_id=step_id, **parts)


def test_a_plan_that_embeds_gives_one_vector_and_no_token(load: Load) -> None:
    expected = _embed(load("tiny"), ids := _ids(load("tiny"), 10))
    executor = StepExecutor(runner := load("tiny"), num_slots=4, max_tokens_per_step=64)
    executor.begin_epoch(1)
    first = executor.run(
        _plan(
            1,
            admits=(admit(2, ids.tolist(), task=Task.EMBED, max_total_len=len(ids)),),
            grants=(Grant(slot=2, pages=as_ints(range(10))),),
            chunks=(Chunk(slot=2, length=6),),
        )
    )
    assert not first.vectors and not len(first.ids)
    second = executor.run(_plan(2, chunks=(Chunk(slot=2, length=4),)))
    (vector,) = second.vectors
    assert (vector.slot, second.counts.tolist(), second.ids.tolist()) == (2, [0], [])
    assert np.array_equal(vector.values, expected)
    assert Task.EMBED in runner.tasks


def test_a_cached_prefix_is_refused_for_an_embed_task(load: Load) -> None:
    executor = StepExecutor(load("tiny"), num_slots=4, max_tokens_per_step=64)
    executor.begin_epoch(1)
    admitted = admit(2, list(range(5, 15)), task=Task.EMBED, cached_len=3, cached_pages=as_ints([0, 1, 2]))
    with pytest.raises(MeshError, match="cached_len") as caught:
        executor.run(_plan(1, admits=(admitted,)))
    assert caught.value.reason_name == "INVALID_ARGUMENT"
