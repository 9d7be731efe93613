"""The folder in which a running cluster is found again: who supervises it, and the state of every process.

<folder>/lock         held (flock) by the supervisor for as long as it lives; its text is the supervisor's pid
<folder>/state.json   replaced whole at every change
<folder>/volumes/     named volumes
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixmesh.daemons.cluster.errors import AlreadyRunningError, NotRunningError
from radixmesh.daemons.cluster.process_status import ProcessState, ProcessStatus

_FOLDER_NAME = ".radixmesh"
_STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """What a supervisor last wrote."""

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
        """Where named volumes live."""
        return self.path / "volumes"

    def claim(self) -> None:
        """Makes the folder and takes its lock; raises AlreadyRunningError if a living supervisor has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.path.parent.name == _FOLDER_NAME:
            (self.path.parent / ".gitignore").write_text("*\n")
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            message = (
                f"this project runs already (see {self.path}); stop it with 'radixmesh down' or give another --project"
            )
            raise AlreadyRunningError(message) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
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
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path / "state.json")

    def release(self) -> None:
        """Removes the state and lets the lock go. The lock file stays: removing it would let two claim the folder."""
        if self._lock is not None:
            (self.path / "state.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def default_run_folder(project: str, cwd: Path, environment: Mapping[str, str]) -> Path:
    """`.radixmesh/<project>` below `cwd`, or below $XDG_RUNTIME_DIR where `cwd` cannot be written."""
    runtime_folder = environment.get("XDG_RUNTIME_DIR")
    if not os.access(cwd, os.W_OK) and runtime_folder:
        return Path(runtime_folder) / "radixmesh" / project
    return cwd / _FOLDER_NAME / project


def is_supervised(folder: Path) -> bool:
    """Tells whether a living supervisor holds `folder`. A pid could belong to a stranger by now; the lock cannot."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def find_run_folder(project: str | None, cwd: Path, environment: Mapping[str, str]) -> Path:
    """Finds the running cluster: below `cwd` or one of its parents, or below $XDG_RUNTIME_DIR.

    Raises NotRunningError if there is none, or if there are several and `project` does not say which.
    """
    roots = [folder / _FOLDER_NAME for folder in (cwd, *cwd.parents)]
    if runtime_folder := environment.get("XDG_RUNTIME_DIR"):
        roots.append(Path(runtime_folder) / "radixmesh")
    for root in roots:
        running = [folder for folder in _subfolders(root) if project in (None, folder.name) and is_supervised(folder)]
        if len(running) > 1:
            names = ", ".join(folder.name for folder in running)
            raise NotRunningError(f"several clusters run here ({names}); choose one with --project")
        if running:
            return running[0]
    what = "no cluster" if project is None else f"no cluster {project!r}"
    raise NotRunningError(f"{what} runs from {cwd}; start one with 'radixmesh up', or name an address")


def read_state(folder: Path) -> ClusterState:
    """Reads the state of a running cluster; raises NotRunningError if there is none or it is not of this version."""
    try:
        content = json.loads((folder / "state.json").read_text())
        if content["version"] != _STATE_VERSION:
            raise NotRunningError(f"{folder}/state.json is of another version of radixmesh; restart that cluster")
        return ClusterState(
            project=content["project"],
            compose_file=content["compose_file"],
            supervisor_pid=content["supervisor_pid"],
            processes=tuple(
                ProcessStatus(**{**process, "state": ProcessState(process["state"])})
                for process in content["processes"]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotRunningError(
            f"{folder} holds no state of a running cluster ({error}); start one with 'radixmesh up'"
        ) from error


def _subfolders(root: Path) -> Sequence[Path]:
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir())
    except OSError:
        return ()
