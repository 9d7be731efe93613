"""The table of shapes: one shape that fails takes no other with it, and each is written as it comes."""

import json
import subprocess

import pytest
from support.bench_modules import bench_imports

with bench_imports("gpu"):
    import shapes_table


def test_a_shape_that_fails_is_left_out(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    mesh = {"machine": "m", "versions": {}, "start_s": 1.0, "start_log": [], "late_compiles": [], "workloads": {"w": 1}}
    seen = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        shape = command[command.index("--shape") + 1]
        seen.append(shape)
        if shape == "b":
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(mesh))

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "shapes.json"
    monkeypatch.setattr("sys.argv", ["shapes_table.py", "--shapes", "a", "b", "c", "--output", str(out)])
    shapes_table.main()
    printed = capsys.readouterr()
    assert seen == ["a", "b", "c"] and "b is left out" in printed.err
    assert list(json.loads(printed.out)["shapes"]) == ["a", "c"]
    assert json.loads(out.read_text()) == json.loads(printed.out)
