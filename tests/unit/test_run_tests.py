"""The runner of the daily suite: reruns, the record of first failures, and what is said to be missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]

_FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({num}))
def test_it(number):
    marker = Path(__file__).with_name(f"seen-{{number}}")
    if not marker.exists():
        marker.touch()
        print("so it printed")
        pytest.fail("at first")
"""


def _load() -> ModuleType:
    spec = spec_from_file_location("run_tests", TESTS / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run_tests = _load()


def _failures(*tests: str) -> list[object]:
    return [run_tests.Failure(test, "output") for test in tests]


def test_only_a_few_tests_of_real_processes_are_run_once_more() -> None:
    mesh, compose = "tests/mesh/test_a.py::test_a", "tests/compose/test_b.py::test_b"
    assert run_tests.to_rerun(_failures(mesh, compose)) == [compose, mesh]
    assert run_tests.to_rerun(_failures(mesh, compose, "tests/mesh/test_c.py::test_c")) == []
    for other in ("unit", "kernels", "contract", "hostile", "gpu"):
        assert run_tests.to_rerun(_failures(mesh, f"tests/{other}/test_d.py::test_d")) == []


def test_what_is_missing_is_said_once_with_the_tests_that_want_it() -> None:
    skipped = [
        ("tests/mesh/test_a.py::test_x", "Skipped: no tmux on this machine: install it"),
        ("tests/mesh/test_a.py::test_y", "Skipped: no tmux on this machine: install it"),
        ("tests/unit/test_b.py::test_z", "no promtool on PATH (Debian: apt-get install prometheus)"),
    ]
    assert run_tests.missing_lines(skipped, ["Docker", "tmux"]) == [
        "Docker: needed by tests that are run apart",
        "prometheus: 1 tests skipped: tests/unit/test_b.py",
        "tmux: 2 tests skipped: tests/mesh/test_a.py",
    ]


def test_the_known_first_failures_obey_their_rule() -> None:
    known = json.loads((TESTS / "first_failures.json").read_text())
    assert len(known["runs"]) <= 10, "only the last ten runs are listed"
    tests = [entry["test"] for entry in known["first_failures"]]
    assert all(set(entry) == {"test", "run", "said"} for entry in known["first_failures"])
    assert {entry["run"] for entry in known["first_failures"]} <= set(known["runs"])
    assert len(set(tests)) == len(tests), "first in two of the last ten runs is a bug: mend it"


def test_a_first_failure_that_is_known_is_called_a_bug() -> None:
    entry = {"test": "tests/mesh/test_a.py::test_a", "run": "2026-11-20 5b1d637", "said": "late"}
    known = {"runs": [entry["run"]], "first_failures": [entry]}
    lines = run_tests.known_lines(_failures(entry["test"], "tests/mesh/test_b.py::test_b"), known)
    assert "a bug" in lines[0] and "not known" in lines[1]


# Notes that it has begun, and waits for the test of the other process.
_MEETING = """
import os, time
from pathlib import Path

def test_it():
    seen = Path({seen!r})
    with seen.open("a") as lines:
        lines.write(f"{own} {{os.getpid()}}\\n")
    deadline = time.monotonic() + 100
    while {other!r} not in seen.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
"""


@pytest.mark.timeout(300)
def test_the_process_that_ends_first_takes_files_of_the_others_from_the_end(tmp_path: Path) -> None:
    root, seen = _suite(tmp_path, "def test_it(): pass\n", 0), tmp_path / "seen"
    for own, other in (("a", "z"), ("m", "a"), ("z", "a")):
        (root / "tests" / "mesh" / f"test_{own}.py").write_text(_MEETING.format(seen=str(seen), own=own, other=other))
    result = _run(root)
    assert result.returncode == 0, result.stdout
    lines = dict(line.split() for line in seen.read_text().splitlines())
    assert sorted(seen.read_text().split()[::2]) == ["a", "m", "z"], "each runs once"
    assert lines["a"] != lines["z"]


@pytest.mark.timeout(300)
def test_a_process_that_waits_takes_what_is_shared_when_it_is_through(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    root = _suite(tmp_path, _MEETING.format(seen=str(seen), own="computing", other="shared"), 0)
    assert "tests/mesh/test_scheduler_service.py" in run_tests.SHARED
    shared = _MEETING.format(seen=str(seen), own="shared", other="computing")
    (root / "tests" / "mesh" / "test_scheduler_service.py").write_text(shared)
    result = _run(root)
    assert result.returncode == 0, result.stdout
    names = seen.read_text().split()[::2]
    assert sorted(names) == ["computing", "shared"], "the one that computes had no time for it"


@pytest.mark.timeout(300)
def test_files_of_another_process_lie_between_those_of_two_folders(tmp_path: Path) -> None:
    root, claims = _suite(tmp_path, "def test_it(): pass\n", 0), tmp_path / "claims"
    files = ["tests/mesh/test_vectors.py", "tests/mesh/test_scheduler_service.py", "tests/unit/test_unit.py"]
    claims.mkdir()
    (claims / files[1].replace("/", ".")).touch()
    environment = {**os.environ, "PYTEST_ADDOPTS": "--import-mode=importlib", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *files]
    result = subprocess.run(
        command,
        cwd=root,
        env={**environment, run_tests.CLAIMS: str(claims)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0 and "2 passed" in result.stdout, result.stdout


def test_what_is_shared_is_there() -> None:
    assert [name for name in run_tests.SHARED if not (TESTS.parent / name).is_file()] == []
    assert all(name.startswith(run_tests.COMPUTING) for name in run_tests.SHARED)


def _run(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_ADDOPTS": "--import-mode=importlib", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "tests/run_tests.py", "daily"]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=200, check=False)


def _suite(root: Path, unit: str, num_flaky: int) -> Path:
    """A small repository whose mesh tests fail at first."""
    for name in ("unit", "kernels", "gpu", "contract", "mesh"):
        (root / "tests" / name).mkdir(parents=True)
    for name in ("run_tests.py", "conftest.py", "first_failures.json"):
        shutil.copy(TESTS / name, root / "tests" / name)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    full: x\n    gpu: x\n")
    for name in ("vectors", "scheduler_service"):
        (root / "tests" / "mesh" / f"test_{name}.py").write_text("def test_it(): pass\n")
    (root / "tests" / "mesh" / "test_flaky.py").write_text(_FLAKY.format(num=num_flaky))
    (root / "tests" / "unit" / "test_unit.py").write_text(unit)
    return root


@pytest.mark.timeout(300)
def test_a_first_failure_of_a_mesh_passes_the_second_time_and_is_kept(tmp_path: Path) -> None:
    unit = "import pytest\ndef test_it(): pytest.skip('no tmux on this machine')\n"
    result = _run(root := _suite(tmp_path, unit, 2))
    assert result.returncode == 0, result.stdout
    (artefact,) = (root / "tests" / ".first-failures").iterdir()
    assert "test_flaky.py::test_it[0]" in artefact.read_text() and "so it printed" in artefact.read_text()
    assert artefact.read_text() in result.stdout
    assert "missing on this machine: tmux: 1 tests skipped: tests/unit/test_unit.py" in result.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("unit", "num_flaky"), [("def test_it(): assert False\n", 1), ("def test_it(): pass\n", 3)], ids=["unit", "three"]
)
def test_other_failures_fail_the_run(tmp_path: Path, unit: str, num_flaky: int) -> None:
    result = _run(root := _suite(tmp_path, unit, num_flaky))
    assert result.returncode == 1 and "run once more" not in result.stdout
    assert len(list((root / "tests" / ".first-failures").iterdir())) == 1
