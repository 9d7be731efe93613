"""Addresses of daemons: "host:port", "[v6]:port" or "unix:/path".

A pinned address, "name:port#ip", is one of the replicas behind a name: the ip is dialled, the name is who must answer.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

UNIX_PREFIX = "unix:"
# sockaddr_un.sun_path holds 108 bytes with its final zero.
_MAX_UNIX_PATH_BYTES = 107
# Of a DNS name, and of the zone that an IPv6 address may name.
_MAX_NAME_CHARS = 253
_PIN = "#"


def parse_address(address: str) -> str:
    """The address as grpc takes it ("unix://" shortened). Raises MeshError INVALID_ARGUMENT if it is none."""
    if address.startswith(UNIX_PREFIX):
        path = address.removeprefix(UNIX_PREFIX)
        path = path[2:] if path.startswith("//") else path
        if not path or len(path.encode()) > _MAX_UNIX_PATH_BYTES:
            raise _invalid(address, f"the path of a unix socket has 1 to {_MAX_UNIX_PATH_BYTES} bytes")
        return UNIX_PREFIX + path
    name, pin, ip = address.partition(_PIN)
    if pin:
        return f"{_bracketed(ip)}:{split_host_port(name)[1]}"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65_535:
        raise _invalid(address, 'write "host:port" or "unix:/path"')
    if not _can_be_looked_up(host):
        raise _invalid(address, f"a name has at most {_MAX_NAME_CHARS} characters, and 1 to 63 between two dots")
    return address


def split_host_port(address: str) -> tuple[str, int]:
    """Host (brackets of IPv6 removed) and port of a "host:port" address. Raises MeshError INVALID_ARGUMENT."""
    if address.startswith(UNIX_PREFIX):
        raise _invalid(address, 'write "host:port"')
    host, _, port = parse_address(address).rpartition(":")
    return host.strip("[]"), int(port)


def pin_address(address: str, ip: str) -> str:
    """The replica of "name:port" that has this IP address."""
    return f"{address}{_PIN}{ip}"


def authority_of(address: str) -> str | None:
    """The "name:port" of a pinned address, None of any other."""
    name, pin, _ = address.partition(_PIN)
    return name if pin and not address.startswith(UNIX_PREFIX) else None


def own_host(listen: Sequence[str]) -> str:
    """The address by which others reach the server that listens there; where it listens on every address of the
    machine, the one that the machine's name stands for. 127.0.0.1 if nobody else can reach it."""
    hosts = [split_host_port(address)[0] for address in listen if not address.startswith(UNIX_PREFIX)]
    if not hosts:
        return "127.0.0.1"
    if hosts[0] not in ("0.0.0.0", "::"):
        return hosts[0]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _can_be_looked_up(host: str) -> bool:
    """False for what ends a lookup with a UnicodeError, which is no OSError and would end who asked."""
    if len(host) > _MAX_NAME_CHARS:
        return False
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _invalid(address: str, hint: str) -> MeshError:
    message = f"{address!r} is no usable address: {hint}"
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "address"})
