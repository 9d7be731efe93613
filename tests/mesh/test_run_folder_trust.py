"""Trust in run folders: a planted one gets no key and ends no process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixmesh.cli.access import Access
from radixmesh.cli.routers import find_routers, may_send_key
from radixmesh.daemons.cluster.errors import NotRunningError, UntrustedFolderError
from radixmesh.daemons.cluster.processes.process_identity import is_own_listener, start_ticks
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.run_folder import (
    ClusterState,
    RunFolder,
    find_run_folder,
    is_supervised,
    read_state,
    supervisor_of,
)
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

NOBODY = 65534
KEY = "the-key-of-the-victim"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# Another user: plants a folder that names its own port and a victim's process, and listens.
PLANTER = """
import fcntl, json, os, socket, sys
where, victim, planter = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if planter:
    os.setgroups([]); os.setgid(planter); os.setuid(planter)
os.umask(0o022)
listener = socket.create_server(("127.0.0.1", 0))
folder = os.path.join(where, ".radixmesh", "planted")
os.makedirs(folder)
lock = os.open(folder + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
started = open(f"/proc/{victim}/stat").read().rpartition(")")[2].split()[19]
os.write(lock, f"{victim} {started}\\n".encode())
address = "127.0.0.1:%d" % listener.getsockname()[1]
router = dict(service="router", replica=1, state="healthy", address=address, pid=os.getpid())
router |= dict(restarts=0, detail="", started_at=None)
with open(folder + "/state.json", "w") as file:
    json.dump(dict(version=1, project="planted", compose_file="x", supervisor_pid=victim, processes=[router]), file)
print(address, flush=True)
listener.settimeout(40)
connection, _ = listener.accept()
print("connected", flush=True)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder as /tmp is: everybody may make something in it."""
    folder = Path(tempfile.mkdtemp(prefix="radixmesh-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def plant(where: Path, victim: int, *, user: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PLANTER, str(where), str(victim), str(user)]
    planter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert planter.stdout is not None and planter.stdout.readline().startswith("127.0.0.1:")
    return planter


def radixmesh(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "RADIXMESH_API_KEY": KEY}
    command = [sys.executable, "-m", "radixmesh.cli", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("user", [pytest.param(NOBODY, marks=as_root), 0])
def test_down_ends_no_process_that_a_planted_folder_names(
    shared: Path, victim: subprocess.Popen[bytes], user: int
) -> None:
    """The lock's text is the planter's to write: here it names a process of ours, with the time of its start."""
    planter = plant(shared, victim.pid, user=user)
    try:
        done = radixmesh(shared, "down", "--timeout", "1")
        assert victim.poll() is None, "down ended it"
        assert done.returncode == 1 and "no cluster" in done.stdout + done.stderr
    finally:
        planter.kill()
        planter.wait()
        assert planter.stdout is not None
        planter.stdout.close()


@pytest.mark.parametrize("user", [pytest.param(NOBODY, marks=as_root), 0])
def test_a_planted_folder_gets_no_key_and_ends_no_process(
    shared: Path, victim: subprocess.Popen[bytes], user: int
) -> None:
    """user 0: the folder is ours, but its lock names a process that does not hold it."""
    planter = plant(shared, victim.pid, user=user)
    cwd = shared / "work"
    cwd.mkdir()
    try:
        for arguments in (("generate", "x"), ("chat",), ("status",), ("down", "--timeout", "1")):
            done = radixmesh(cwd, *arguments)
            said = done.stdout + done.stderr
            assert done.returncode == 1 and "no cluster" in said, (arguments, said)
            assert (f"belongs to user {NOBODY}" if user else "another one holds it") in said, (arguments, said)
        assert victim.poll() is None
        planter.kill()
        assert planter.stdout is not None and planter.stdout.read() == "", "nobody came"
    finally:
        planter.kill()
        planter.wait()
        assert planter.stdout is not None
        planter.stdout.close()


def state_of(supervisor_pid: int, *addresses: str) -> ClusterState:
    common = {"service": "router", "state": ProcessState.HEALTHY, "restarts": 0, "detail": "", "started_at": None}
    processes = tuple(
        ProcessStatus(replica=number, address=address, pid=1, **common)  # type: ignore[arg-type]
        for number, address in enumerate(addresses, start=1)
    )
    return ClusterState(project="p", compose_file="x", supervisor_pid=supervisor_pid, processes=processes)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path / ".radixmesh" / "p")
    folder.claim()
    folder.write(state_of(os.getpid(), "127.0.0.1:1"))
    yield folder
    folder.release()


def test_ours_is_found_and_is_ours_alone(running: RunFolder, tmp_path: Path) -> None:
    supervisor = supervisor_of(running.path)
    assert supervisor is not None and supervisor == (os.getpid(), start_ticks(os.getpid()))
    assert read_state(find_run_folder(None, tmp_path, {})).supervisor_pid == os.getpid()
    for path, mode in (("..", 0o700), (".", 0o700), ("lock", 0o600), ("state.json", 0o600)):
        assert (running.path / path).stat().st_mode & 0o777 == mode
    running.release()
    assert supervisor_of(running.path) is None


@pytest.mark.parametrize("path", ["..", ".", "lock", "state.json"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_not_believed(running: RunFolder, tmp_path: Path, path: str, mode: int) -> None:
    target = running.path / path
    target.chmod(target.stat().st_mode | mode)
    with pytest.raises(NotRunningError, match="can be written by others"):
        read_state(find_run_folder(None, tmp_path, {}))


@pytest.mark.parametrize("path", ["..", ".", "lock", "state.json"])
def test_no_link_is_followed(running: RunFolder, tmp_path: Path, path: str) -> None:
    target = (running.path / path).resolve()
    target.rename(tmp_path / "moved")
    target.symlink_to(tmp_path / "moved")
    with pytest.raises(NotRunningError):
        read_state(find_run_folder(None, tmp_path, {}))
    if path in ("..", "."):
        with pytest.raises(UntrustedFolderError, match="no folder of"):
            RunFolder(running.path).claim()


def test_a_pid_that_was_used_again_is_no_supervisor(running: RunFolder) -> None:
    (running.path / "lock").write_text(f"{os.getpid()} {(start_ticks(os.getpid()) or 0) - 1}\n")
    with pytest.raises(UntrustedFolderError, match="another one holds it"):
        is_supervised(running.path)


def test_a_state_that_the_holder_did_not_write_is_not_believed(
    running: RunFolder, victim: subprocess.Popen[bytes]
) -> None:
    running.write(state_of(victim.pid))
    with pytest.raises(NotRunningError, match="runs no more"):
        read_state(running.path)
    state = json.loads((running.path / "state.json").read_text())
    for broken in ({**state, "supervisor_pid": None}, {**state, "processes": [{}]}, [], {"version": 1}):
        (running.path / "state.json").write_text(json.dumps(broken))
        with pytest.raises(NotRunningError):
            read_state(running.path)


@as_root
def test_a_folder_of_another_user_is_not_claimed(shared: Path) -> None:
    for foreign in (shared / ".radixmesh", shared / "mine" / ".radixmesh" / "p"):
        foreign.mkdir(parents=True)
        os.chown(foreign, NOBODY, NOBODY)
        with pytest.raises(UntrustedFolderError, match="no folder of user"):
            RunFolder(shared / "mine" / ".radixmesh" / "p" if "mine" in foreign.parts else foreign / "p").claim()


def test_many_who_look_at_once_disturb_neither_each_other_nor_a_start(tmp_path: Path) -> None:
    folder, faults = RunFolder(tmp_path / "p"), []
    folder.claim()
    folder.release()

    def look() -> None:
        try:
            for _ in range(300):
                is_supervised(folder.path)
        except UntrustedFolderError as error:
            faults.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        folder.claim()
        folder.release()
    for thread in threads:
        thread.join()
    assert faults == []


def test_the_key_goes_home_or_under_tls(running: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RADIXMESH_ROUTER", raising=False)
    plain, tls = Access(api_key=KEY), Access(api_key=KEY, tls=TlsFiles(ca_file=Path("ca.pem")))
    running.write(state_of(os.getpid(), "192.0.2.1:50051"))
    with pytest.raises(NotRunningError, match="under TLS only"):
        find_routers([], None, plain)
    assert find_routers([], None, tls) == find_routers([], None, Access()) == ["192.0.2.1:50051"]
    assert find_routers(["192.0.2.1:50051"], None, plain) == ["192.0.2.1:50051"], "somebody named it"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        running.write(state_of(os.getpid(), address))
        assert find_routers([], None, plain) == [address]
    for host in ("example.com:1", "10.0.0.1:1", "127.0.0.1.example.com:1", "nonsense", "[2001:db8::1]:1"):
        assert not may_send_key(host, plain)


@as_root
def test_a_port_that_another_user_took_is_not_ours() -> None:
    listen = f"""
import os, socket
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert not is_own_listener(f"127.0.0.1:{port}") and not is_own_listener(f"localhost:{port}")
    finally:
        process.communicate("\n", timeout=30)
