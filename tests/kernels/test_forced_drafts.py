"""Guided outputs of the GPU's runner that draft what their grammars force, on the host: the CPU worker's tokens."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.drafting import speculation_of
from support.guided_runs import FIVE_SAMPLINGS, MODEL, GuidedRun, cut, run_amid_kills

from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.drafter import Drafter, NoDrafts
from radixmesh.daemons.worker.speculation.ngram import NgramDrafter

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the runner on the host samples under Triton's interpreter; tests/gpu/test_guided_on_gpu.py is for the GPU",
)

KEYS = GrammarSource(
    GrammarForm.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"abcabc": {"enum": ["x", "yy"]}}, "required": ["abcabc"]}),
)
REGEX = GrammarSource(GrammarForm.REGEX, "(abab|c[0-9]{2}){2,3}")
SOURCES = [KEYS, None, REGEX, None, KEYS]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    runner = load_cpu_runner(MODEL, num_pages=512, threads=1)
    runner.mask_wait_s = 60.0
    run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS)
    run.run(NUM_TOKENS, lag=0)
    return [cut(tokens, NUM_TOKENS) for tokens in run.tokens]


def _runner(device: HostDevice, drafter: Drafter, max_drafts: int, max_forced: int, **changes: object) -> ModelRunner:
    settings = replace(TINY_SETTINGS, num_pages=512, **changes)  # type: ignore[arg-type]
    runner = load_device_runner(MODEL, settings, device)
    runner.verify(drafter, max_drafts=max_drafts, max_forced=max_forced)  # type: ignore[attr-defined]
    return runner


@pytest.mark.parametrize(
    ("lag", "max_drafts", "max_forced", "drafter"),
    [
        (0, 4, 4, NoDrafts()),
        (2, 3, 3, NgramDrafter()),
        pytest.param(1, 1, 0, NgramDrafter(), marks=pytest.mark.full),
        pytest.param(2, 7, 5, NoDrafts(), marks=pytest.mark.full),
    ],
)
def test_forced_drafts_change_no_output(expected, lag, max_drafts, max_forced, drafter):
    run = GuidedRun(_runner(HostDevice(), drafter, max_drafts, max_forced), SOURCES, FIVE_SAMPLINGS)
    run.run(NUM_TOKENS * (1 + lag) + 12, lag=lag)
    assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0, "a free row waits for nobody's mask"
    # The device computes a step as soon as it is launched: with steps ahead, masks are late.
    assert run.num_late > 0 or not lag
    assert run.most_tokens > min(2, max_forced) or not max_forced


def test_chains_of_processes_are_those_of_the_cpu_worker_and_outlive_them(expected):
    """Free rows draft n-grams in the same steps. A process is killed whenever its outputs have gone on a little."""
    runner = _runner(HostDevice(), NgramDrafter(), 3, 3, mask_processes=2)
    guides = ProcessGuides(2, MODEL, "xgrammar")
    memory = runner.mask_memory  # type: ignore[attr-defined]
    guides.attach(memory, num_slots=TINY_SETTINGS.num_slots, max_total_len=runner.max_total_len)
    try:
        assert guides.wait_ready(120)
        run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS, guides=guides)
        assert len(guides) == 3
        run_amid_kills(run, guides, expected, kill_behind=(1, 4), num_steps=3, lag=1)
        assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected
        assert run.late_by_slot[1] == run.late_by_slot[3] == 0, "a free row waits for nobody's process"
    finally:
        guides.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_forced_drafts_are_chains_beside_trees(expected):
    """Of rows that follow no grammar a network drafts trees, in the same steps."""
    settings = replace(TINY_SETTINGS, num_pages=512, speculation=speculation_of("eagle3", "tiny-llama", 3, topk=2))
    runner = load_device_runner(MODEL, settings, HostDevice())
    runner.verify(runner.network_drafter, max_drafts=4, max_forced=4)  # type: ignore[attr-defined]
    run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS)
    run.run(NUM_TOKENS + 12, lag=0)
    assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected
    assert run.most_tokens > 2
