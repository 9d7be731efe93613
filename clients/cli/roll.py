"""`radixmesh roll`: replaces the processes of a running cluster one after the other, while it serves."""

import argparse
import json
import os
import sys
from pathlib import Path

from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.errors import ClusterError, RollAbortedError
from radixmesh.daemons.cluster.roll.control import ask_for_roll
from radixmesh.daemons.cluster.roll.roller import RollEvent
from radixmesh.daemons.cluster.run_folder import find_run_folder

_EXIT_REFUSED, _EXIT_ABORTED = 1, 3


def run(arguments: list[str]) -> int:
    """0 when all are replaced and serve, 1 if nothing was done, 3 if it ended early: the message says how far."""
    parser = argparse.ArgumentParser(
        prog="radixmesh roll",
        description="Replace the processes of a cluster that 'radixmesh up' started, one after the other, by new "
        "ones of the installed version with the settings that the compose file has now. Requests go on meanwhile.",
    )
    parser.add_argument("services", nargs="*", metavar="SERVICE", help="only these (default: all)")
    parser.add_argument(
        *("-f", "--file"),
        action="append",
        type=Path,
        help="compose file that 'up' was given: rolls the cluster of that name; repeatable as for 'up'",
    )
    parser.add_argument("-p", "--project", help="which cluster, if several run here, instead of the file's")
    parser.add_argument(
        "--ready-s",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a new process may take until it serves",
    )
    parser.add_argument(
        "--no-canary", action="store_true", help="do not start a new process beside the old ones first, to see it serve"
    )
    parser.add_argument("--no-trial", dest="no_canary", action="store_true", help=argparse.SUPPRESS)  # Deprecated.
    parser.add_argument("--json", action="store_true", help="one JSON object per event and line, for programs")
    options = parser.parse_args(arguments)
    if "--no-trial" in arguments:
        print("--no-trial is called --no-canary now: the old name goes with the next release", file=sys.stderr)
    terminal = Terminal()

    def on_event(event: RollEvent) -> None:
        if options.json:
            terminal.line(json.dumps({**event._asdict(), "seconds": round(event.seconds, 3)}))
        else:
            terminal.line(_in_words(event))

    try:
        project = options.project
        if project is None and options.file:
            project = read_compose(options.file, os.environ).project
        folder = find_run_folder(project, Path.cwd(), os.environ)
        replaced = ask_for_roll(
            folder,
            options.services,
            ready_s=options.ready_s,
            is_trying=not options.no_canary,
            on_event=on_event,
        )
    except RollAbortedError as error:
        terminal.error(f"radixmesh roll: ended early: {error}")
        return _EXIT_ABORTED
    except (ClusterError, OSError) as error:
        terminal.error(f"radixmesh roll: {error}")
        return _EXIT_REFUSED
    if not options.json:
        terminal.line(f"{len(replaced)} replaced: {', '.join(replaced)}")
    return 0


def _in_words(event: RollEvent) -> str:
    words = {
        "trying": "a new one is started beside it, to see whether it serves",
        "tried": f"the new one serves ({event.seconds:.1f} s)",
        "leaving": "is asked to leave",
        "starting": f"has left ({event.seconds:.1f} s), and is started",
        "ready": f"serves again after {event.seconds:.1f} s",
        "restoring": "is started with its old settings",
    }
    return f"{event.process} {words.get(event.what, event.what)}"
