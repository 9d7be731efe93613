"""Tiny DeepSeek and routed decoders on a GPU against the CPU worker, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.deepseek_folders import TINY_DEEPSEEK
from support.device_settings import TINY_SETTINGS
from support.model_folders import random_model, save_model
from support.plan_driver import check_same, drive, logprob_tolerance

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.gpu

_SETTINGS = replace(
    TINY_SETTINGS, attention_backend="triton", num_pages=2048, max_total_len=128, cuda_graphs=True, use_pdl=True
)


def _cpu_runner(folder: Path, page_size: int) -> ModelRunner:
    return load_cpu_runner(
        folder,
        page_size=page_size,
        num_pages=2048,
        threads=4,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=128,
        embed_pooling="mean",
    )


@pytest.fixture(params=["deepseek", "mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "deepseek":
        return TINY_DEEPSEEK
    return save_model(random_model(request.param, seed=3), tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_and_logprobs_are_those_of_the_cpu_worker(folder: Path, cuda_graphs: bool, deterministic: bool) -> None:
    """Chunks, decodes and 0 to 2 steps ahead, by pages of 1 and of 16 tokens."""
    for page_size, chunk_len in ((1, 7), (16, 64)):
        want = drive(_cpu_runner(folder, page_size), chunk_len=chunk_len, lag=0)
        settings = replace(_SETTINGS, page_size=page_size, cuda_graphs=cuda_graphs, deterministic=deterministic)
        runner = load_cuda_runner(folder, settings)
        for lag in (0, 1, 2):
            runner.clear()
            check_same(drive(runner, chunk_len=chunk_len, lag=lag), want, atol=logprob_tolerance(folder))
