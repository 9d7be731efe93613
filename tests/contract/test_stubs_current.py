"""The committed stubs are what the protos generate."""

import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.mark.timeout(300)  # The first run installs the tool environment.
def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    made = subprocess.run(
        ["make", "-s", "stubs", f"STUBS_OUT={tmp_path}"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    generated = _stubs_under(tmp_path)
    committed = _stubs_under(_ROOT / "src")
    assert generated, "nothing was generated"
    assert sorted(generated) == sorted(committed), "stubs and protos differ in files: run make stubs"
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"stale, run make stubs: {stale}"


def _stubs_under(folder: Path) -> dict[str, str]:
    root = folder / "radixmesh"
    files = (path for path in root.glob("*/v1/*") if path.name.endswith(_STUB_SUFFIXES))
    return {str(path.relative_to(folder)): path.read_text() for path in files}
