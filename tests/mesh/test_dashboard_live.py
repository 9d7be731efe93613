"""Every query of the shipped dashboard, answered by a real Prometheus that scrapes a mesh under load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ("--seconds", "6", "--scrape-s", "0.5", "--scale", "tokenizer=2")
# Panels that must be above zero at some moment of a run with load, faults and mistakes: (panel, legend).
SEEN = [
    ("Output tokens / s", "Output tokens / s"),
    ("Running", "Running"),
    ("Tokens a second", "prompt"),
    ("Time to first token", "p95"),
    ("Inter-token time", "p50"),
    ("Device idle", "worker {{instance}}"),
    ("Device idle", "seen by scheduler {{instance}}"),
    ("Step time", "device p50"),
    ("Step time", "round trip p50"),
    ("Tokens computed a second", "{{kind}}"),
    ("Cache hit rate and KV usage", "hit rate, interval"),
    ("Pages", "{{state}}"),
    ("Batch", "mean"),
    ("Router waits for", "{{hop}}"),
    ("Where the first token's time goes", "slot to first token"),
    ("Scheduler's host time a step", "plan p50"),
    ("Text daemons", "encode p50"),
    ("Text daemons", "detokenize p50"),
    ("Daemons", "{{job}} {{instance}}"),
    ("Errors a second", "{{job}}: {{reason}}"),
    ("Held for clients", "journal"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian: apt-get install prometheus)"
)
def test_every_query_of_the_dashboard_is_answered_by_a_prometheus_that_scrapes_a_mesh_under_load(
    tmp_path: Path,
) -> None:
    file = tmp_path / "answers.json"
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "observe.py"), *FLAGS, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    answers = json.loads(file.read_text())
    assert [query["expr"] for query in answers["queries"] if not query["series"]] == []
    largest: dict[tuple[str, str], float] = {}
    for query in answers["queries"]:
        values = [value for line in query["series"] for value in line["values"] if value is not None]
        largest[query["panel"], query["legend"]] = max(values, default=0.0)
    assert [name for name in SEEN if largest[name] <= 0] == []
    # Replicas are found: every process is an instance of its own.
    (daemons,) = [query for query in answers["queries"] if query["panel"] == "Daemons"]
    jobs = sorted(line["labels"]["job"] for line in daemons["series"])
    assert jobs == ["detokenizer", "router", "scheduler", "tokenizer", "tokenizer", "worker"]
