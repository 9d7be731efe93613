"""Traces of steps that verify drafts: whole steps alone count, and gaps between their kernels."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from gpu import verify

    yield verify
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "hop_ladder")]:
        del sys.modules[name]


def test_steps_are_cut_behind_their_sampling_and_gaps_are_theirs(verify: ModuleType) -> None:
    spans = []
    for step in range(20):
        # The first steps wait for each other: what that takes is in none of those that count.
        start = 1000.0 * step + (500.0 if step >= 4 else 0.0)
        spans += [
            verify.Span(start, start + 10.0, "_expand_kernel"),
            # It begins under the kernel ahead, and the next one 2 us after it.
            verify.Span(start + 8.0, start + 50.0, "few_rows"),
            verify.Span(start + 52.0, start + 60.0, "_highest_kernel"),
            verify.Span(start + 60.0, start + 990.0, "_accept_kernel"),
        ]
    trace = verify.by_step(spans)
    assert trace["us"] == 1000.0
    assert trace["us_per_step"] == {"drafts": 940.0, "gemm": 40.0, "idle": 12.0, "sampling": 8.0, "others": 0.0}
    assert trace["us_per_step_of_kernels"]["few_rows"] == 40.0
    assert set(trace["launches_per_step"].values()) == {1.0} and len(trace["launches_per_step"]) == 4
    in_order = {kernel["kernel"]: (kernel["after"], kernel["us"]) for kernel in trace["in_order"]}
    assert in_order["few_rows"] == (-2.0, 42.0)
