"""Libraries that people use, as they come from PyPI and npm, against a mesh on the tiny model."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.client_environments import NodeEnvironment, PythonEnvironment, run_client
from support.client_list import CLIENTS, Record, checked
from support.http import http_address
from support.mesh import Mesh

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
SCRIPTS = Path(__file__).with_name("scripts")
MODEL = "tiny-llama"
PYTHON = ("langchain", "litellm", "instructor", "llamaindex", "anthropic", "ollama")
NODE = ("openai_node", "vercel")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> PythonEnvironment:
    """All libraries in one environment: they share most of what they need."""
    packages = [package for name in PYTHON for package in CLIENTS[name].packages]
    return PythonEnvironment(tmp_path_factory.mktemp("python"), *packages)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeEnvironment:
    packages = [package for name in NODE for package in CLIENTS[name].packages]
    return NodeEnvironment(tmp_path_factory.mktemp("node"), *packages)


async def run_script(name: str, command: list[str], mesh: Mesh, folder: Path) -> tuple[float, set[str]]:
    """Seconds that the client took, and the checks that it passed."""
    started = time.monotonic()
    target = mesh.routers[0] if name == "reflection" else f"http://{http_address(mesh)}/v1"
    output = await asyncio.to_thread(run_client, [*command, target, MODEL], folder)
    return time.monotonic() - started, checked(output)


async def test_the_openai_sdk(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    """The one that our own tests have: nothing is installed for it."""
    command = [sys.executable, str(SCRIPTS / "openai_client.py")]
    record("openai", version("openai"), *await run_script("openai", command, mesh, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("name", PYTHON)
async def test_a_python_library(
    name: str, python: PythonEnvironment, mesh: Mesh, tmp_path: Path, record: Record
) -> None:
    command = [str(python.bin / "python"), str(SCRIPTS / f"{name}_client.py")]
    found = python.version(CLIENTS[name].packages[0])
    record(name, found, *await run_script(name, command, mesh, tmp_path))


@pytest.mark.parametrize("name", NODE)
async def test_a_node_library(name: str, node: NodeEnvironment, mesh: Mesh, record: Record) -> None:
    script = node.folder / f"{name}.mjs"
    script.write_text((SCRIPTS / script.name).read_text())
    found = node.version(CLIENTS[name].packages[0])
    record(name, found, *await run_script(name, [node.node, str(script)], mesh, node.folder))


async def test_a_grpc_client_that_has_reflection_alone(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    """It knows none of our code: messages are built from what the router says of itself."""
    command = [sys.executable, "-I", str(SCRIPTS / "reflection_client.py")]
    record("reflection", version("grpcio"), *await run_script("reflection", command, mesh, tmp_path))
