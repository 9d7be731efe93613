"""`radixmesh status`: every daemon of a running cluster, or those at given addresses, in a table."""

import argparse
import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from radixmesh.cli.access import access_from_environment
from radixmesh.cli.daemon_report import DaemonReport, ask_daemon
from radixmesh.cli.routers import may_send_key
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.cluster.process_status import ProcessStatus
from radixmesh.daemons.cluster.run_folder import find_run_folder, read_state

_COLUMNS = ("NAME", "STATE", "HEALTH", "ADDRESS", "PID", "RESTARTS", "UP", "EPOCH", "LOAD")


def run(arguments: list[str]) -> int:
    """Prints the table: 0 if every daemon serves, 1 if one does not or no cluster is found."""
    parser = argparse.ArgumentParser(prog="radixmesh status", description="Show what every daemon is doing.")
    parser.add_argument("address", nargs="*", help="daemons to ask, instead of those of the cluster that runs here")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="wait for an answer (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object per daemon and line, for programs")
    options = parser.parse_args(arguments)
    terminal = Terminal()
    try:
        processes = (
            () if options.address else read_state(find_run_folder(options.project, Path.cwd(), os.environ)).processes
        )
    except NotRunningError as error:
        terminal.error(f"radixmesh status: {error}")
        return 1
    addresses = list(options.address) or [process.address for process in processes]
    reports = asyncio.run(_ask_all(addresses, options.timeout, is_named=bool(options.address)))
    if processes:
        rows = [_process_row(process, report) for process, report in zip(processes, reports, strict=True)]
    else:
        rows = [_row("", "", report, address) for address, report in zip(addresses, reports, strict=True)]
    if options.json:
        for row in rows:
            terminal.line(json.dumps({name.lower(): cell for name, cell in zip(_COLUMNS, row, strict=True)}))
    else:
        terminal.table(_COLUMNS, rows)
    return 0 if all(report.health in ("serving", "") for report in reports) else 1


async def _ask_all(addresses: list[str | None], timeout_s: float, *, is_named: bool) -> list[DaemonReport]:
    access = access_from_environment()

    async def ask(address: str | None) -> DaemonReport:
        if address is None:
            return DaemonReport(health="")
        is_home = is_named or may_send_key(address, access)
        return await ask_daemon(address, timeout_s, access if is_home else replace(access, api_key=""))

    return await asyncio.gather(*(ask(address) for address in addresses))


def _process_row(process: ProcessStatus, report: DaemonReport) -> tuple[str, ...]:
    age = "" if process.pid is None or process.started_at is None else _describe_age(time.time() - process.started_at)
    pid = "" if process.pid is None else str(process.pid)
    return _row(process.name, process.state.value, report, process.address or "", pid, str(process.restarts), age)


def _row(
    name: str, state: str, report: DaemonReport, address: str | None, pid: str = "", restarts: str = "", age: str = ""
) -> tuple[str, ...]:
    return (name, state, report.health, address or "", pid, restarts, age, report.epoch, report.load)


def _describe_age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
