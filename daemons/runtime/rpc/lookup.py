"""Name lookup: one pinned address for every replica that the name resolves to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from radixmesh.daemons.runtime.addresses import UNIX_PREFIX, pin_address, split_host_port
from radixmesh.daemons.runtime.errors import MeshError


def is_name(address: str) -> bool:
    """True if address may stand for several daemons, and for others later: neither a socket nor a fixed host."""
    if address.startswith(UNIX_PREFIX):
        return False
    try:
        host, _ = split_host_port(address)
    except MeshError:
        return False
    if host == "localhost":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def look_up(address: str, timeout_s: float = 2.0) -> tuple[str, ...]:
    """Every replica behind "name:port" as a pinned address, sorted; empty when the name cannot be resolved now.

    Of a name with addresses of both families only the IPv4 ones count: each replica has one of each.
    """
    host, port = split_host_port(address)
    try:
        async with asyncio.timeout(timeout_s):
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return ()
    families = {family for family, *_ in infos}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = {str(info[4][0]) for info in infos if info[0] == family}
    return tuple(sorted(pin_address(address, found) for found in hosts))
