"""The process that compiles kernels beside a start: when it is started, and tasks in its children."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cuda.compilers import client
from radixmesh.daemons.worker.cuda.compilers.server import run_in_children, source_len

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"


class _Started:
    """In place of the process."""

    def __init__(self, most: int, note: Path) -> None:
        self.most, self.note = most, note
        note.parent.mkdir(parents=True, exist_ok=True)

    keep = client.KernelCompilers.keep

    @property
    def _note(self) -> Path:
        return self.note


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(client, "KernelCompilers", _Started)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def _settings(**changes: object) -> WorkerSettings:
    return WorkerSettings(backend=Backend.CUDA, model=MODEL, **changes)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cores")
def test_a_start_whose_kernels_are_kept_starts_no_process() -> None:
    first = client.start_compilers(MODEL, _settings())
    assert first is not None and first.most == 14  # type: ignore[attr-defined]
    # A start that failed has kept nothing.
    assert client.start_compilers(MODEL, _settings()) is not None
    first.keep()
    assert client.start_compilers(MODEL, _settings()) is None
    assert client.start_compilers(MODEL, _settings(listen=("127.0.0.1:1234",))) is None


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("changes", [{"page_size": 16}, {"kv_dtype": "fp8"}, {"num_slots": 8}, {"cuda_pdl": False}])
def test_other_kernels_are_compiled_again(changes: dict[str, object]) -> None:
    first = client.start_compilers(MODEL, _settings())
    assert first is not None
    first.keep()
    assert client.start_compilers(MODEL, _settings(**changes)) is not None


@pytest.mark.usefixtures("cores")
def test_few_cores_and_unreadable_folders_start_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert client.start_compilers(tmp_path, _settings()) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert client.start_compilers(MODEL, _settings()) is None


def _helper(x):
    return x


def _caller(x):
    return _helper(x) + _helper(x)


def test_a_kernel_counts_with_the_functions_that_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the most source begin first: one of 1.5 s that began last was waited for alone."""
    # Triton's own class, where this process interprets kernels too.
    helper, alone = JITFunction(_helper), JITFunction(_caller)
    assert source_len(alone) == len(alone.src)
    monkeypatch.setitem(globals(), "_helper", helper)
    assert source_len(alone) == len(alone.src) + len(helper.src)


def _children() -> set[int]:
    """Process ids, also of those that have ended and were not waited for. Other tests may have left some."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def test_tasks_run_in_children_few_at_once_and_failures_are_counted(tmp_path: Path) -> None:
    def task(number: int) -> None:
        running = tmp_path / f"running-{number}"
        running.touch()
        at_once = len(list(tmp_path.glob("running-*")))
        (tmp_path / f"done-{number}").write_text(str(at_once))
        if number % 3 == 0:
            raise ValueError(number)
        os.sched_yield()
        running.unlink()

    def whole(number: int) -> None:
        try:
            task(number)
        finally:
            (tmp_path / f"running-{number}").unlink(missing_ok=True)

    before = _children()
    tasks = [lambda number=number: whole(number) for number in range(9)]
    assert run_in_children(tasks, 2) == 3
    done = list(tmp_path.glob("done-*"))
    assert len(done) == 9 and max(int(path.read_text()) for path in done) <= 2
    assert _children() <= before, "a child was not waited for"


# A child of its own holds its output open, whatever becomes of it.
_STUCK = """
import os, time
if not os.fork():
    with open(os.environ["STUCK_PID"] + "~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.environ["STUCK_PID"])
time.sleep(600)
"""


def _until(is_true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60.0
    while not is_true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    """True for one that nobody has reaped yet, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_start_does_not_wait_for_a_compilation_that_is_stuck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stuck_compiler.py").write_text(_STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STUCK_PID", str(tmp_path / "pid"))
    monkeypatch.setattr(client, "_SERVER", "stuck_compiler")
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.01)
    compilers = client.KernelCompilers(2, tmp_path / "note")
    _until((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    waiting = threading.Thread(target=compilers.wait, daemon=True)
    try:
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
        _until(lambda: _is_gone(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
