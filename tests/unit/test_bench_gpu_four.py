"""The run of all measurements of several GPUs: what fails or does not end is noted, and the rest goes on."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

_SAYS = "print('{\"x\": 1}')"


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from gpu import four

    yield four
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu"]:
        del sys.modules[name]


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def _run(four: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, parts: list[object], *flags: str) -> dict:  # type: ignore[type-arg]
    monkeypatch.setattr(four, "parts", lambda args: parts)
    monkeypatch.setattr(sys, "argv", ["four.py", "--dry", "--out", str(out), *flags])
    four.main()
    return dict(json.loads(out.read_text())["parts"])


def test_a_part_that_fails_is_noted_and_run_again_and_the_others_are_not(
    four: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, fails = tmp_path / "out.json", tmp_path / "fails"
    fails.touch()
    check = f"import os, sys; os.path.exists({str(fails)!r}) and sys.exit('a cable is missing'); {_SAYS}"
    parts = [
        four.Part(name="one", commands=[_python(check)]),
        four.Part(name="two", commands=[_python(_SAYS), _python("print('no JSON')")]),
        four.Part(name="three", commands=[_python(_SAYS), _python(_SAYS)]),
        four.Part(name="four", skip="nobody has it"),
    ]
    found = _run(four, monkeypatch, out, parts)
    assert "a cable is missing" in found["one"]["errors"][0] and found["one"]["results"] == [None]
    assert "printed no JSON" in found["two"]["errors"][0] and found["two"]["results"] == [{"x": 1}, None]
    assert found["three"]["results"] == [{"x": 1}, {"x": 1}] and found["four"]["skipped"] == "nobody has it"
    fails.unlink()
    parts[2] = four.Part(name="three", commands=[_python("raise SystemExit('not again')")])
    found = _run(four, monkeypatch, out, parts)
    assert found["one"]["results"] == [{"x": 1}] and "errors" not in found["one"]
    assert "errors" not in found["three"], "what has results is not run again"


def test_a_part_that_does_not_end_is_ended_with_all_that_it_started(
    four: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time; sleep = 'import time; time.sleep(600)'"
        "; p = subprocess.Popen([sys.executable, '-S', '-c', sleep])"
        f"; open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    )
    parts = [four.Part(name="hangs", commands=[_python(code)], limit_s=3.0), four.Part(name="next", skip="it came")]
    found = _run(four, monkeypatch, tmp_path / "out.json", parts)
    assert "did not end within 3 s" in found["hangs"]["errors"][0] and found["next"]["skipped"] == "it came"
    # On a machine that is very busy nothing had been started by then.
    while child.exists() and _runs(int(child.read_text())):
        time.sleep(0.01)
    found = _run(four, monkeypatch, tmp_path / "late.json", parts[:1], "--minutes", "0")
    assert found["hangs"]["skipped"] == "no time was left"


@pytest.mark.parametrize(("ends", "error"), [("sys.exit('no memory')", "no memory"), ("time.sleep(600)", "not end")])
def test_results_so_far_of_what_fails_or_hangs_are_kept(
    four: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str, error: str
) -> None:
    script, out = tmp_path / "rank_load.py", tmp_path / "out.json"
    keeps = "from gpu.kept import Kept; kept = Kept(pathlib.Path(sys.argv[-1])); kept.note(decodes={'1x8': 5.0})"
    bench = str(Path(__file__).parents[2] / "bench")
    script.write_text(f"import pathlib, sys, time; sys.path.insert(0, {bench!r})\n{keeps}\n{ends}\n")
    command = [sys.executable, str(script), "--decode", "1x8"]
    found = _run(four, monkeypatch, out, [four.Part(name="load", commands=[command], limit_s=5.0)])
    assert error in found["load"]["errors"][0] and found["load"]["results"] == [{"decodes": {"1x8": 5.0}}]
    script.write_text(_SAYS)
    found = _run(four, monkeypatch, out, [four.Part(name="load", commands=[command])])
    assert "errors" not in found["load"] and found["load"]["results"] == [{"x": 1}], "it was not whole"


def test_what_ends_a_benchmark_is_printed_beside_its_results(
    four: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu.kept import Kept

    with pytest.raises(ValueError, match="of the third"), Kept(None) as kept:
        kept.note(first=1)
        kept.note(second=2)
        raise ValueError("of the third")
    assert json.loads(capsys.readouterr().out) == {"first": 1, "second": 2, "error": "ValueError('of the third')"}


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("flags", [["--gpus", "4"], ["--gpus", "2"], ["--dry"]])
def test_parts_have_names_of_their_own(
    four: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["four.py", "--out", str(tmp_path / "x.json"), "--list", *flags])
    four.main()
    names = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert len(set(names)) == len(names) > 8
