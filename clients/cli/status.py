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
from radixmesh.cli.routes import show_routes
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import NotRunningError
from radixmesh.daemons.cluster.processes.process_status import ProcessStatus
from radixmesh.daemons.cluster.run_folder import find_run_folder, read_state

_COLUMNS = ("NAME", "STATE", "HEALTH", "ADDRESS", "PID", "RESTARTS", "UP", "EPOCH", "LOAD")


def run(arguments: list[str]) -> int:
    """Prints the table: 0 if every daemon serves, 1 if one does not or no cluster is found."""
    parser = argparse.ArgumentParser(prog="radixmesh status", description="Show what every daemon is doing.")
    parser.add_argument("address", nargs="*", help="daemons to ask, instead of those of the cluster that runs here")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--timeout", type=float, default=1.0, metavar="SECONDS", help="wait for an answer (default 1)")
    parser.add_argument("--routes", action="store_true", help="for every router, where it sends requests instead")
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
    if options.routes:
        routers = [process.address for process in processes if process.service == "router" and process.address]
        return show_routes(terminal, list(options.address) or routers, options.timeout, is_json=options.json)
    reports = asyncio.run(_ask_all(addresses, options.timeout, is_named=bool(options.address)))
    known: list[ProcessStatus | None] = list(processes) or [None] * len(addresses)
    for process, address, report in zip(known, addresses, reports, strict=True) if options.json else ():
        terminal.line(json.dumps(_record(process, address, report)))
    if not options.json:
        rows = [_row(*each) for each in zip(known, addresses, reports, strict=True)]
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


def _record(process: ProcessStatus | None, address: str | None, report: DaemonReport) -> dict[str, object]:
    """For programs: numbers are numbers, durations are seconds, and what is not known is null."""
    return {
        "name": process.name if process else None,
        "service": process.service if process else None,
        "replica": process.replica if process else None,
        "state": process.state.value if process else None,
        "health": report.health or None,
        "address": address,
        "pid": process.pid if process else None,
        "restarts": process.restarts if process else None,
        "uptime_s": _uptime_s(process),
        "epoch": report.epoch,
        "load": dict(report.figures),
    }


def _row(process: ProcessStatus | None, address: str | None, report: DaemonReport) -> tuple[str, ...]:
    uptime_s = _uptime_s(process)
    own = ("", "", "", "", "")
    if process is not None:
        age = "" if uptime_s is None else _describe_age(uptime_s)
        own = (
            process.name,
            process.state.value,
            "" if process.pid is None else str(process.pid),
            str(process.restarts),
            age,
        )
    name, state, pid, restarts, age = own
    epoch = "" if report.epoch is None else str(report.epoch)
    return (name, state, report.health, address or "", pid, restarts, age, epoch, report.load)


def _uptime_s(process: ProcessStatus | None) -> float | None:
    if process is None or process.pid is None or process.started_at is None:
        return None
    return round(max(0.0, time.time() - process.started_at), 3)


def _describe_age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
