"""Graphs of a worker alone that are captured between steps, by a device that replays on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from support.decode_alone import PAGES_OF_SLOT, decode_alone
from support.device_settings import TINY_SETTINGS
from support.replaying_device import ReplayingDevice

from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step import late_captures

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
SLOTS, ROWS = 40, 20
# Instead of 64, which take a minute here.
PADDED_STEPS = 5
FIRST, REST = [1, 2, 4, 8, 16, 32, 40], [24]


@pytest.fixture(autouse=True)
def padded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_captures, "PADDED_STEPS", PADDED_STEPS)


def _runner(device: ReplayingDevice, *, captures_late: bool) -> DeviceRunner:
    settings = replace(
        TINY_SETTINGS, num_slots=SLOTS, num_pages=SLOTS * PAGES_OF_SLOT, max_tokens_per_step=64, cuda_graphs=True
    )
    runner = load_device_runner(MODEL, settings, device)
    runner.warm_up(captures_late=captures_late)
    return runner


@pytest.mark.parametrize("lag", [0, 3])
def test_a_size_that_comes_often_is_captured_between_steps_and_no_token_differs(lag: int) -> None:
    device, other = ReplayingDevice(), ReplayingDevice()
    runner, whole = _runner(device, captures_late=True), _runner(other, captures_late=False)
    graphs = runner.forwards.decodes.graphs
    assert sorted(graphs.captured_sizes) == FIRST
    assert sorted(whole.forwards.decodes.graphs.captured_sizes) == sorted(FIRST + REST)
    device.replayed.clear()
    tokens = decode_alone(runner, ROWS, PADDED_STEPS + 10, lag=lag)
    assert tokens == decode_alone(whole, ROWS, PADDED_STEPS + 10, lag=lag)
    assert len({tuple(step) for step in tokens}) > 2, "tokens that are all the same would show nothing"
    assert sorted(graphs.captured_sizes) == sorted(FIRST + REST)
    # The one more is the first replay of the new graph, a part of its capture.
    replayed = [shape[0] for shape in device.replayed]
    assert replayed == [32] * PADDED_STEPS + [32, 24] + [24] * 9
    assert runner.forwards.late_size(ROWS) is None


def test_a_graph_that_cannot_be_captured_leaves_steps_with_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReplayingDevice()
    runner = _runner(device, captures_late=True)

    def fail(work: object) -> None:
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(device, "capture", fail)
    device.replayed.clear()
    tokens = decode_alone(runner, ROWS, PADDED_STEPS + 10, lag=0)
    assert sorted(runner.forwards.decodes.graphs.captured_sizes) == FIRST
    assert [shape[0] for shape in device.replayed] == [32] * (PADDED_STEPS + 10)
    assert len(tokens) == PADDED_STEPS + 10


def test_rows_of_sizes_that_are_there_and_larger_ones_capture_nothing() -> None:
    device = ReplayingDevice()
    runner = _runner(device, captures_late=True)
    for num_rows in (16, 32, 33, 40) * PADDED_STEPS:
        assert runner.forwards.late_size(num_rows) is None


def test_a_step_that_has_its_graph_waits_for_no_capture() -> None:
    device = ReplayingDevice()
    runner = _runner(device, captures_late=True)
    graphs = runner.forwards.decodes.graphs
    decode_alone(runner, ROWS, PADDED_STEPS + 1, lag=0)
    device.replayed.clear()
    runner.slots.forget(range(ROWS))  # They begin anew.
    decode_alone(runner, 1, 6, lag=0)
    assert sorted(graphs.captured_sizes) == FIRST and [shape[0] for shape in device.replayed] == [1] * 6
    runner.slots.forget(range(ROWS))
    decode_alone(runner, ROWS, 1, lag=0)
    assert sorted(graphs.captured_sizes) == sorted(FIRST + REST), "it goes on ahead of a step that it is for"
