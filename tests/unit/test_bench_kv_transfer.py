"""Hand-overs between two processes, as bench/gpu/kv_transfer.py measures them, in memory of the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "gpu" / "kv_transfer.py"


def measured(*arguments: str) -> list[dict[str, object]]:
    """Its cases; it compares what has come with what was sent."""
    command = [sys.executable, str(SCRIPT), "--backend", "cpu", "--shapes", "tiny", "--runs", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    cases: list[dict[str, object]] = json.loads(done.stdout)["cases"]
    return cases


@pytest.mark.timeout(130)
def test_transfers_in_pieces_and_in_both_directions_bring_what_was_sent() -> None:
    cases = measured("--tokens", "600", "--pieces", "1", "2", "8", "--page-sizes", "1", "16", "--both-ways")
    assert [(case["page_size"], case["pieces"], case["both_ways"]) for case in cases] == [
        (size, pieces, both_ways) for size in (1, 16) for pieces in (1, 2, 8) for both_ways in (False, True)
    ]
    assert all(min(case["ms"], case["gather_ms"], case["scatter_ms"]) > 0 for case in cases)


@pytest.mark.timeout(130)
def test_every_way_brings_what_was_sent() -> None:
    ways = ["direct", "staged", "rows", "host"]
    cases = measured("--tokens", "512", "--ways", *ways, "--pieces", "2")
    assert [case["way"] for case in cases] == ways
