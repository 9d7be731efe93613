"""A port that one replica of a service listens on, and where it really is on this machine."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from radixmesh.daemons.cluster.compose.compose import Service
from radixmesh.daemons.cluster.errors import ComposeError

LOCAL_HOST = "127.0.0.1"
BINDING = re.compile(r"(?<![\w.:-])(?:0\.0\.0\.0|\[::\]|\*):(?P<port>\d{1,5})(?!\d)")
"""An address that means "all interfaces of this container": how a setting tells a daemon where to listen."""


class Endpoint(NamedTuple):
    """`container_port` of replica `replica` (from 1) of `service`."""

    service: str
    replica: int
    container_port: int


def list_endpoints(services: Mapping[str, Service], replicas: Mapping[str, int]) -> dict[Endpoint, int | None]:
    """Lists every endpoint with the host port it must have, None where any will do.

    A published port belongs to replica 1; Docker would refuse to start the others. Raises ComposeError for a port that
    the service's own settings do not mention: the process could not be told to listen elsewhere.
    """
    endpoints: dict[Endpoint, int | None] = {}
    for service in services.values():
        published = {port.container_port: port.host_port for port in service.ports}
        for port in container_ports(service):
            for replica in range(1, replicas[service.name] + 1):
                endpoints[Endpoint(service.name, replica, port)] = published.get(port) if replica == 1 else None
    _refuse_published_twice(endpoints)
    return endpoints


def container_ports(service: Service) -> tuple[int, ...]:
    """The ports that a service listens on inside its container, in ascending order."""
    settings = (*service.environment.values(), *service.command)
    bound = {int(match["port"]) for text in settings for match in BINDING.finditer(text)}
    claimed = {*(port.container_port for port in service.ports), *service.expose}
    if service.healthcheck is not None:
        claimed.add(service.healthcheck.container_port)
    if claimed - bound:
        port = min(claimed - bound)
        raise ComposeError(
            f"services.{service.name}",
            f"nothing tells the process to listen on its port {port}; set RADIXMESH_LISTEN to 0.0.0.0:{port}",
        )
    return tuple(sorted(bound))


def _refuse_published_twice(endpoints: Mapping[Endpoint, int | None]) -> None:
    owners: dict[int, str] = {}
    for endpoint, host_port in endpoints.items():
        if host_port is None:
            continue
        if host_port in owners:
            where = f"services.{endpoint.service}.ports"
            raise ComposeError(
                where, f"port {host_port} is published by {owners[host_port]} as well; change one of them"
            )
        owners[host_port] = endpoint.service
