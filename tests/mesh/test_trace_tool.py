"""The tool that shows one request's way: a whole trace through all daemons, and its picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
UNDER = {
    "router.request": "",
    "router.encode": "router.request",
    "tokenizer.encode": "router.encode",
    "router.queue": "router.request",
    "detokenizer.entry": "router.request",
    "scheduler.request": "router.request",
    "scheduler.queue": "scheduler.request",
    "scheduler.prefill": "scheduler.request",
    "scheduler.decode": "scheduler.request",
    "worker.request": "scheduler.request",
}


@pytest.mark.slow
def test_one_request_is_one_trace_through_all_daemons_and_is_drawn(tmp_path: Path) -> None:
    spans_file, picture = tmp_path / "spans.json", tmp_path / "trace.svg"
    command = [str(ROOT / "bench" / "trace.py"), "--json", str(spans_file), "--picture", str(picture)]
    run = subprocess.run(
        [sys.executable, *command, "--compose", str(ROOT / "compose" / "simulated.yml")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    spans = json.loads(spans_file.read_text())
    names = {span["span_id"]: span["name"] for span in spans}
    assert {span["name"]: names.get(span["parent_id"], "") for span in spans} == UNDER and len(spans) == len(UNDER)
    assert len({span["trace_id"] for span in spans}) == 1
    for span in spans:
        assert span["service"] == f"radixmesh-{span['name'].partition('.')[0]}" and not span["is_error"]
        assert span["end_ns"] >= span["start_ns"]
    bars = [bar for bar in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}rect") if bar.get("rx")]
    assert len(bars) == len(spans)
