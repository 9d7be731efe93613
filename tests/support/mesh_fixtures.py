"""Fixtures of a module's one mesh on the tiny model, and of clients of it; a module may have a mesh of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest_asyncio
from openai import AsyncOpenAI

from support.http import http_client, openai_client
from support.mesh import Mesh, running_mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh("cpu") as mesh:
        yield mesh
        assert mesh.bugs == []


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(mesh: Mesh) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client(mesh) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(mesh) as client:
        yield client
