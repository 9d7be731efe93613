"""The folder in which a running cluster is found again: who supervises it, and the state of every process.

<folder>/lock         held (flock) by the supervisor for as long as it lives; its text is that process's pid and start
<folder>/state.json   replaced whole at every change
<folder>/volumes/     named volumes

Whoever can write here decides where API keys and prompts are sent and which process `down` ends. So folder, lock and
state are believed only if they belong to the effective user, nobody else can write them, and no link leads to them.
"""

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from radixmesh.daemons.cluster.errors import AlreadyRunningError, NotRunningError, UntrustedFolderError
from radixmesh.daemons.cluster.processes.process_identity import is_own_process, lock_holders, start_ticks
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.run_pointer import SUFFIX, target_of
from radixmesh.daemons.runtime.security.trusted_files import is_own

_FOLDER_NAME = ".radixmesh"
_STATE_VERSION = 1
_MAX_STATE_BYTES = 1 << 24
_OWN_FOLDER, _OWN_FILE = 0o700, 0o600
_LOCK_TRIES, _CLAIM_TRIES, _LOCK_PAUSE_S = 10, 100, 0.02


class Supervisor(NamedTuple):
    """The process that holds the lock. started: in ticks since boot, None = unknown."""

    pid: int
    started: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """State that a supervisor last wrote."""

    project: str
    compose_file: str
    supervisor_pid: int
    processes: tuple[ProcessStatus, ...]


