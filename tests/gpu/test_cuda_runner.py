"""The runner on a GPU against the CPU worker, which is compared with transformers elsewhere: tiny models in float32."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.plan_driver import GREEDY, PROMPTS, PlanDriver, check_same, drive

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_cuda_runner
from radixmesh.daemons.worker.cuda.triton_attention import TritonAttention
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 2048
SETTINGS = DeviceSettings(
    dtype="float32",
    attention_backend="triton",
    load_format="auto",
    page_size=1,
    num_pages=PAGES,
    num_slots=8,
    max_tokens_per_step=64,
    max_total_len=128,
    mem_fraction=0.5,
    cuda_graphs=True,
    use_pdl=True,
    deterministic=False,
)


def _cpu_runner(page_size: int) -> ModelRunner:
    return load_cpu_runner(
        MODEL,
        page_size=page_size,
        num_pages=PAGES,
        threads=4,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=128,
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
            check_same(drive(runner, chunk_len=chunk_len, lag=lag), want)


def test_attention_that_begins_under_the_rotation_gives_the_same_tokens(wanted, monkeypatch):
    """As that of 16 rows and more does; here of any number."""
    monkeypatch.setattr(TritonAttention, "least_pdl_rows", 1)
    for (page_size, chunk_len), want in wanted.items():
        runner = load_cuda_runner(MODEL, replace(SETTINGS, page_size=page_size))
        check_same(drive(runner, chunk_len=chunk_len, lag=1), want)


@pytest.mark.parametrize("tune_products", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_tuned_products_give_the_same_tokens(wanted, page_size, tune_products):
    runner = load_cuda_runner(MODEL, replace(SETTINGS, tune_products=tune_products, page_size=page_size))
    chunk_len = {1: 7, 16: 64}[page_size]
    check_same(drive(runner, chunk_len=chunk_len, lag=1), wanted[page_size, chunk_len])


@pytest.mark.parametrize(("kernels", "cuda_graphs"), [("compiled", True), ("compiled", False), ("torch", True)])
def test_other_kernels_give_the_same_tokens(wanted, kernels, cuda_graphs):
    for (page_size, chunk_len), want in wanted.items():
        settings = replace(SETTINGS, kernels=kernels, cuda_graphs=cuda_graphs, page_size=page_size)
        check_same(drive(load_cuda_runner(MODEL, settings), chunk_len=chunk_len, lag=1), want)


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
