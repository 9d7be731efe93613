"""`radixmesh up`: starts a compose file's services as local processes, shows what they do, and keeps them running."""

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from pathlib import Path

from radixmesh.cli.detached import start_detached
from radixmesh.cli.log_file import LogWriter
from radixmesh.cli.log_line import readable
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.compose.reader import read_compose
from radixmesh.daemons.cluster.errors import ClusterError, PortTakenError
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.run_folder import default_run_folder
from radixmesh.daemons.cluster.run_pointer import pointer_to

_DEMO_PROMPT = "I met a traveller from an antique land"
_EXIT_INTERRUPTED = 130


_TRY = 'Try: radixmesh generate "..." | radixmesh status | Ctrl-C stops everything.'


def run(
    arguments: list[str],
    *,
    when_healthy: str = _TRY,
    asked_by: str = "radixmesh up",
    port_flags: str = "publish another port in the compose file, or say --no-publish (any free ports)",
) -> int:
    """Runs until Ctrl-C or SIGTERM (0), or until the cluster cannot be started (1).

    when_healthy: said once all processes are healthy. asked_by: the command that error messages name.
    port_flags: what to say where a port is taken.
    """
    options = _parser().parse_args(arguments)
    terminal = Terminal(colour=not options.no_color)
    try:
        if options.detach and options.demo:
            raise ClusterError("--demo shows an answer here: leave --detach out, or ask by radixmesh generate")
        _name_model(os.environ)
        if options.detach:
            return start_detached(arguments, _project_and_folder(options), options.wait_s, terminal, when_healthy)
        scale = dict(_parse_scale(text) for text in options.scale)
        return asyncio.run(_up(options, scale, terminal, when_healthy))
    except PortTakenError as error:
        terminal.error(f"{asked_by}: {error}, or {port_flags}")
    except ClusterError as error:
        terminal.error(f"{asked_by}: {error}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmesh up", description="Run a compose file's services as local processes."
    )
    parser.add_argument(
        *("-f", "--file"),
        action="append",
        type=Path,
        help="compose file (compose/local.yml); repeatable, a later one over the earlier ones",
    )
    parser.add_argument(
        "--scale", action="append", default=[], metavar="SERVICE=N", help="number of replicas; repeatable"
    )
    parser.add_argument("-p", "--project", help="name of this cluster, instead of the file's")
    parser.add_argument("--run-folder", type=Path, help="where its state goes (default .radixmesh/<project>)")
    parser.add_argument("--no-publish", action="store_true", help="choose free ports instead of the published ones")
    parser.add_argument("--raw-logs", action="store_true", help="show the daemons' JSON logs as they are")
    parser.add_argument("--no-color", action="store_true", help="plain text")
    parser.add_argument("--no-logs", action="store_true", help="do not show what daemons print: radixmesh logs does")
    parser.add_argument(
        *("-d", "--detach"),
        action=argparse.BooleanOptionalAction,
        default=False,
        help="return once all are healthy, and leave them running",
    )
    parser.add_argument(
        "--wait-s", type=float, default=600.0, help="with --demo or --detach: how long it may take to become healthy"
    )
    parser.add_argument(
        "--demo", nargs="?", const=_DEMO_PROMPT, metavar="PROMPT", help="stream one completion, then serve on"
    )
    return parser


