"""A compose file's services as local processes: the library behind `radixmesh up` and behind the tests of the mesh."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from radixmesh.daemons.cluster.compose.compose import ComposeFile, DependencyCondition
from radixmesh.daemons.cluster.compose_source import ComposeSource
from radixmesh.daemons.cluster.endpoint import Endpoint
from radixmesh.daemons.cluster.errors import (
    NoRestartCuresError,
    RollRefusedError,
    StartTimeoutError,
    UnknownServiceError,
)
from radixmesh.daemons.cluster.plan import ClusterPlan, ProcessSpec, plan_cluster, plan_endpoints
from radixmesh.daemons.cluster.ports import PortClaims
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.processes.process_supervisor import ProcessSupervisor
from radixmesh.daemons.cluster.roll.control import ControlServer
from radixmesh.daemons.cluster.roll.roll_plan import plan_roll
from radixmesh.daemons.cluster.roll.roller import Roller, RollEvent
from radixmesh.daemons.cluster.run_folder import ClusterState, RunFolder


class LocalCluster:
    """Runs the services of `compose_path` and keeps them running; an async context manager (start, stop).

    compose_path: a file, or several, later ones over earlier ones.
    scale: service -> number of replicas, instead of the file's. environment: service -> variables added to the file's.
    run_folder: where state and named volumes go; a temporary folder if None. publish: False gives published ports to
    chance, so that clusters of several tests do not meet. hang_window_s: instead of the health checks' interval x
    retries. on_line(process name, line) gets all output, on_status every change of state. Replicas count from 1.

    All methods belong to the event loop in which it was started, and that loop to a thread that lives as long as the
    processes may (see die_with_parent). Constructing raises ClusterError for whatever is wrong with the file.
    """

    def __init__(
        self,
        compose_path: Path | Sequence[Path],
        *,
        scale: Mapping[str, int] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        project: str | None = None,
        run_folder: Path | None = None,
        publish: bool = True,
        hang_window_s: float | None = None,
        on_line: Callable[[str, str], None] | None = None,
        on_status: Callable[[ProcessStatus], None] | None = None,
    ) -> None:
        paths = [compose_path] if isinstance(compose_path, Path) else compose_path
        self._source = ComposeSource(
            paths=[path.absolute() for path in paths],
            shell=dict(os.environ),
            scale=scale or {},
            environment=environment or {},
            project=project,
            publish=publish,
        )
        self._compose = self._source.read()
        self._compose_paths = os.pathsep.join(str(path) for path in self._source.paths)
        self._own_folder: tempfile.TemporaryDirectory[str] | None = None
        if run_folder is None:
            self._own_folder = tempfile.TemporaryDirectory(prefix="radixmesh-")
            run_folder = Path(self._own_folder.name) / "run"
        self._folder = RunFolder(run_folder.absolute())
        self._hang_window_s = hang_window_s
        self._on_line = on_line or (lambda name, line: None)
        self._on_status = on_status or (lambda status: None)
        self._control = ControlServer(self._folder.path, self.prepare_roll)
        self._plan: ClusterPlan | None = None
        self._claims = PortClaims()
        self._ports: dict[Endpoint, int] = {}
        self._supervisors: dict[tuple[str, int], ProcessSupervisor] = {}
        self._changed = asyncio.Event()

    @property
    def project(self) -> str:
        """The project's name."""
        return self._compose.project

    @property
    def containers_only(self) -> tuple[str, ...]:
        """Services that the file has for containers only; they do not run here."""
        return self._compose.containers_only

    @property
    def left_out(self) -> tuple[str, ...]:
        """`service.environment.NAME` of the settings that name one of them, and are not given to the processes."""
        return self._compose.left_out

    @property
    def run_folder(self) -> Path:
        """Path of the state file."""
        return self._folder.path

    @property
    def processes(self) -> tuple[ProcessStatus, ...]:
        """A snapshot of every process, in the order of the file."""
        return tuple(supervisor.status for supervisor in self._supervisors.values())

    @property
    def pids(self) -> dict[str, int]:
        """Name (`router-1`) -> process id, of the processes that run now."""
        return {status.name: status.pid for status in self.processes if status.pid is not None}

    def status(self, service: str, replica: int = 1) -> ProcessStatus:
        """A snapshot of one process. Raises UnknownServiceError."""
        return self.supervisor(service, replica).status

    def address(self, service: str, replica: int = 1, container_port: int | None = None) -> str:
        """Address of a process: `127.0.0.1:port`, the same over all its restarts. Raises UnknownServiceError."""
        spec = self.supervisor(service, replica).spec
        address = spec.address if container_port is None else spec.addresses.get(container_port)
        if address is None:
            raise UnknownServiceError(f"{spec.name} listens on no such port; it has {sorted(spec.addresses)}")
        return address

    def recent_lines(self, service: str, replica: int = 1) -> tuple[str, ...]:
        """The last lines that a process printed, over all its runs."""
        return self.supervisor(service, replica).recent_lines

    def kill(self, service: str, replica: int = 1, number: signal.Signals = signal.SIGKILL) -> bool:
        """Sends a signal to a process; False if it does not run now. The supervisor then does what it always does."""
        return self.supervisor(service, replica).send_signal(number)

    async def start(self) -> None:
        """Claims the run folder, chooses the ports and begins to start everything; returns before it is healthy.

        Raises AlreadyRunningError or PortTakenError, and leaves nothing behind then.
        """
        self._folder.claim()
        try:
            self._ports = await asyncio.to_thread(self._claims.assign, plan_endpoints(self._compose))
            self._plan = self._make_plan(self._compose)
            for spec in self._plan.processes:
                self._supervisors[spec.service, spec.replica] = self._make_supervisor(spec)
            await self._control.start()
        except BaseException:
            self._clear_up()
            raise
        self._write_state()
        for supervisor in self._supervisors.values():
            supervisor.begin()

    async def wait_healthy(self, timeout_s: float) -> None:
        """Waits until every process is healthy; raises StartTimeoutError, which says what held it up.

        A process that has ended for good, as its restart policy wants, ends the wait at once with the same error.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(status.state is ProcessState.HEALTHY for status in self.processes):
                    if any(status.state is ProcessState.ENDED for status in self.processes):
                        break
                    await self._next_change()
                else:
                    return
        for supervisor in self._supervisors.values():
            if supervisor.gave_up:
                raise NoRestartCuresError(supervisor.gave_up)
        raise StartTimeoutError(self._describe_unhealthy(timeout_s))

    async def wait_until(
        self, service: str, condition: Callable[[ProcessStatus], bool], *, replica: int = 1
    ) -> ProcessStatus:
        """Waits until the status of a process meets `condition`, and returns it. The caller sets the time limit."""
        while not condition(status := self.status(service, replica)):
            await self._next_change()
        return status

    async def stop(self) -> None:
        """Stops the processes, dependants first, and waits for the last one. Cancelled, it kills what is left."""
        try:
            await self._control.close()
            for level in reversed(self._plan.levels if self._plan is not None else ()):
                members = [member for member in self._supervisors.values() if member.spec.service in level]
                await asyncio.gather(*(member.stop() for member in members))
        except asyncio.CancelledError:
            await asyncio.gather(*(_kill(supervisor) for supervisor in self._supervisors.values()))
            raise
        finally:
            self._clear_up()

    def prepare_roll(
        self,
        services: Sequence[str] = (),
        ready_s: float = 300.0,
        is_trying: bool = True,
        on_event: Callable[[RollEvent], None] = lambda event: None,
    ) -> Roller:
        """A roll, to be run, of some services' processes or of all, with the settings that the file has now.

        ready_s: how long a process may take until it serves. is_trying: see Roller. Raises ClusterError for a file that
        cannot be read, or has other services, replicas or ports than what runs.
        """
        compose = self._source.read()
        if plan_endpoints(compose) != plan_endpoints(self._compose) or _replicas(compose) != _replicas(self._compose):
            raise RollRefusedError(
                "the file has other services, replicas or ports now than what runs: stop the cluster and start it again"
            )
        self._compose, self._plan = compose, self._make_plan(compose)
        steps = plan_roll(self._plan, services)
        return Roller(self, steps, ready_s=ready_s, is_trying=is_trying, on_event=on_event)

    async def spare(self, spec: ProcessSpec) -> ProcessSupervisor:
        """See roller.Cluster."""
        own = {place: None for place in self._ports if (place.service, place.replica) == (spec.service, spec.replica)}
        claims = PortClaims()
        ports = {**self._ports, **await asyncio.to_thread(claims.assign, own)}
        # It is tried for a moment, and not started again.
        claims.release()
        plan = plan_cluster(self._compose, ports, self._folder.volumes)
        (moved,) = (other for other in plan.processes if other.name == spec.name)
        return self._make_supervisor(moved, is_spare=True)

    async def __aenter__(self) -> "LocalCluster":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _make_plan(self, compose: ComposeFile) -> ClusterPlan:
        plan = plan_cluster(compose, self._ports, self._folder.volumes)
        for folder in plan.folders:
            folder.mkdir(parents=True, exist_ok=True)
        return plan

    def _make_supervisor(self, spec: ProcessSpec, *, is_spare: bool = False) -> ProcessSupervisor:
        return ProcessSupervisor(
            spec,
            folder=self._folder.path,
            hang_window_s=self._hang_window_s,
            dependencies_ready=lambda: self._wait_for_dependencies(spec),
            dependencies_healthy=lambda: self._are_dependencies_healthy(spec),
            on_line=(lambda name, line: self._on_line(f"{name} (tried)", line)) if is_spare else self._on_line,
            on_status=(lambda status: None) if is_spare else self._take_status,
        )

    def supervisor(self, service: str, replica: int) -> ProcessSupervisor:
        try:
            return self._supervisors[service, replica]
        except KeyError:
            known = ", ".join(supervisor.spec.name for supervisor in self._supervisors.values())
            raise UnknownServiceError(
                f"there is no {service}-{replica}; this cluster runs {known or 'nothing'}"
            ) from None

    async def _wait_for_dependencies(self, spec: ProcessSpec) -> None:
        for dependency in spec.depends_on:
            needed = {ProcessState.HEALTHY}
            if dependency.condition is DependencyCondition.STARTED:
                needed |= {ProcessState.STARTING, ProcessState.UNWELL, ProcessState.BACKOFF, ProcessState.ENDED}
            while any(status.state not in needed for status in self._statuses_of(dependency.service)):
                await self._next_change()

    def _are_dependencies_healthy(self, spec: ProcessSpec) -> bool:
        # One that is itself excused by its own dependencies is not healthy either: the cause is looked for at the root.
        return all(
            status.state is ProcessState.HEALTHY
            for dependency in spec.depends_on
            for status in self._statuses_of(dependency.service)
        )

    def _statuses_of(self, service: str) -> list[ProcessStatus]:
        return [status for status in self.processes if status.service == service]

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _take_status(self, status: ProcessStatus) -> None:
        self._write_state()
        self._on_status(status)
        # Wakes all who wait now; who waits from here on waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _write_state(self) -> None:
        state = ClusterState(
            project=self.project,
            compose_file=self._compose_paths,
            supervisor_pid=os.getpid(),
            processes=self.processes,
        )
        with suppress(OSError):
            # A full disk must not end the cluster; the state file is for onlookers.
            self._folder.write(state)

    def _describe_unhealthy(self, timeout_s: float) -> str:
        late = [
            supervisor
            for supervisor in self._supervisors.values()
            if supervisor.status.state is not ProcessState.HEALTHY
        ]
        parts = [f"not healthy after {timeout_s:g} s: {', '.join(supervisor.spec.name for supervisor in late)}"]
        for supervisor in late:
            parts.append(
                f"{supervisor.spec.name} is {supervisor.status.state.value} {supervisor.status.detail}".rstrip()
            )
            parts.extend(f"  {line}" for line in supervisor.recent_lines[-15:])
        return "\n".join(parts)

    def _clear_up(self) -> None:
        self._folder.release()
        self._claims.release()
        if self._own_folder is not None:
            self._own_folder.cleanup()


async def _kill(supervisor: ProcessSupervisor) -> None:
    supervisor.send_signal(signal.SIGKILL)
    await supervisor.stop()


def _replicas(compose: ComposeFile) -> dict[str, int]:
    return {name: service.replicas for name, service in compose.services.items()}
