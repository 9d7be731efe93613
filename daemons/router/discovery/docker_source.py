"""Running containers with a label, by the Docker engine's API over its socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import quote

import msgspec

from radixmesh.daemons.router.discovery.http_get import Endpoint, get
from radixmesh.daemons.router.discovery.source import AddressSource, SourceError

# The oldest version that current engines speak and that has all of this.
_API = "/v1.24"
_MAX_BYTES = 16 << 20
_LOOK_S = 2.0


class _Network(msgspec.Struct):
    ip: str = msgspec.field(name="IPAddress", default="")
    ip6: str = msgspec.field(name="GlobalIPv6Address", default="")


class _Settings(msgspec.Struct):
    networks: dict[str, _Network] | None = msgspec.field(name="Networks", default=None)


class _Container(msgspec.Struct):
    settings: _Settings | None = msgspec.field(name="NetworkSettings", default=None)


_CONTAINERS = msgspec.json.Decoder(list[_Container])


class DockerSource(AddressSource):
    """label: "name" or "name=value". port: of the scheduler in each container; its first network's address counts."""

    def __init__(self, label: str, port: int, socket: str, look_s: float = _LOOK_S) -> None:
        filters = msgspec.json.encode({"label": [label], "status": ["running"]}).decode()
        self._target = f"{_API}/containers/json?filters={quote(filters)}"
        self._port = port
        self._endpoint = Endpoint(unix_path=socket)
        self._look_s = look_s

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        while True:
            async with get(self._endpoint, self._target, {}) as response:
                body = await response.whole(_MAX_BYTES)
            if response.status != 200:
                raise SourceError(f"the Docker engine answers with status {response.status}")
            yield self._addresses_in(body)
            await asyncio.sleep(self._look_s)

    def _addresses_in(self, body: bytes) -> frozenset[str]:
        try:
            containers = _CONTAINERS.decode(body)
        except msgspec.DecodeError as error:
            raise SourceError(f"the Docker engine's answer is no list of containers ({error})") from None
        found = (_ip_of(container) for container in containers)
        return frozenset(f"{ip}:{self._port}" for ip in found if ip)


def _ip_of(container: _Container) -> str:
    networks = (container.settings.networks if container.settings else None) or {}
    # By name, so that a container in several networks keeps its address from look to look.
    for _, network in sorted(networks.items()):
        if network.ip or network.ip6:
            return network.ip or f"[{network.ip6}]"
    return ""
