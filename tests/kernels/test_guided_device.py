"""Guided outputs of the GPU's runner, on the host: the CPU worker's tokens, whichever masks come late."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.guided_runs import FIVE_SAMPLINGS, MODEL, GuidedRun, cut, run_amid_kills, text_of
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from radixmesh.daemons.worker.runner import ModelRunner

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the runner on the host samples under Triton's interpreter; tests/gpu/test_guided_on_gpu.py is for the GPU",
)

SCHEMA = GrammarSource(
    GrammarForm.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}),
)
REGEX = GrammarSource(GrammarForm.REGEX, "(ab|c[0-9]{2}){2,3}")
SOURCES = [SCHEMA, None, REGEX, None, REGEX]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    runner = load_cpu_runner(MODEL, num_pages=512, threads=1)
    runner.mask_wait_s = None
    run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS)
    run.run(NUM_TOKENS, lag=0)
    assert not run.num_late
    return [cut(tokens, NUM_TOKENS) for tokens in run.tokens]


def _runner(device: HostDevice, **changes: object) -> ModelRunner:
    settings = replace(TINY_SETTINGS, num_pages=512, **changes)  # type: ignore[arg-type]
    return load_device_runner(MODEL, settings, device)


def _told_when_collected(runner: ModelRunner) -> ModelRunner:
    """Masks are filled once a step is collected, `lag` steps behind its launch."""
    launch = runner.launch

    def launched(*arguments):
        step = launch(*arguments)
        step.tokens = None
        return step

    runner.launch = launched  # type: ignore[method-assign]
    return runner


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_guided_rows_are_those_of_the_cpu_worker_however_late_their_masks_are(expected, lag):
    run = GuidedRun(_told_when_collected(_runner(HostDevice())), SOURCES, FIVE_SAMPLINGS)
    run.run(NUM_TOKENS * (1 + lag) + 25, lag=lag)
    assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected
    # The device computes a step as soon as it is launched: with steps ahead, every other mask is late.
    assert run.num_late > (NUM_TOKENS // 2 if lag else -1)
    assert run.late_by_slot[1] == run.late_by_slot[3] == 0, "a free row waits for nobody's mask"
    for slot in (2, 4):
        if len(expected[slot]) < NUM_TOKENS:
            assert re.fullmatch("(ab|c[0-9]{2}){2,3}", text_of(run.tokens[slot]))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_masks_of_steps_that_are_followed_at_once_are_those_of_the_cpu_worker(expected, lag):
    run = GuidedRun(_runner(HostDevice()), SOURCES, FIVE_SAMPLINGS)
    deadline = time.monotonic() + 200
    while any(len(tokens) < len(wanted) for tokens, wanted in zip(run.tokens, expected, strict=True)):
        assert time.monotonic() < deadline, run.tokens
        run.run(5, lag=lag)
    assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected


def test_masks_are_there_before_their_steps_are_collected():
    """The step thread may be at other work when the device has told a step's tokens."""
    runner = _runner(HostDevice())
    run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS)
    run.run(2, lag=0)
    positions = runner.masks.positions  # type: ignore[attr-defined]
    before, steps = positions.copy(), []
    for _ in range(12):
        steps.append(run.steps.executor.launch(run.steps.plan()))
        run.steps.next_step += 1
    deadline = time.monotonic() + 100
    # One more may have been on its way from a step that was collected.
    while not (positions > before + 1).any():
        assert time.monotonic() < deadline, "nobody follows a step that is not collected"
        time.sleep(0.01)
    for step in steps:
        step.result()


def test_masks_of_processes_are_those_of_the_cpu_worker_and_outlive_them(expected):
    """A process is killed whenever its outputs have gone on a little."""
    runner = _runner(HostDevice(), mask_processes=2)
    guides = ProcessGuides(2, MODEL, "xgrammar")
    guides.attach(runner.masks, num_slots=8, max_total_len=runner.max_total_len)  # type: ignore[attr-defined]
    assert guides.wait_ready(120)
    try:
        run = GuidedRun(runner, SOURCES, FIVE_SAMPLINGS, guides=guides)
        assert len(guides) == 3
        run_amid_kills(run, guides, expected, kill_behind=(2, 5), num_steps=5, lag=1)
        assert [cut(tokens, NUM_TOKENS) for tokens in run.tokens] == expected
        assert run.late_by_slot[1] == run.late_by_slot[3] == 0, "a free row waits for nobody's process"
    finally:
        guides.close()


def test_captured_steps_read_masks_anew(expected):
    device = ReplayingDevice()
    runner = _runner(device, cuda_graphs=True, attention_backend="triton")
    runner.warm_up()  # type: ignore[attr-defined]
    device.replayed.clear()
    run = GuidedRun(runner, SOURCES[:3], FIVE_SAMPLINGS[:3])
    run.run(26, lag=1)
    assert device.replayed and run.num_late
    assert [cut(tokens, NUM_TOKENS)[:6] for tokens in run.tokens] == [tokens[:6] for tokens in expected[:3]]
