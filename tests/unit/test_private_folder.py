"""Files with users' prompts: a folder that is ours alone, no links followed, bounded in files and bytes."""

import os
import stat
from pathlib import Path

import pytest

from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.files.private_folder import PrivateFolder
from radixmesh.worker.v1 import worker_pb2


def _plan(step: int, num_bytes: int = 0) -> worker_pb2.StepPlan:
    plan = worker_pb2.StepPlan(header=worker_pb2.PlanHeader(epoch=1, step_id=step))
    plan.ranks.add().admits.add(request_id="x" * num_bytes)
    return plan


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder as the system's: anybody may write there; it is the home as well, as in containers."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return folder


def test_folder_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        path = Path(PlanDump(tmp_path / "a" / "dumps", "instance").write(_plan(1), RuntimeError("lost")))
    finally:
        os.umask(old_mask)
    assert _mode(path.parent) == 0o700
    assert {_mode(file) for file in path.parent.iterdir()} == {0o600}


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        PrivateFolder(folder).open()
    assert PlanDump(folder, "instance").write(_plan(1), RuntimeError("lost")) == ""
    assert not list(folder.iterdir()) and _mode(folder) == 0o755, "nor is a folder of the operator's changed"


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        PrivateFolder(folder).open()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    assert PlanDump(tmp_path / "link", "instance").write(_plan(1), RuntimeError("lost")) == ""
    folder = tmp_path / "ours"
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (folder / "plan-instance-1-1.bin").symlink_to(victim)
    assert PlanDump(folder, "instance").write(_plan(1), RuntimeError("lost")) == ""
    assert victim.read_text() == "as it was"


def test_dumps_are_bounded_in_bytes(tmp_path: Path) -> None:
    dump = PlanDump(tmp_path, "instance", max_dumps=16, max_bytes=50_000)
    for step in range(12):
        assert dump.write(_plan(step, 10_000), RuntimeError("lost"))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 50_000
    assert len(list(tmp_path.glob("*.bin"))) == 4
    assert dump.write(_plan(99, 60_000), RuntimeError("lost")) == "", "what can never fit takes nothing with it"
    assert len(list(tmp_path.glob("*.bin"))) == 4
    assert PlanDump(tmp_path, "wordy").write(_plan(1), RuntimeError("y" * 1_000_000))
    assert (tmp_path / "plan-wordy-1-1.txt").stat().st_size <= 65_536


def test_the_default_is_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert PrivateFolder(None).open() == tmp_path / ".local" / "state" / "radixmesh" / "dumps"
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    assert PrivateFolder(None).open() == state / "radixmesh" / "dumps"


def test_the_default_is_no_path_that_another_user_can_take_first(temporary: Path) -> None:
    for taken in ("radixmesh", ".local", f"radixmesh-dumps-{os.geteuid()}-guess"):
        (temporary / taken).mkdir()
        (temporary / taken).chmod(0o777)
    first = PrivateFolder(None).open()
    assert first.parent == temporary and _mode(first) == 0o700
    assert first.name not in ("radixmesh", ".local", f"radixmesh-dumps-{os.geteuid()}-guess")
    # A worker that dies again and again makes one folder, not one a death.
    assert PrivateFolder(None).open() == first


def test_traces_are_bounded_in_number(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    for number in range(10):
        folder.write(f"steps-{number}.json", b"x" * 100)
    (tmp_path / "plan-1.bin").write_bytes(b"x")
    folder.make_room("steps-", max_files=8, max_bytes=450)
    assert sorted(path.name for path in tmp_path.glob("steps-*")) == [f"steps-{number}.json" for number in range(6, 10)]
    assert (tmp_path / "plan-1.bin").exists(), "each kind has room of its own"
