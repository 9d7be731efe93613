"""The verify forward on a GPU: with drafts, k = 1..8, the outputs are those without; graphs on and off."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.device_settings import TINY_SETTINGS
from support.drafting import check_same_outputs, drafter_of, drive_long, outputs_of
from support.plan_driver import OPTIONS, logprob_tolerance

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.cuda.step import verify_steps
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
NUM_OUT = 40
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_pages=2048,
    cuda_graphs=True,
    use_pdl=True,
    tune_gemm=False,
)


@pytest.mark.parametrize(("page_size", "least_chunks"), [(1, 32), (16, 32), (1, 1), (16, 1)])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_drafts_change_no_output(monkeypatch, cuda_graphs, page_size, least_chunks):
    """least_chunks: with so few rows attention is that of decodes, with 1 that of chunks."""
    monkeypatch.setattr(verify_steps, "LEAST_CHUNKS", least_chunks)
    runner = load_cuda_runner(MODEL, replace(SETTINGS, page_size=page_size, cuda_graphs=cuda_graphs))
    steps = {"chunk_len": 7, "num_steps": NUM_OUT, "num_out": NUM_OUT}
    want = drive_long(runner, lag=1, **steps)
    for max_drafts in range(1, 9):
        for share, lag in ((0.8, 1), (1.0, 2), (0.8, 0)):
            runner.verify(drafter_of(outputs_of(want), seed=max_drafts, share=share), max_drafts=max_drafts)
            runner.clear()
            got = drive_long(runner, lag=lag, **steps)
            check_same_outputs(got, want, num_out=NUM_OUT, atol=logprob_tolerance(MODEL))
            counts = np.concatenate([result.counts for result in got.results])
            assert counts.max() == max_drafts + 1, "no row had all of its drafts accepted"


REPEATING = [
    Sampling(temperature=0.0, logit_bias=((40, 80.0),)),
    Sampling(temperature=1.0, seed=3, logit_bias=((40, 80.0), (41, 80.0)), num_top_logprobs=2),
]


@pytest.mark.parametrize(("page_size", "max_drafts", "lag"), [(1, 4, 2), (16, 8, 1), (1, 1, 0)])
def test_ngrams_of_the_device_change_no_output(page_size, max_drafts, lag):
    """One output repeats a token, one is a random sequence of two; the others are as they come. In captured steps."""
    runner = load_cuda_runner(MODEL, replace(SETTINGS, page_size=page_size))
    options = [*REPEATING, *OPTIONS]
    steps = {"chunk_len": 7, "num_steps": NUM_OUT, "num_out": NUM_OUT, "options": options}
    want = drive_long(runner, lag=1, **steps)
    runner.verify(NgramDrafter(), max_drafts=max_drafts)
    runner.clear()
    got = drive_long(runner, lag=lag, **steps)
    check_same_outputs(got, want, num_out=NUM_OUT, atol=logprob_tolerance(MODEL))
    assert np.concatenate([result.counts for result in got.results]).max() == max_drafts + 1
    accepted = sum(int(result.accepted.sum()) for result in got.results)
    assert 0 < accepted < sum(int(result.drafted.sum()) for result in got.results)


def test_deterministic_mode_gives_the_same_bits():
    options = [replace(sampling, num_top_logprobs=3, prompt_logprobs=False) for sampling in OPTIONS]
    runner = load_cuda_runner(MODEL, replace(SETTINGS, dtype="bfloat16", deterministic=True))
    steps = {"chunk_len": 7, "num_steps": NUM_OUT, "num_out": NUM_OUT, "options": options}
    want = drive_long(runner, lag=1, **steps)
    for max_drafts in (1, 3, 8):
        runner.verify(drafter_of(outputs_of(want, options), seed=1, share=0.8), max_drafts=max_drafts)
        runner.clear()
        check_same_outputs(drive_long(runner, lag=1, **steps), want, num_out=NUM_OUT, atol=0.0)
