"""The list of faults of `bench/rank_faults.py`: whose turn it is, and a file that loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

from support.bench_modules import bench_imports

with bench_imports():
    from rank_faults import Board

CELLS = [f"A; {service}; {number}" for service in ("rank 0", "rank 1") for number in ("SIGKILL", "SIGSTOP")]


def board(folder: Path, times: int = 2, seen: dict[str, int] | None = None, cells: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    return Board(folder / "out.json", {"cells": cells or {}}, CELLS, times, seen or {})


def test_cells_that_were_seen_least_come_first_and_none_too_often(tmp_path: Path) -> None:
    """Two meshes side by side: what one of them is at is not given to the other one as if nobody were."""
    known = {CELLS[0]: {"faults": 2}, CELLS[1]: {"faults": 1}}
    faults = board(tmp_path, seen={CELLS[2]: 3}, cells=known)
    order = []
    while (cell := faults.next("A")) is not None:
        order.append(cell)
    assert order == [CELLS[3], CELLS[1], CELLS[3], CELLS[2], CELLS[2]]
    assert faults.next("B") is None


def test_each_fault_is_in_the_file_at_once(tmp_path: Path) -> None:
    faults = board(tmp_path)
    cell = faults.next("A")
    assert cell == CELLS[0]
    faults.note(cell, {"faults": 1, "stall_s": 3.0, "back_s": 2.0, "tokens_compared": 7, "seconds": 4.0})
    again = faults.next("A")
    assert again == CELLS[1], "as often as no other"
    faults.note(again, {"error": "a mesh that ended", "requests_failed": 1, "failures": ["text: gone"]})
    faults.note(cell, {"answers_completed": 6}, is_over=False)
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cells[cell]["faults"] == 1 and cells[cell]["answers_completed"] == 6
    assert cells[cell]["stalls_s"] == [3.0] and cells[cell]["longest_back_s"] == 2.0
    assert cells[again]["faults"] == 0 and cells[again]["errors"] == ["a mesh that ended"]
    assert cells[again]["requests_failed"] == 1 and cells[again]["first_failures"] == ["text: gone"]


def test_a_fault_that_did_not_begin_is_left_for_another_run(tmp_path: Path) -> None:
    faults = board(tmp_path, times=1)
    cell = faults.next("A")
    assert cell is not None
    faults.note(cell, {})
    assert faults.next("A") == cell


def test_a_cell_that_fails_again_and_again_ends(tmp_path: Path) -> None:
    faults = board(tmp_path, times=1)
    for _ in CELLS:
        cell = faults.next("A")
        assert cell is not None
        faults.note(cell, {"error": "no way"})
    assert faults.next("A") is None