class RunFolder:
    """The supervisor's side: claims the folder, writes the state, lets go."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def volumes(self) -> Path:
        """Folder of named volumes."""
        return self.path / "volumes"

    def claim(self) -> None:
        """Makes the folder and takes its lock.

        Raises AlreadyRunningError if a living supervisor has it, UntrustedFolderError if it is not ours alone.
        """
        is_in_cwd = self.path.parent.name == _FOLDER_NAME
        for folder in (self.path.parent, self.path):
            folder.mkdir(_OWN_FOLDER, parents=True, exist_ok=True)
            if is_in_cwd or folder == self.path:
                _make_private(folder)
        with opened(self.path) as handle:
            if is_in_cwd:
                ignore = os.open(self.path.parent / ".gitignore", _CREATE, _OWN_FILE)
                os.write(ignore, b"*\n")
                os.close(ignore)
            lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _OWN_FILE, dir_fd=handle)
        # One who looks holds it for a moment, and names nobody.
        for tries_left in reversed(range(_CLAIM_TRIES)):
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not tries_left or self._is_held(lock):
                os.close(lock)
                how = "stop it with 'radixmesh down' or give another --project"
                raise AlreadyRunningError(f"this project runs already (see {self.path}); {how}")
            time.sleep(_LOCK_PAUSE_S)
        os.fchmod(lock, _OWN_FILE)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} {start_ticks(os.getpid())}\n".encode())
        self._lock = lock

    def write(self, state: ClusterState) -> None:
        """Replaces the state file; a reader sees the old or the new one, never a part."""
        processes = [
            {
                "service": status.service,
                "replica": status.replica,
                "state": status.state.value,
                "address": status.address,
                "pid": status.pid,
                "restarts": status.restarts,
                "detail": status.detail,
                "started_at": status.started_at,
            }
            for status in state.processes
        ]
        content = {
            "version": _STATE_VERSION,
            "project": state.project,
            "compose_file": state.compose_file,
            "supervisor_pid": state.supervisor_pid,
            "processes": processes,
        }
        temporary = self.path / "state.json.new"
        with os.fdopen(os.open(temporary, _CREATE, _OWN_FILE), "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path / "state.json")

    def release(self) -> None:
        """Removes the state and lets the lock go. The lock file stays: removing it would let two claim the folder."""
        if self._lock is not None:
            (self.path / "state.json").unlink(missing_ok=True)
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def _is_held(self, lock: int) -> bool:
        try:
            _holder_of(self.path, os.pread(lock, 256, 0), os.fstat(lock).st_ino)
        except UntrustedFolderError:
            return False
        return True


def default_run_folder(project: str, cwd: Path, environment: Mapping[str, str]) -> Path:
    """`.radixmesh/<project>` below `cwd`, or below $XDG_RUNTIME_DIR where `cwd` cannot be written."""
    runtime_folder = environment.get("XDG_RUNTIME_DIR")
    if not os.access(cwd, os.W_OK) and runtime_folder:
        return Path(runtime_folder) / "radixmesh" / project
    return cwd / _FOLDER_NAME / project


def is_supervised(folder: Path) -> bool:
    """Tells whether a living supervisor of ours holds `folder`."""
    return supervisor_of(folder) is not None


def supervisor_of(folder: Path) -> Supervisor | None:
    """The living process that holds `folder`; None = nobody. A pid could belong to a stranger by now; the lock cannot.

    Raises UntrustedFolderError for a folder or lock that others can write, and for a lock that another process holds
    than the one that it names.
    """
    try:
        with opened(folder) as handle:
            lock = os.open("lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UntrustedFolderError(f"{folder}: its lock cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(lock)
        _require_own(folder / "lock", status, stat.S_ISREG)
        # A supervisor that begins has the lock a moment before it says who it is.
        for tries_left in reversed(range(_LOCK_TRIES)):
            with suppress(OSError):
                # Shared: two that look at once do not take each other for a supervisor.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            try:
                return _holder_of(folder, os.pread(lock, 256, 0), status.st_ino)
            except UntrustedFolderError:
                if not tries_left:
                    raise
            time.sleep(_LOCK_PAUSE_S)
        return None
    finally:
        os.close(lock)


def find_run_folder(project: str | None, cwd: Path, environment: Mapping[str, str]) -> Path:
    """Finds the running cluster: below `cwd` or one of its parents, or below $XDG_RUNTIME_DIR.

    Folders of other users are passed over. Raises NotRunningError if there is none, which names those, or if there are
    several and `project` does not say which.
    """
    roots = [folder / _FOLDER_NAME for folder in (cwd, *cwd.parents)]
    if runtime_folder := environment.get("XDG_RUNTIME_DIR"):
        roots.append(Path(runtime_folder) / "radixmesh")
    passed_over: list[str] = []
    for root in roots:
        running = _running(root, project, passed_over)
        if len(running) > 1:
            names = ", ".join(folder.name for folder in running)
            raise NotRunningError(f"several clusters run here ({names}); choose one with --project")
        if running:
            return running[0]
    what = "no cluster" if project is None else f"no cluster {project!r}"
    where = "".join(f"; passed over: {reason}" for reason in passed_over)
    raise NotRunningError(f"{what} runs from {cwd}; start one with 'radixmesh up', or name an address{where}")


def read_state(folder: Path) -> ClusterState:
    """Reads the state of a running cluster.

    Raises NotRunningError if there is none, it is not of this version, or the lock's holder did not write it.
    """
    try:
        supervisor = supervisor_of(folder)
        with opened(folder) as handle:
            file = os.fdopen(os.open("state.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle))
        with file:
            _require_own(folder / "state.json", os.fstat(file.fileno()), stat.S_ISREG)
            content = json.loads(file.read(_MAX_STATE_BYTES))
        if content["version"] != _STATE_VERSION:
            raise NotRunningError(f"{folder}/state.json is of another version of radixmesh; restart that cluster")
        state = ClusterState(
            project=str(content["project"]),
            compose_file=str(content["compose_file"]),
            supervisor_pid=content["supervisor_pid"],
            processes=tuple(
                ProcessStatus(**{**process, "state": ProcessState(process["state"])})
                for process in content["processes"]
            ),
        )
    except (UntrustedFolderError, OSError, ValueError, KeyError, TypeError) as error:
        raise NotRunningError(
            f"{folder} holds no state of a running cluster ({error}); start one with 'radixmesh up'"
        ) from error
    if supervisor is None or supervisor.pid != state.supervisor_pid:
        raise NotRunningError(f"{folder} holds the state of a cluster that runs no more; start one with 'radixmesh up'")
    return state


def _running(root: Path, project: str | None, passed_over: list[str]) -> list[Path]:
    """Folders below `root`, of that project if it is given, with a living supervisor.

    Why others were not looked at is added to `passed_over`.
    """
    found: list[Path] = []
    try:
        with opened(root):
            entries = sorted(root.iterdir())
    except FileNotFoundError:
        return found
    except (OSError, UntrustedFolderError) as error:
        passed_over.append(str(error))
        return found
    for entry in entries:
        # A pointer is taken for what it names: that has to be ours as any other.
        target = target_of(entry) if entry.suffix == SUFFIX else entry
        if target is None or not target.is_dir() or project not in (None, entry.name.removesuffix(SUFFIX)):
            continue
        try:
            if is_supervised(target):
                found.append(target)
        except (OSError, UntrustedFolderError) as error:
            passed_over.append(str(error))
    return found


def _holder_of(folder: Path, text: bytes, inode: int) -> Supervisor:
    """The holder that the lock's text names, if the kernel confirms it."""
    try:
        pid_text, started_text = text.split()
        supervisor = Supervisor(int(pid_text), None if started_text == b"None" else int(started_text))
    except ValueError:
        raise UntrustedFolderError(
            f"{folder}/lock does not say who holds it: stop that process, and start again"
        ) from None
    holders = lock_holders(inode)
    if (holders is not None and supervisor.pid not in holders) or not is_own_process(*supervisor):
        raise UntrustedFolderError(f"{folder}/lock names process {supervisor.pid}, and another one holds it")
    return supervisor


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A handle of a run folder, which is ours alone and no link. Raises OSError or UntrustedFolderError."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFolderError(f"{folder} is no folder of ours ({error.strerror})") from error
    try:
        _require_own(folder, os.fstat(handle), stat.S_ISDIR)
        yield handle
    finally:
        os.close(handle)


def _require_own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedFolderError(f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
    if not is_kind(status.st_mode) or not is_own(status):
        raise UntrustedFolderError(f"{path} can be written by others: remove it, or chmod go-w")


def _make_private(folder: Path) -> None:
    """Others lose what they may do in a folder of ours, which an older version made. Raises UntrustedFolderError."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UntrustedFolderError(
            f"{folder} is no folder of user {os.geteuid()}: remove it, or name another --run-folder"
        )
    if not is_own(status):
        folder.chmod(_OWN_FOLDER)
