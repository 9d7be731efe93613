"""The page of GPU results from what a rerun of the benchmarks writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.bench_modules import BENCH, bench_imports

with bench_imports("gpu"):
    import dense
    import results_files
    import results_page


def test_a_rerun_of_all_commands_writes_all_that_the_page_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    shutil.copytree(BENCH / "results", results, ignore=shutil.ignore_patterns("*.svg", "*.png"))
    before = results_page.page()
    out.mkdir()
    for name, report in _reports(json.loads((results / "h200-dense.json").read_text())).items():
        (out / f"{name}.json").write_text(json.dumps(report))
    names = {command.name for job in dense.JOBS.values() for command in job}
    assert {path.stem for path in out.iterdir()} <= names
    (results / "h200-dense.json").write_text(json.dumps(dense.document(out)))
    monkeypatch.setattr(results_files, "RESULTS", results)
    after = results_page.page()
    # Only older commits' figures and the notes on them are not written anew.
    gone = set(before.splitlines()) - set(after.splitlines())
    assert all("earlier commit" in line or "before the project" in line or not line.startswith("|") for line in gone)
    assert [line for line in after.splitlines() if line.startswith("## ")] == [
        line for line in before.splitlines() if line.startswith("## ")
    ]


def _reports(committed: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the commands that give the committed figures."""
    head = {"machine": committed["machine"], "versions": committed["versions"], "start_log": []}
    cold = head | {"start_s": committed["start_s"]["kernels of products compiled"]}
    warm = head | {"start_s": committed["start_s"]["warm kernel caches"]}
    workloads = {ours: committed["workloads"][name] for ours, name in dense.WORKLOADS.items()}
    reports = {
        "mesh": cold | {"workloads": workloads},
        "random": cold | {"workloads": {"random": workloads["random"]}},
        "idle": committed["idle"],
        "where": committed["where"],
        "whole": committed["whole_mesh"],
        "numerics": committed["numerics"],
        "fp8-numerics": committed["numerics_fp8"],
        "steps": committed["steps_now"],
        "fp8-mesh": warm | {"workloads": committed["workloads_fp8"]},
        "float16-mesh": warm | {"workloads": committed["workloads_float16"]},
    }
    for name in ("fp8", "fp8-block", "deterministic", "flashinfer", "compiled", "untuned"):
        reports[name] = committed[f"steps_{name.replace('-', '_')}"]
    for name, figures in committed["other_shapes"].items():
        reports[name] = warm | {"workloads": figures}
    for ours, name in dense.WORKLOADS.items():
        replay = committed["replay"].get(name)
        # The recorded run is slower by the ratio; the start of any of them found its kernels in the cache.
        recorded = {"out_tok_s": replay["mesh_tok_s"]} if replay else workloads[ours]
        reports[f"recorded-{ours}"] = warm | {"workloads": {ours: recorded}}
        if replay:
            reports[f"replayed-{ours}"] = replay["replay"]
    return reports
