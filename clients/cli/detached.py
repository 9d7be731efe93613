"""`radixmesh up --detach`: a supervisor that outlives the terminal, started and waited for until all is healthy."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import ClusterError, NotRunningError, StartTimeoutError
from radixmesh.daemons.cluster.processes.process_status import ProcessState
from radixmesh.daemons.cluster.run_folder import ClusterState, read_state

_PAUSE_S = 0.1
_STOP_S = 60.0


def start_detached(
    arguments: list[str], project_and_folder: tuple[str, Path], wait_s: float, terminal: Terminal, when_healthy: str
) -> int:
    """Starts `up` with the same arguments in a session of its own: 0 once all is healthy, or what it ended with.

    Raises StartTimeoutError if that takes more than `wait_s` seconds; nothing is left running then.
    """
    project, folder = project_and_folder
    # Of two the last one counts, however the first was written.
    command = [sys.executable, "-m", "radixmesh.cli", "up", *arguments, "--no-detach", "--no-logs", "--no-color"]
    # It says little (its logs go to the run folder), and needs somewhere to say it when we are gone.
    with tempfile.TemporaryFile() as said:
        supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            state = _wait_healthy(supervisor, folder, time.monotonic() + wait_s)
        except BaseException:
            supervisor.terminate()
            try:
                supervisor.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                supervisor.kill()
            raise
        if state is None:
            said.seek(0)
            terminal.line(said.read().decode(errors="replace").strip())
            return supervisor.returncode or 1
    terminal.line(f"{project}: {len(state.processes)} processes are healthy, and run on (pid {supervisor.pid}).")
    for process in state.processes:
        if process.address is not None:
            terminal.line(f"  {process.name} {process.address}")
    terminal.line(f"\n{when_healthy.replace('Ctrl-C stops everything', 'radixmesh logs -f | radixmesh down')}")
    # It is nobody's child from here on: Python would complain about one that still runs.
    supervisor.returncode = 0
    return 0


def _wait_healthy(supervisor: "subprocess.Popen[bytes]", folder: Path, until: float) -> ClusterState | None:
    """The state in which all are healthy; None = the supervisor has ended. Raises StartTimeoutError, ClusterError."""
    late = "nothing was started"
    while time.monotonic() < until:
        if supervisor.poll() is not None:
            return None
        try:
            state = read_state(folder)
        except NotRunningError:
            time.sleep(_PAUSE_S)
            continue
        if state.supervisor_pid == supervisor.pid and state.processes:
            states = [process.state for process in state.processes]
            if all(each is ProcessState.HEALTHY for each in states):
                return state
            ended = [process for process in state.processes if process.state is ProcessState.ENDED]
            if ended:
                raise ClusterError(
                    f"{ended[0].name} has {ended[0].detail}: run 'up' without --detach to see what it says"
                )
            late = ", ".join(each.name for each in state.processes if each.state is not ProcessState.HEALTHY)
        time.sleep(_PAUSE_S)
    raise StartTimeoutError(f"not healthy in time: {late}; everything is stopped")
