"""Score tasks: the logit that transformers gives a prompt's last token, the same bits over any chunks and batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.model_folders import SCORING_SHAPES, random_model, save_model
from support.plans import admit
from support.rounding import model_tolerance
from support.segments import scattered_pages
from transformers import PreTrainedModel

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Chunk, Grant, StepPlan, Task
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import Segment


@pytest.fixture(scope="module", params=SCORING_SHAPES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    torch.set_num_threads(1)
    model = random_model(request.param)
    return model, save_model(model, tmp_path_factory.mktemp(request.param))


def _load(folder: Path) -> CpuRunner:
    runner = load_cpu_runner(folder, num_pages=640, threads=1)
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    runner.clear()
    return runner


def _prompts(runner: CpuRunner) -> list[IntArray]:
    generator = np.random.default_rng(0)
    return [as_ints(generator.integers(0, runner.vocab_size, length)) for length in (1, 150, 37, 90)]


def _score(runner: CpuRunner, prompts: list[IntArray], chunk: int) -> np.ndarray:
    """All prompts together, a chunk of each at a time."""
    pages = scattered_pages(runner, [len(ids) for ids in prompts], seed=chunk)
    scores = np.full(len(prompts), np.nan, np.float32)
    for start in range(0, max(len(ids) for ids in prompts), chunk):
        going = [i for i, ids in enumerate(prompts) if start < len(ids)]
        segments = []
        for i in going:
            end = min(start + chunk, len(prompts[i]))
            is_last = end == len(prompts[i])
            ids, at = prompts[i][start:end], pages[i][:end]
            segments.append(Segment(slot=i, ids=ids, start=start, pages=at, task=Task.SCORE, is_last_chunk=is_last))
        for i, segment, output in zip(going, segments, runner.forward(segments), strict=True):
            assert output.token is None and (output.vector is not None) == segment.is_last_chunk
            if output.vector is not None:
                assert output.vector.shape == (1,) and output.vector.dtype == np.float32
                scores[i] = output.vector[0]
    return scores


def test_scores_equal_those_of_transformers_over_any_chunks(oracle: tuple[PreTrainedModel, Path]) -> None:
    model, folder = oracle
    runner = _load(folder)
    prompts = _prompts(runner)
    with torch.inference_mode():
        expected = [float(model(torch.from_numpy(ids).long()[None]).logits[0, 0]) for ids in prompts]
    assert np.std(expected) > 0.2
    whole = _score(runner, prompts, 1000)
    assert np.abs(whole - expected).max() <= model_tolerance(model.config, 150, np.abs(expected).max())
    for chunk in (64, 7, 1):
        assert np.array_equal(_score(runner, prompts, chunk).view(np.int32), whole.view(np.int32)), chunk
    for ids, score in zip(prompts, whole, strict=True):
        assert _score(runner, [ids], 33)[0] == score


def test_what_scores_can_embed_and_does_not_generate(oracle: tuple[PreTrainedModel, Path]) -> None:
    model, folder = oracle
    runner = _load(folder)
    assert runner.tasks == {Task.EMBED, Task.SCORE}
    executor = StepExecutor(runner, num_slots=4, max_tokens_per_step=256)
    executor.begin_epoch(1)
    with pytest.raises(MeshError, match="GENERATE") as caught:
        executor.run(StepPlan(epoch=1, step_id=1, admits=(admit(2, [5, 6], max_total_len=10),)))
    assert caught.value.reason_name == "UNSUPPORTED"
    ids = _prompts(runner)[2]
    result = executor.run(
        StepPlan(
            epoch=1,
            step_id=1,
            admits=tuple(
                admit(slot, ids.tolist(), task=task, max_total_len=len(ids))
                for slot, task in ((1, Task.EMBED), (2, Task.SCORE))
            ),
            grants=tuple(Grant(slot=slot, pages=as_ints(range(40 * slot, 40 * slot + 37))) for slot in (1, 2)),
            chunks=(Chunk(slot=1, length=37), Chunk(slot=2, length=37)),
        )
    )
    with torch.inference_mode():
        hidden = model.model(torch.from_numpy(ids).long()[None]).last_hidden_state[0].numpy()
    vectors = {vector.slot: vector.values for vector in result.vectors}
    tolerance = model_tolerance(model.config, len(ids), np.abs(hidden).max())
    assert np.abs(vectors[1] - hidden.mean(axis=0)).max() <= tolerance
    assert vectors[2][0] == _score(runner, [ids], 1000)[0]
    assert result.counts.tolist() == [0, 0] and not len(result.ids)


def test_more_labels_than_one_are_refused(oracle: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    folder = save_model(oracle[0], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(MeshError, match="id2label") as caught:
        _load(folder)
    assert caught.value.reason_name == "UNSUPPORTED"
