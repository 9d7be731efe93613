"""Guided decoding on a GPU: the CPU worker's tokens, with graphs and without; late masks skip rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.device_settings import TINY_SETTINGS
from support.guided_runs import FIVE_SAMPLINGS, MODEL, GuidedRun, cut, run_amid_kills, text_of

from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gpu

SCHEMA = GrammarSource(
    GrammarForm.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"enum": ["ada", "bob"]}, "ages": {"type": "array", "items": {"enum": [1, 22]}}},
            "required": ["name", "ages"],
        }
    ),
)
REGEX = GrammarSource(GrammarForm.REGEX, "(ab|c[0-9]{2}){2,6}")
SOURCES = [SCHEMA, None, REGEX, None, REGEX, SCHEMA]
SAMPLINGS = [
    *FIVE_SAMPLINGS,
    Sampling(temperature=1.0, seed=5, top_k=20, top_p=0.9),
]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    runner = load_cpu_runner(MODEL, num_pages=1024, threads=4)
    runner.mask_wait_s = None
    run = GuidedRun(runner, SOURCES, SAMPLINGS)
    run.run(NUM_TOKENS, lag=0)
    return [cut(tokens, NUM_TOKENS) for tokens in run.tokens]


@pytest.mark.parametrize(
    ("cuda_graphs", "lag", "page_size"), [(True, 0, 1), (True, 2, 16), (True, 3, 1), (False, 1, 1)]
)
def test_guided_rows_are_those_of_the_cpu_worker(expected, cuda_graphs, lag, page_size):
    settings = replace(
        TINY_SETTINGS,
        attention_backend="triton",
        num_pages=2048,
        page_size=page_size,
        cuda_graphs=cuda_graphs,
        use_pdl=True,
        tune_gemm=False,
    )
    runner = load_cuda_runner(MODEL, settings)
    run = GuidedRun(runner, SOURCES, SAMPLINGS, pages_a_slot=-(-80 // page_size))
    # Steps of a tiny model are quicker than any mask: with steps ahead most masks are late.
    run.run(NUM_TOKENS * (1 + lag) + 200, lag=lag)
    got = [cut(tokens, NUM_TOKENS) for tokens in run.tokens]
    assert got == expected, [(a, b) for a, b in zip(got, expected, strict=True) if a != b]
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0
    print({"lag": lag, "late": run.late_by_slot, "texts": [text_of(tokens) for tokens in run.tokens][:3]})


@pytest.mark.parametrize("lag", [0, 2])
def test_masks_of_processes_are_those_of_the_cpu_worker(expected, lag):
    """Memory that processes share is page-locked, and copied from."""
    settings = replace(
        TINY_SETTINGS,
        attention_backend="triton",
        num_pages=2048,
        page_size=16,
        cuda_graphs=True,
        tune_gemm=False,
        mask_processes=2,
    )
    guides = ProcessGuides(2, MODEL, "xgrammar")
    try:
        runner = load_cuda_runner(MODEL, settings)
        guides.attach(runner.masks, num_slots=8, max_total_len=runner.max_total_len)
        assert guides.wait_ready(120)
        run = GuidedRun(runner, SOURCES, SAMPLINGS, pages_a_slot=5, guides=guides)
        assert len(guides) == 4
        run_amid_kills(run, guides, expected, kill_behind=(4,), num_steps=20, lag=lag)
    finally:
        guides.close()
    got = [cut(tokens, NUM_TOKENS) for tokens in run.tokens]
    assert got == expected, [(a, b) for a, b in zip(got, expected, strict=True) if a != b]
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0


@pytest.mark.parametrize(("lag", "num_drafts"), [(0, 4), (2, 7)])
def test_chains_of_processes_are_those_of_the_cpu_worker(expected, lag, num_drafts):
    """The device reads them where processes write them, one of which is killed."""
    settings = replace(
        TINY_SETTINGS,
        attention_backend="triton",
        num_pages=2048,
        page_size=16,
        cuda_graphs=True,
        tune_gemm=False,
        mask_processes=2,
    )
    guides = ProcessGuides(2, MODEL, "xgrammar")
    try:
        runner = load_cuda_runner(MODEL, settings)
        runner.verify(NgramDrafter(), max_drafts=num_drafts, max_forced=num_drafts)
        guides.attach(runner.mask_memory, num_slots=8, max_total_len=runner.max_total_len)
        assert guides.wait_ready(120)
        run = GuidedRun(runner, SOURCES, SAMPLINGS, pages_a_slot=5, guides=guides)
        run_amid_kills(run, guides, expected, kill_behind=(4,), num_steps=5, lag=lag)
    finally:
        guides.close()
    got = [cut(tokens, NUM_TOKENS) for tokens in run.tokens]
    assert got == expected, [(a, b) for a, b in zip(got, expected, strict=True) if a != b]
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0
    print({"lag": lag, "late": run.late_by_slot, "most": run.most_tokens})


@pytest.mark.parametrize(("lag", "max_drafts", "max_forced"), [(0, 4, 4), (2, 7, 7), (2, 3, 0)])
def test_forced_drafts_change_no_output(expected, lag, max_drafts, max_forced):
    settings = replace(
        TINY_SETTINGS, attention_backend="triton", num_pages=2048, page_size=16, cuda_graphs=True, tune_gemm=False
    )
    runner = load_cuda_runner(MODEL, settings)
    runner.verify(NgramDrafter(), max_drafts=max_drafts, max_forced=max_forced)
    run = GuidedRun(runner, SOURCES, SAMPLINGS, pages_a_slot=5)
    run.run(NUM_TOKENS * (1 + lag) + 200, lag=lag)
    got = [cut(tokens, NUM_TOKENS) for tokens in run.tokens]
    assert got == expected, [(a, b) for a, b in zip(got, expected, strict=True) if a != b]
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0
    print({"lag": lag, "late": run.late_by_slot, "most": run.most_tokens})
