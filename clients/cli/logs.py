"""`radixmesh logs`: what the daemons of a running cluster have logged, and with -f what they log from now on."""

import argparse
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from radixmesh.cli.log_file import LogReader
from radixmesh.cli.log_line import readable
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import ClusterError
from radixmesh.daemons.cluster.run_folder import find_run_folder, is_supervised, read_state

_PAUSE_S = 0.2


def run(arguments: list[str]) -> int:
    """Prints the lines: 0; 1 if no cluster is found, or it has no such service."""
    options = _parser().parse_args(arguments)
    terminal = Terminal(colour=not options.no_color)
    try:
        folder = find_run_folder(options.project, Path.cwd(), os.environ)
        names = [process.name for process in read_state(folder).processes]
        services = {process.service for process in read_state(folder).processes}
        if unknown := [given for given in options.service if given not in services and given not in names]:
            terminal.error(f"radixmesh logs: there is no {', '.join(unknown)}; this cluster runs {', '.join(names)}")
            return 1
        _show(folder, names, options, terminal)
    except ClusterError as error:
        terminal.error(f"radixmesh logs: {error}")
        return 1
    return 0


def _show(folder: Path, names: list[str], options: argparse.Namespace, terminal: Terminal) -> None:
    def is_wanted(name: str) -> bool:
        return not options.service or name in options.service or name.rpartition("-")[0] in options.service

    def show(lines: Iterable[tuple[str, str]]) -> None:
        for name, line in lines:
            terminal.prefixed(name, line if options.raw_logs else readable(line))

    terminal.name_width([name for name in names if is_wanted(name)])
    reader = LogReader(folder, is_wanted)
    show(deque(reader.lines(), maxlen=options.lines))
    while options.follow:
        show(reader.lines())
        if not is_supervised(folder):
            show(reader.lines())
            return
        time.sleep(_PAUSE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixmesh logs", description="Show what the daemons of a cluster log.")
    parser.add_argument("service", nargs="*", help="of these services (worker) or processes (worker-1) only")
    parser.add_argument("-f", "--follow", action="store_true", help="and what they log from now on, until Ctrl-C")
    parser.add_argument("-n", "--lines", type=_count, default=200, metavar="N", help="at most so many (default 200)")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--raw-logs", action="store_true", help="show the daemons' JSON logs as they are")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)
