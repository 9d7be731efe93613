"""HTTP against a mesh: where its routers serve it, and clients of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI

from support.mesh import Mesh

HTTP_PORT = 8000
TIMEOUT_S = 30.0


def http_address(mesh: Mesh, replica: int = 1) -> str:
    """host:port."""
    return mesh.cluster.address("router", replica, HTTP_PORT)


def openai_client(mesh: Mesh) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{http_address(mesh)}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


def http_client(mesh: Mesh) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=f"http://{http_address(mesh)}", timeout=TIMEOUT_S, limits=limits)


async def events_of(response: httpx.Response) -> list[dict]:  # type: ignore[type-arg]
    """The JSON of every event; [DONE] as {}."""
    return [event async for event in iterate_events(response)]


async def iterate_events(response: httpx.Response) -> AsyncIterator[dict]:  # type: ignore[type-arg]
    async for line in response.aiter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        yield {} if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def raw_connection(mesh: Mesh) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket and nothing else."""
    host, _, port = http_address(mesh).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(path: str, body: object, *headers: str) -> bytes:
    """A whole request as bytes."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: mesh", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data