def _parse_scale(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or not count.isdecimal():
        raise ClusterError(f"--scale {text}: write it as SERVICE=N, for instance --scale tokenizer=2")
    return name, int(count)


async def _up(options: argparse.Namespace, scale: dict[str, int], terminal: Terminal, when_healthy: str) -> int:
    project, folder = _project_and_folder(options)
    log = LogWriter(folder)

    def on_line(name: str, line: str) -> None:
        log.write(name, line)
        if not options.no_logs:
            terminal.prefixed(name, line if options.raw_logs else readable(line))

    def on_status(status: ProcessStatus) -> None:
        log.write(status.name, f"{status.state.value} {_describe(status)}".rstrip())
        if not options.no_logs:
            terminal.progress(status.name, status.state.value, _describe(status), _tally(cluster))

    cluster = LocalCluster(
        _files(options),
        scale=scale,
        project=project,
        run_folder=folder,
        publish=not options.no_publish,
        on_line=on_line,
        on_status=on_status,
    )
    interrupted = asyncio.Event()
    _on_stop_signals(interrupted.set)
    _say_what_needs_containers(cluster, terminal)
    await cluster.start()
    pointed = ExitStack()
    try:
        # So that `down` and `status` find a folder that was chosen by --run-folder.
        pointed.enter_context(pointer_to(folder, default_run_folder(project, Path.cwd(), os.environ)))
        terminal.name_width([status.name for status in cluster.processes])
        serving = asyncio.create_task(_serve(cluster, options, terminal, when_healthy))
        stopping = asyncio.create_task(interrupted.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        stopping.cancel()
    finally:
        await _stop(cluster, terminal)
        pointed.close()
        log.close()
    return 0


def _name_model(environment: MutableMapping[str, str]) -> None:
    """RADIXMESH_MODEL_FOLDER is an absolute path, whose last part is what clients call the model unless told otherwise.

    Raises ClusterError for what the compose files would take for another folder.
    """
    name, folder = environment.get("RADIXMESH_MODEL_NAME", ""), environment.get("RADIXMESH_MODEL_FOLDER", "")
    if "/" in name:
        advice = "a name, not a path; set RADIXMESH_MODEL_FOLDER to the folder, or try radixmesh serve FOLDER"
        raise ClusterError(f"RADIXMESH_MODEL_NAME={name} is {advice}")
    if not folder:
        return
    if not Path(folder).is_absolute() or not Path(folder, "config.json").is_file():
        raise ClusterError(f"RADIXMESH_MODEL_FOLDER={folder} is no absolute path of a folder with a config.json")
    environment.setdefault("RADIXMESH_MODEL_NAME", Path(folder).name)


def _files(options: argparse.Namespace) -> list[Path]:
    return options.file or [Path("compose/local.yml")]


def _project_and_folder(options: argparse.Namespace) -> tuple[str, Path]:
    project = options.project or read_compose(_files(options), os.environ).project
    folder = options.run_folder or default_run_folder(project, Path.cwd(), os.environ)
    return project, folder.absolute()


async def _serve(cluster: LocalCluster, options: argparse.Namespace, terminal: Terminal, when_healthy: str) -> None:
    """Shows that everything is up, gives the demonstration if asked for, and then lasts until cancelled."""
    await cluster.wait_healthy(options.wait_s if options.demo else float("inf"))
    router = cluster.address("router") if any(status.service == "router" for status in cluster.processes) else None
    count = len(cluster.processes)
    tally = "1 process is healthy." if count == 1 else f"All {count} processes are healthy."
    terminal.line(f"\n{tally}" + (f" The router is at {router}." if router else ""))
    if options.demo is not None and router is not None:
        await _demonstrate(router, options.demo, terminal)
    if router is not None:
        terminal.line(f"\n{when_healthy}\n")
    await asyncio.Event().wait()


def _say_what_needs_containers(cluster: LocalCluster, terminal: Terminal) -> None:
    if cluster.containers_only:
        terminal.line(f"Not run without Docker, for they exist as images only: {', '.join(cluster.containers_only)}.")
    if cluster.left_out:
        terminal.line(f"Left out, for it names one of them: {', '.join(cluster.left_out)}.")


async def _demonstrate(router: str, prompt: str, terminal: Terminal) -> None:
    from radixmesh.cli.generate import stream_completion
    from radixmesh.daemons.runtime.errors import MeshError

    terminal.line(f'\n$ radixmesh generate --temperature 0 "{prompt}"')
    try:
        await stream_completion(router, prompt, terminal)
    except MeshError as error:
        raise ClusterError(f"the cluster is healthy, but the demonstration failed: {error}") from error


async def _stop(cluster: LocalCluster, terminal: Terminal) -> None:
    terminal.line("\nStopping, dependants first; once more to kill at once.")
    stopping = asyncio.create_task(cluster.stop())
    _on_stop_signals(stopping.cancel)
    await asyncio.wait([stopping])
    if not stopping.cancelled():
        stopping.result()


def _on_stop_signals(action: Callable[[], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, action)


def _describe(status: ProcessStatus) -> str:
    if status.state is ProcessState.STARTING and not status.detail:
        return f"pid {status.pid}" + (f", will serve at {status.address}" if status.address else "")
    return status.detail


def _tally(cluster: LocalCluster) -> str:
    processes = cluster.processes
    return f"[{sum(status.state is ProcessState.HEALTHY for status in processes)}/{len(processes)} healthy]"
