"""From a compose file to the processes that run it: a pure function of the file, the scale and the ports."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from radixmesh.daemons.cluster.compose.compose import ComposeFile, Dependency, HealthCheck, RestartPolicy, Service
from radixmesh.daemons.cluster.compose.translation import Translation
from radixmesh.daemons.cluster.endpoint import LOCAL_HOST, Endpoint, list_endpoints
from radixmesh.daemons.cluster.errors import ClusterError, ComposeError, UnknownServiceError
from radixmesh.daemons.cluster.start_order import start_levels

_WORKERS = "RADIXMESH_WORKERS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """All that is needed to run one replica, again and again, always in the same place."""

    service: str
    replica: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that the service adds to the environment it inherits."""
    addresses: Mapping[int, str]
    """Container port -> `127.0.0.1:port` on this machine."""
    health: HealthCheck | None
    restart: RestartPolicy
    depends_on: tuple[Dependency, ...]
    stop_grace_s: float

    @property
    def name(self) -> str:
        """Docker's name for it: `router-1`."""
        return f"{self.service}-{self.replica}"

    @property
    def address(self) -> str | None:
        """Its gRPC address: the one that its health check asks, else its only or lowest one."""
        if self.health is not None:
            return self.addresses[self.health.container_port]
        return next((self.addresses[port] for port in sorted(self.addresses)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The processes of a project, in the order of the file, and the levels in which their services start."""

    project: str
    processes: tuple[ProcessSpec, ...]
    levels: tuple[tuple[str, ...], ...]
    folders: tuple[Path, ...]
    """Host folders of named volumes, to be made before the start."""


def scale_compose(compose: ComposeFile, scale: Mapping[str, int]) -> ComposeFile:
    """Returns the file with the number of replicas of some services changed, as `--scale name=N` asks."""
    for name, count in scale.items():
        if name not in compose.services:
            raise UnknownServiceError(f"--scale {name}={count}: the file has {', '.join(compose.services)}")
        if not 0 <= count <= 256:
            raise ClusterError(f"--scale {name}={count}: the number of replicas is between 0 and 256")
    services = {
        name: replace(service, replicas=scale.get(name, service.replicas)) for name, service in compose.services.items()
    }
    return replace(compose, services=services)


def unpublish(compose: ComposeFile) -> ComposeFile:
    """Returns the file with every published port left to chance, so that several clusters fit on one machine."""
    return replace(
        compose,
        services={
            name: replace(service, ports=tuple(replace(port, host_port=None) for port in service.ports))
            for name, service in compose.services.items()
        },
    )


def plan_endpoints(compose: ComposeFile) -> dict[Endpoint, int | None]:
    """Lists the endpoints that need a port, with the one they must have or None."""
    return list_endpoints(compose.services, _replicas(compose))


def plan_cluster(compose: ComposeFile, ports: Mapping[Endpoint, int], volumes_folder: Path) -> ClusterPlan:
    """Plans the processes, given a port for each of `plan_endpoints(compose)`.

    Named volumes become folders below `volumes_folder`, one for all replicas. Raises ComposeError.
    """
    replicas = _replicas(compose)
    processes = tuple(
        _plan_process(service, replica, ports, replicas, volumes_folder)
        for service in compose.services.values()
        for replica in range(1, service.replicas + 1)
    )
    named = {
        volume.name for service in compose.services.values() for volume in service.volumes if volume.name is not None
    }
    return ClusterPlan(
        project=compose.project,
        processes=processes,
        levels=start_levels(compose.services),
        folders=tuple(volumes_folder / name for name in sorted(named)),
    )


def missing_host_paths(compose: ComposeFile) -> list[ComposeError]:
    """Lists the bind mounts whose source does not exist. Docker would quietly make empty folders of them."""
    return [
        ComposeError(
            f"services.{service.name}.volumes", f"{volume.host_path} does not exist; make it or correct the path"
        )
        for service in compose.services.values()
        for volume in service.volumes
        if volume.host_path is not None and not volume.host_path.exists()
    ]


def _replicas(compose: ComposeFile) -> dict[str, int]:
    return {name: service.replicas for name, service in compose.services.items()}


def _plan_process(
    service: Service, replica: int, ports: Mapping[Endpoint, int], replicas: Mapping[str, int], volumes_folder: Path
) -> ProcessSpec:
    paths = {
        volume.container_path: volume.host_path if volume.name is None else volumes_folder / volume.name
        for volume in service.volumes
    }
    translation = Translation(
        service=service.name,
        replica=replica,
        ports=ports,
        replicas=replicas,
        paths={container: host for container, host in paths.items() if host is not None},
    )
    where = f"services.{service.name}"
    words = [translation.text(word, f"{where}.command[{index}]") for index, word in enumerate(service.command)]
    environment = {
        name: translation.text(value, f"{where}.environment.{name}") for name, value in service.environment.items()
    }
    _refuse_scaled_workers(where, words, environment, service.environment)
    return ProcessSpec(
        service=service.name,
        replica=replica,
        argv=_local_argv(words),
        environment=environment,
        addresses={
            endpoint.container_port: f"{LOCAL_HOST}:{port}"
            for endpoint, port in ports.items()
            if (endpoint.service, endpoint.replica) == (service.name, replica)
        },
        health=service.healthcheck,
        restart=service.restart,
        depends_on=service.depends_on,
        stop_grace_s=service.stop_grace_s,
    )


def _refuse_scaled_workers(
    where: str, words: list[str], environment: Mapping[str, str], written: Mapping[str, str]
) -> None:
    # The scheduler would say so too, but only as it starts, and of addresses that nobody has written.
    num_workers = environment.get(_WORKERS, "").count(",") + 1
    num_named = written.get(_WORKERS, "").count(",") + 1
    if words[:2] == ["radixmesh", "scheduler"] and num_workers > num_named:
        raise ComposeError(
            f"{where}.environment.{_WORKERS}",
            f"it names {num_workers} workers by {num_named} names, and replicas of one service are no ranks of a group:"
            " leave that service at one replica, and give further workers services and schedulers of their own, as"
            " worker-a and worker-b of compose/scale.yml have, or a service for each rank (--tp-rank, --dp-rank)",
        )


def _local_argv(words: list[str]) -> tuple[str, ...]:
    # The interpreter that runs us has the package, whatever PATH says.
    if words[0] == "radixmesh":
        return (sys.executable, "-m", "radixmesh.cli", *words[1:])
    if words[0] in ("python", "python3"):
        return (sys.executable, *words[1:])
    return tuple(words)
