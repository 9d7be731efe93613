"""The bench of the step thread: outputs of a stand-in device go on, with threads, with processes and without masks."""

from __future__ import annotations

import pytest
from support.bench_modules import bench_imports

pytest.importorskip("xgrammar")
pytest.importorskip("torch")
with bench_imports():
    from guided_step_thread import Case, compared


def test_all_cases_run_and_say_what_guided_rows_add(tmp_path):
    """One process for masks, and one for chains: each takes seconds to start."""
    case = Case(6, 12, 1024, tmp_path)
    found = compared(case, [0, 1], turns=2, step_s=0.01, among=0, num_drafts=3)
    names = {"guided, threads", "guided, 1 processes", "guided, 3 drafts, threads", "guided, 3 drafts, 1 processes"}
    free = {"free", "free, 3 drafts"}
    assert set(found["added_us"]) == names and set(found["medians_us"]) == free | names
    for name, row in found["medians_us"].items():
        assert min(row[part][0] for part in ("decode", "launch", "settle", "encode")) > 0
        assert row["late"] == 0.0 or name not in free
        assert row["tokens"] == 1.0 or name not in free
