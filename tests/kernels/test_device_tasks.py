"""Embed and score tasks of a device's runner: the vectors and scores of transformers, over any chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.device_tasks import PAGE_SIZE, PAGES, check, hidden, prompts, vectors
from support.model_folders import random_model

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.runner import Segment

_SETTINGS = replace(TINY_SETTINGS, page_size=PAGE_SIZE, num_pages=60, num_slots=3, max_total_len=80)


def _runner(folder: Path, **changes: object) -> DeviceRunner:
    runner = load_device_runner(folder, replace(_SETTINGS, **changes), HostDevice())  # type: ignore[arg-type]
    assert isinstance(runner, DeviceRunner)
    return runner


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_pooled_hidden_states(pooling: str, tmp_path: Path) -> None:
    model = random_model("qwen3")
    model.save_pretrained(tmp_path)
    runner = _runner(tmp_path, embed_pooling=pooling)
    assert runner.tasks == {Task.EMBED, Task.GENERATE}
    states = [hidden(model, ids) for ids in prompts()]
    want = [rows.mean(0) if pooling == "mean" else rows[-1] for rows in states]
    for chunk_len in (7, 64):
        check(vectors(runner, Task.EMBED, chunk_len), want, model)


@pytest.mark.parametrize("shape", ["llama_scoring", "qwen2_scoring"])
def test_scores_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = random_model(shape)
    model.save_pretrained(tmp_path)
    runner = _runner(tmp_path)
    runner.warm_up()
    assert runner.tasks == {Task.EMBED, Task.SCORE}
    with torch.inference_mode():
        want = [model(torch.from_numpy(ids).long()[None]).logits[0] for ids in prompts()]
    for chunk_len in (7, 64):
        check(vectors(runner, Task.SCORE, chunk_len), want, model)


def test_a_prompt_begins_anew_in_the_slot_of_one_that_was_aborted(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    runner = _runner(tmp_path)
    pages = np.arange(PAGES, dtype=np.int32)
    rows = replace(no_rows(), page_tables=pages[None], num_pages=np.full(1, PAGES, np.int32))
    aborted = Segment(slot=0, ids=prompts()[1][:20], start=0, pages=pages, task=Task.EMBED, is_last_chunk=False)
    assert runner.launch(rows, [aborted], 0).result().segments[0].vector is None
    want = [hidden(model, ids).mean(0) for ids in prompts()]
    check(vectors(runner, Task.EMBED, 64), want, model)


def test_an_unknown_pooling_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(MeshError, match="embed pooling"):
        _runner(tmp_path, embed_pooling="max")
