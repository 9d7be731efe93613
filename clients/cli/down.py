"""`radixmesh down`: asks the supervisor of a running cluster to stop it, and waits until it has."""

import argparse
import os
import signal
import time
from pathlib import Path

from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.errors import ClusterError
from radixmesh.daemons.cluster.processes.process_identity import is_own_process, signal_process
from radixmesh.daemons.cluster.run_folder import find_run_folder, is_supervised, read_state, supervisor_of


def run(arguments: list[str]) -> int:
    """Stops the cluster: 0 when it is gone, 1 if there is none or it takes too long."""
    parser = argparse.ArgumentParser(prog="radixmesh down", description="Stop a cluster that 'radixmesh up' started.")
    parser.add_argument(
        *("-f", "--file"),
        action="append",
        type=Path,
        help="compose file that 'up' was given: stops the cluster of that name; repeatable as for 'up'",
    )
    parser.add_argument("-p", "--project", help="which cluster, if several run here, instead of the file's")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait (default 60)")
    options = parser.parse_args(arguments)
    terminal = Terminal()
    try:
        project = options.project
        if project is None and options.file:
            project = read_compose(options.file, os.environ).project
        folder = find_run_folder(project, Path.cwd(), os.environ)
        supervisor, state = supervisor_of(folder), read_state(folder)
    except ClusterError as error:
        terminal.error(f"radixmesh down: {error}")
        return 1
    if supervisor is not None:
        signal_process(supervisor.pid, supervisor.started, signal.SIGTERM)
    deadline = time.monotonic() + options.timeout
    while supervisor is not None and is_own_process(*supervisor) and is_supervised(folder):
        if time.monotonic() > deadline:
            terminal.error(
                f"radixmesh down: {state.project} still runs after {options.timeout:g} s (pid {state.supervisor_pid})"
            )
            return 1
        time.sleep(0.05)
    terminal.line(f"{state.project} is stopped.")
    return 0
