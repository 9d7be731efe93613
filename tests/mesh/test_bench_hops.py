"""The ladder of hops runs, every rung delivers all tokens, and its JSON says what it should. Never how fast."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNGS = ["one_process", "worker", "scheduler", "router_ids", "local_text", "mesh"]
DAEMONS = {
    "one_process": {"client"},
    "worker": {"worker", "client"},
    "scheduler": {"scheduler", "worker", "client"},
    "router_ids": {"router", "scheduler", "worker", "client"},
    "local_text": {"router", "scheduler", "worker", "client"},
    "mesh": {"tokenizer", "detokenizer", "router", "scheduler", "worker", "client"},
}
ROUND_TRIPS = {
    "encode_unary",
    "encode_on_stream",
    "router_tokenize",
    "detokenize_frame_64_rows",
    "serve_abort_unknown",
    "execute_empty_plan_in_process",
    "execute_empty_plan_unix",
    "execute_empty_plan_tcp",
}


@pytest.mark.slow
def test_a_quick_run_prints_one_json_object_that_covers_every_hop(tmp_path: Path) -> None:
    file = tmp_path / "hops.json"
    run = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "hops.py"), "--quick", "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(run.stdout)
    assert json.loads(file.read_text()) == results
    assert results["machine"]["cores"] == os.cpu_count()
    assert {"python", "grpcio", "protobuf", "commit"} <= results["versions"].keys()
    assert "--quick" in results["command"]

    assert results["round_trips"].keys() == ROUND_TRIPS
    for figures in results["round_trips"].values():
        assert 0 < figures["p50_us"] <= figures["p99_us"] and figures["count"] == 160

    assert list(results["steps"]) == ["8 ms"]
    step = results["steps"]["8 ms"]
    assert list(step["high_load"]) == ["8 streams"]
    at_once = step["high_load"]["8 streams"]
    ideal_tok_s = at_once.pop("ideal_tok_s")
    assert list(step["low_load"]) == list(at_once) == list(step["adds"]) == RUNGS
    for name in RUNGS:
        low, high = step["low_load"][name], at_once[name]
        assert low["cpu_ms_per_request"].keys() == high["cpu_s_per_1000_tokens"].keys() == DAEMONS[name] | {"all"}
        # A first token takes a step, and no rung can be faster than the worker it drives.
        assert low["ttft_ms"]["min"] >= 8.0
        assert 0 < high["tok_s"]["min"] <= high["tok_s"]["median"] <= high["tok_s"]["max"] <= ideal_tok_s
        assert high["tokens_per_message"] >= 1.0
        assert all(math.isfinite(value) for value in high["itl_ms"].values())
    assert step["low_load"]["one_process"]["added_ttft_ms"] == {"median": 0.0, "min": 0.0, "max": 0.0}
    assert at_once["one_process"]["tok_s_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
