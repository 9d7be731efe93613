"""Embed and score tasks on a GPU, in captured steps and others: the vectors and scores of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.device_tasks import PAGE_SIZE, check, hidden, prompts, vectors
from support.model_folders import random_model

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cuda.load import load_cuda_runner

pytestmark = pytest.mark.gpu

_SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    page_size=PAGE_SIZE,
    num_slots=3,
    max_total_len=80,
    use_pdl=True,
    tune_gemm=False,
)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_vectors_are_the_mean_of_hidden_states(cuda_graphs: bool, tmp_path: Path) -> None:
    model = random_model("qwen3")
    model.save_pretrained(tmp_path)
    runner = load_cuda_runner(tmp_path, replace(_SETTINGS, cuda_graphs=cuda_graphs))
    want = [hidden(model, ids).mean(0) for ids in prompts()]
    for chunk_len in (7, 19):
        check(vectors(runner, Task.EMBED, chunk_len), want, model)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_scores_are_those_of_transformers(cuda_graphs: bool, tmp_path: Path) -> None:
    model = random_model("qwen2_scoring")
    model.save_pretrained(tmp_path)
    runner = load_cuda_runner(tmp_path, replace(_SETTINGS, cuda_graphs=cuda_graphs))
    with torch.inference_mode():
        want = [model(torch.from_numpy(ids).long()[None]).logits[0] for ids in prompts()]
    check(vectors(runner, Task.SCORE, 19), want, model)
