"""The mesh that clients of other people talk to, and the record of what they did with it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.client_list import CHECKS, CLIENTS, Record
from support.mesh import Mesh, running_mesh
from support.tool_folder import LLAMA_TEMPLATE, tool_folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """The tiny Llama with a template that takes tools, as the larger ones have."""
    folder = tool_folder(tmp_path_factory.mktemp("models"), LLAMA_TEMPLATE)
    async with running_mesh("cpu", folder=folder) as mesh:
        yield mesh
        assert mesh.bugs == []


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Takes a client's name, version, seconds and checks, which have to be the listed ones.

    CLIENTS_OUTCOME=FILE keeps those of a run, for docs/clients.md.
    """
    outcome: dict[str, dict[str, object]] = {}

    def keep(name: str, version: str, seconds: float, checked: set[str]) -> None:
        assert checked == set(CLIENTS[name].checks), f"{name} is listed with other checks"
        ordered = [check for check in CHECKS if check in checked]
        outcome[name] = {"version": version, "seconds": round(seconds, 1), "checked": ordered}

    yield keep
    if path := os.environ.get("CLIENTS_OUTCOME"):
        lines = [f"{json.dumps(name)}: {json.dumps(outcome[name])}" for name in CLIENTS if name in outcome]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
