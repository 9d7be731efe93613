"""The runner on a GPU against the CPU worker, which is compared with transformers elsewhere: tiny models in float32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.jobs import recited_ids
from support.model_folders import random_model, save_model
from support.plan_driver import (
    GREEDY,
    GREEDY_OPTIONS,
    PROMPTS,
    PlanDriver,
    check_same,
    drive,
    drive_hits,
    logprob_tolerance,
)

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 2048
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_pages=PAGES,
    cuda_graphs=True,
    use_pdl=True,
)


PREFIX_LEN = 288


def _cpu_runner(page_size: int, folder: Path = MODEL, max_total_len: int = 128) -> ModelRunner:
    return load_cpu_runner(
        folder,
        page_size=page_size,
        num_pages=PAGES,
        threads=4,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=max_total_len,
        embed_pooling="mean",
    )


@pytest.fixture(scope="module")
def wanted():
    return {(size, chunk): drive(_cpu_runner(size), chunk_len=chunk, lag=0) for size, chunk in ((1, 7), (16, 64))}


@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("use_pdl", [True, False])
def test_tokens_and_logprobs_are_those_of_the_cpu_worker(wanted, attention, cuda_graphs, use_pdl):
    if attention == "torch" and (cuda_graphs or use_pdl):
        pytest.skip("the torch reference reads lengths on the host")
    for (page_size, chunk_len), want in wanted.items():
        settings = replace(
            SETTINGS, attention_backend=attention, cuda_graphs=cuda_graphs, use_pdl=use_pdl, page_size=page_size
        )
        runner = load_cuda_runner(MODEL, settings)
        for lag in (0, 1, 2):
            runner.clear()
            check_same(drive(runner, chunk_len=chunk_len, lag=lag), want, atol=logprob_tolerance(MODEL))


@pytest.mark.parametrize("tune_gemm", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tuned_gemms_give_the_same_tokens(wanted, page_size, tune_gemm):
    runner = load_cuda_runner(MODEL, replace(SETTINGS, tune_gemm=tune_gemm, page_size=page_size))
    chunk_len = {1: 7, 16: 64}[page_size]
    got = drive(runner, chunk_len=chunk_len, lag=1)
    check_same(got, wanted[page_size, chunk_len], atol=logprob_tolerance(MODEL))


@pytest.mark.parametrize(("kernels", "cuda_graphs"), [("compiled", True), ("compiled", False), ("torch", True)])
def test_other_kernels_give_the_same_tokens(wanted, kernels, cuda_graphs):
    for (page_size, chunk_len), want in wanted.items():
        settings = replace(SETTINGS, kernels=kernels, cuda_graphs=cuda_graphs, page_size=page_size)
        got = drive(load_cuda_runner(MODEL, settings), chunk_len=chunk_len, lag=1)
        check_same(got, want, atol=logprob_tolerance(MODEL))


@pytest.fixture(params=["tiny-llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Heads of 32, and heads of 16 with a window of 25."""
    return MODEL if request.param == "tiny-llama" else save_model(random_model("mistral", seed=2), tmp_path)


@pytest.mark.parametrize(("attention", "cuda_graphs"), [("flashinfer", True), ("flashinfer", False), ("triton", True)])
def test_greedy_tokens_over_float16_pages_are_the_same(folder, attention, cuda_graphs):
    """In float32 but for keys and values; the largest logits lead by more than that changes them."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    for page_size, chunk_len in ((1, 7), (16, 64)):
        want = drive(_cpu_runner(page_size, folder), chunk_len=chunk_len, lag=0, options=GREEDY_OPTIONS)
        settings = replace(
            SETTINGS,
            attention_backend=attention,
            kv_dtype="float16" if attention == "triton" else "auto",
            cuda_graphs=cuda_graphs,
            page_size=page_size,
            tune_gemm=False,
        )
        runner = load_cuda_runner(folder, settings)
        for lag in (0, 1, 2):
            runner.clear()
            got = drive(runner, chunk_len=chunk_len, lag=lag, options=GREEDY_OPTIONS)
            check_same(got, want, atol=logprob_tolerance(folder, torch.float16))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
def test_rows_that_share_a_cached_prefix_go_on_as_transformers_does(attention, cuda_graphs):
    """Recitations, whose ids are those of transformers in float32."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    text = recited_ids("gettysburg-address")
    for page_size in (1, 16):

        def driven(runner: ModelRunner, lag: int) -> PlanDriver:
            return drive_hits(runner, text, prefix_len=PREFIX_LEN, num_slots=12, chunk_len=50, lag=lag)

        want = driven(_cpu_runner(page_size, max_total_len=384), 0)
        for slot, tokens in want.tokens.items():
            begin = PREFIX_LEN + 3 + slot
            assert len(tokens) > 5 and tokens == text[begin : begin + len(tokens)]
        settings = replace(
            SETTINGS,
            attention_backend=attention,
            cuda_graphs=cuda_graphs,
            page_size=page_size,
            num_slots=12,
            max_total_len=384,
            tune_gemm=False,
        )
        runner = load_cuda_runner(MODEL, settings)
        for lag in (0, 1, 2):
            runner.clear()
            pool_dtype = torch.float32 if attention == "triton" else torch.float16
            check_same(driven(runner, lag), want, atol=logprob_tolerance(MODEL, pool_dtype))


def test_deterministic_mode_does_not_depend_on_batch_or_chunks():
    runner = load_cuda_runner(MODEL, replace(SETTINGS, dtype="bfloat16", deterministic=True))
    outputs = []
    for chunk_len, alone in ((64, False), (7, False), (64, True), (1, True)):
        tokens = {}
        for group in ([slot] for slot in range(len(PROMPTS))) if alone else [range(len(PROMPTS))]:
            runner.clear()
            driver = PlanDriver(runner, lag=1)
            for slot in group:
                driver.add(slot, PROMPTS[slot], replace(GREEDY, num_top_logprobs=2), chunk_len=chunk_len, num_out=40)
            driver.finish(12)
            logprobs = {}
            for result in driver.results:
                for part in result.logprobs:
                    logprobs.setdefault(part.slot, []).extend(part.logprobs.own.tolist())
            for slot in group:
                tokens[slot] = (driver.tokens[slot][:10], logprobs[slot][:10])
        outputs.append(tokens)
    assert all(output == outputs[0] for output in outputs[1:])
