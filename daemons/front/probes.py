"""Questions to a router whether it serves: by gRPC health, and by GET /health."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.front.backend_pool import Probe
from radixmesh.daemons.runtime.addresses import authority_of, parse_address, split_host_port
from radixmesh.daemons.runtime.rpc.channel import check_health
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

_TIMEOUT_S = 2.0


def grpc_probe(tls: TlsFiles) -> Probe:
    """Asks grpc.health.v1."""

    async def probe(address: str) -> bool:
        return await check_health(address, _TIMEOUT_S, tls=tls) == "SERVING"

    return probe


def http_probe(tls: TlsFiles) -> Probe:
    """Asks for /health, encrypted if the mesh is."""
    context = tls.client_context() if tls.has_client else None

    async def probe(address: str) -> bool:
        host, port = split_host_port(parse_address(address))
        name = tls.verified_name(is_unix=False) or split_host_port(authority_of(address) or address)[0]
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    host, port, ssl=context, server_hostname=name if context else None
                )
                writer.write(f"GET /health HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
        except (OSError, TimeoutError, ValueError):
            return False
        finally:
            if writer is not None:
                writer.close()

    return probe
