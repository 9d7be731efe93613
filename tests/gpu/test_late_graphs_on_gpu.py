"""Graphs that a worker alone captures between steps, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.decode_alone import PAGES_OF_SLOT, decode_alone
from support.device_settings import TINY_SETTINGS

from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.cuda.step import late_captures

pytestmark = pytest.mark.gpu

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
SLOTS, ROWS, STEPS = 40, 20, 30
SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_slots=SLOTS,
    num_pages=SLOTS * PAGES_OF_SLOT,
    cuda_graphs=True,
    use_pdl=True,
)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True)])
def test_a_size_that_is_captured_between_steps_changes_no_token(monkeypatch, dtype, deterministic, lag):
    monkeypatch.setattr(late_captures, "PADDED_STEPS", 5)
    settings = replace(SETTINGS, dtype=dtype, deterministic=deterministic, tune_gemm=False)
    runner, whole = load_cuda_runner(MODEL, settings, captures_late=True), load_cuda_runner(MODEL, settings)
    graphs = runner.forwards.decodes.graphs
    assert 24 not in graphs.captured_sizes and 24 in whole.forwards.decodes.graphs.captured_sizes
    assert decode_alone(runner, ROWS, STEPS, lag=lag) == decode_alone(whole, ROWS, STEPS, lag=lag)
    assert 24 in graphs.captured_sizes
