"""Libraries that people use, as they come from PyPI and npm, against a mesh on the tiny model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from support.client_environments import NodeEnvironment, PythonEnvironment, run_client
from support.http import http_address
from support.mesh import Mesh

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).with_name("scripts")
MODEL = "tiny-llama"
# litellm imports it where a request has tools, and does not bring it.
FURTHER = ("mcp",)
PACKAGES = {
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "instructor": "instructor",
    "llamaindex": "llama-index-llms-openai-like",
    "anthropic": "anthropic",
    "ollama": "ollama",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All libraries in one environment: they share most of what they need."""
    return str(PythonEnvironment(tmp_path_factory.mktemp("python"), *PACKAGES.values(), *FURTHER).bin / "python")


async def test_the_openai_sdk(mesh: Mesh, tmp_path: Path) -> None:
    """The one that our own tests have: nothing is installed for it."""
    command = [sys.executable, str(SCRIPTS / "openai_client.py"), f"http://{http_address(mesh)}/v1", MODEL]
    await asyncio.to_thread(run_client, command, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("library", PACKAGES)
async def test_a_python_library(library: str, python: str, mesh: Mesh, tmp_path: Path) -> None:
    command = [python, str(SCRIPTS / f"{library}_client.py"), f"http://{http_address(mesh)}/v1", MODEL]
    await asyncio.to_thread(run_client, command, tmp_path)


async def test_openai_and_vercels_sdk_for_node(mesh: Mesh, tmp_path: Path) -> None:
    node = NodeEnvironment(tmp_path, "openai", "ai", "@ai-sdk/openai-compatible")
    script = tmp_path / "clients.mjs"
    script.write_text((SCRIPTS / "clients.mjs").read_text())
    command = [node.node, str(script), f"http://{http_address(mesh)}/v1", MODEL]
    assert "done" in await asyncio.to_thread(run_client, command, tmp_path)


async def test_a_grpc_client_that_has_reflection_alone(mesh: Mesh, tmp_path: Path) -> None:
    """It knows none of our code: messages are built from what the router says of itself."""
    command = [sys.executable, "-I", str(SCRIPTS / "reflection_client.py"), mesh.routers[0], MODEL]
    assert "tokens" in await asyncio.to_thread(run_client, command, tmp_path)
