"""The subset of a compose file that local processes honour, as values.

Times are seconds, paths are absolute host paths unless their name says container.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class DependencyCondition(enum.Enum):
    """State that a dependency must have reached before its dependant is started."""

    STARTED = "service_started"
    HEALTHY = "service_healthy"


class RestartPolicy(enum.Enum):
    """When a process that ended is started again. `unless-stopped` and `always` are the same to local processes."""

    NO = "no"
    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    UNLESS_STOPPED = "unless-stopped"

    def restarts(self, exit_code: int) -> bool:
        """Tells whether an exit with `exit_code` (negative: the signal that killed it) is followed by a start."""
        if self is RestartPolicy.ON_FAILURE:
            return exit_code != 0
        return self is not RestartPolicy.NO


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependency:
    """`service` must have reached `condition`, all replicas of it."""

    service: str
    condition: DependencyCondition


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """`radixmesh health <address>`, asked by the supervisor itself over gRPC.

    A process that has served and then does not for `interval_s * retries` is taken for hung.
    """

    container_port: int
    """The port inside the container that the check asks."""
    interval_s: float = 1.0
    """Pause between checks once the process has served."""
    timeout_s: float = 1.0
    """Deadline of one check."""
    retries: int = 5
    """Failed checks in a row that make a process hung."""
    start_period_s: float = 0.0
    """Time a new process gets before silence counts against it."""
    start_interval_s: float = 0.2
    """Pause between checks until the process has served for the first time."""

    @property
    def hang_window_s(self) -> float:
        """Seconds for which a process may fail its checks before it is killed."""
        return self.interval_s * self.retries


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPort:
    """A port of a service offered on the host; `host_port` None leaves the choice to the machine."""

    container_port: int
    host_port: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A host folder or file seen at `container_path`; `name` is set instead of `host_path` for a named volume."""

    container_path: str
    host_path: Path | None
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service: what to run, where it listens, whom it waits for."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    depends_on: tuple[Dependency, ...] = ()
    healthcheck: HealthCheck | None = None
    restart: RestartPolicy = RestartPolicy.NO
    ports: tuple[PublishedPort, ...] = ()
    expose: tuple[int, ...] = ()
    volumes: tuple[Volume, ...] = ()
    replicas: int = 1
    stop_grace_s: float = 10.0
    """Time between the stop signal and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposeFile:
    """A project: its name and its services in the order of the file.

    containers_only: services that the file marks `x-local: skip`. left_out: settings of others that name one of these.
    """

    project: str
    services: Mapping[str, Service]
    containers_only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
