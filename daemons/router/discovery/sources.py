"""Sources of schedulers' addresses as --discover names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from radixmesh.daemons.router.discovery.dns_source import DnsSource
from radixmesh.daemons.router.discovery.docker_source import DockerSource
from radixmesh.daemons.router.discovery.file_source import FileSource
from radixmesh.daemons.router.discovery.kubernetes_source import KubernetesSource
from radixmesh.daemons.router.discovery.source import AddressSource, SourceError
from radixmesh.daemons.router.discovery.srv_lookup import SrvLookup, query_of
from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.errors import MeshError

FORMS = "file:PATH, dns:NAME:PORT, srv:_SERVICE._tcp.NAME, docker:LABEL[=VALUE]:PORT, kubernetes:NAMESPACE/SERVICE:PORT"


def make_sources(
    names: Sequence[str], *, docker_socket: str = "/var/run/docker.sock", kubernetes_api: str = ""
) -> Mapping[str, AddressSource]:
    """Sources by name. Raises ValueError that says what to write."""

    def dns(rest: str) -> AddressSource:
        split_host_port(rest)
        return DnsSource(rest)

    def srv(rest: str) -> AddressSource:
        try:
            query_of(rest, 0)
        except SourceError as error:
            raise ValueError(str(error)) from None
        return DnsSource(rest, SrvLookup())

    def docker(rest: str) -> AddressSource:
        label, port = _split_port(rest)
        if not port.isdecimal() or not 0 < int(port) <= 65_535:
            raise ValueError(port)
        return DockerSource(label, int(port), docker_socket)

    def kubernetes(rest: str) -> AddressSource:
        service, port = _split_port(rest)
        namespace, _, name = service.partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(service)
        return KubernetesSource(service, port, api=kubernetes_api)

    kinds: Mapping[str, Callable[[str], AddressSource]] = {
        "file": lambda rest: FileSource(Path(rest)),
        "dns": dns,
        "srv": srv,
        "docker": docker,
        "kubernetes": kubernetes,
    }
    sources: dict[str, AddressSource] = {}
    for text in names:
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                raise ValueError(rest)
            sources[text] = kinds[kind](rest)
        except (KeyError, ValueError, MeshError):
            raise ValueError(f"--discover: {text!r} is no source: write {FORMS}") from None
    return sources


def _split_port(text: str) -> tuple[str, str]:
    name, _, port = text.rpartition(":")
    if not name or not port:
        raise ValueError(text)
    return name, port
