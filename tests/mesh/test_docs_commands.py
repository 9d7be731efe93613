"""Commands and snippets of README and docs/ are run as printed, but for the addresses, which are this test's mesh's."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import docs_pages
from support.docs_commands import COMMANDS, SNIPPETS
from support.docs_pages import ROOT
from support.http import http_address
from support.mesh import Mesh, running_mesh
from support.node import NODE, node_or_skip

from radixmesh.cli.plain_health import ask_plain
from radixmesh.daemons.runtime.arrays import pack_ints

TIMEOUT_S = 120.0


def of_test(test: str) -> list[str]:
    """Commands that the list gives to a test of this file, in the order of the pages."""
    shown = [command for page in docs_pages.pages() for command in docs_pages.commands(page)]
    mine = [
        command for command in dict.fromkeys(shown) if COMMANDS[command] == f"tests/mesh/{Path(__file__).name}::{test}"
    ]
    assert mine, test
    return mine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the repository's folders in it, and `radixmesh` and `python` of this interpreter in `bin`."""
    for name in ("compose", "tests", "bench", "clients"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("radixmesh", "-m radixmesh.cli")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        script.chmod(0o755)
    return tmp_path


def environment(folder: Path, added: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    search = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    own = {"PATH": path, "PYTHONPATH": search, "NO_COLOR": "1", "NO_PROXY": "*"}
    return {**inherited, **own, **(added or {})}


async def start(command: str, folder: Path, added: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """The command in a shell, in a process group of its own."""
    return await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=folder,
        env=environment(folder, added),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def run(command: str, folder: Path, text: str = "", added: Mapping[str, str] | None = None) -> str:
    """Output of the command. Fails unless it exits with 0."""
    process = await start(command, folder, added)
    try:
        output, _ = await asyncio.wait_for(process.communicate(text.encode()), TIMEOUT_S)
    finally:
        kill(process)
    printed = output.decode(errors="replace")
    assert process.returncode == 0, f"{command}\n{printed[-4000:]}"
    return printed


def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, so that no outgoing connection takes one before its daemon does."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(10_000, 19_999)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


async def test_daemons_that_are_started_by_hand_answer(folder: Path) -> None:
    ports = dict(zip(("50061", "50062", "50063", "50064", "50065"), free_ports(5), strict=True))
    *daemons, question = [
        re.sub(r"\b5006[1-5]\b", lambda found: str(ports[found[0]]), command)
        for command in of_test("test_daemons_that_are_started_by_hand_answer")
    ]
    assert len(daemons) == 5 and " generate " in question
    running = [await start(command, folder) for command in daemons]
    drains = [asyncio.create_task(process.stdout.read()) for process in running if process.stdout is not None]
    try:
        for port in ports.values():
            await until_healthy(f"127.0.0.1:{port}")
        assert (await run(question, folder)).strip()
    finally:
        for process in running:
            kill(process)
        await asyncio.gather(*drains)
        await asyncio.gather(*(process.wait() for process in running))


async def until_healthy(address: str) -> None:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while await asyncio.to_thread(ask_plain, address, 1.0) != "SERVING":
        assert asyncio.get_running_loop().time() < deadline, f"{address} does not serve"
        await asyncio.sleep(0.05)


async def test_commands_beside_a_running_mesh_do_what_pages_say(folder: Path) -> None:
    async with running_mesh("cpu") as mesh:
        for command in of_test("test_commands_beside_a_running_mesh_do_what_pages_say"):
            if command.startswith("curl") and shutil.which("curl") is None:
                continue
            printed = await run(at(mesh, command), folder, "Hello!\n", {"RADIXMESH_ROUTER": mesh.routers[0]})
            if "curl" in command:
                assert '"error"' not in printed and ('"choices"' in printed or '"embedding"' in printed), printed
            else:
                assert printed.strip(), command
        await run_snippets(mesh, "test_commands_beside_a_running_mesh_do_what_pages_say", folder)


@pytest.mark.full
async def test_further_snippets_run_as_printed(folder: Path) -> None:
    async with running_mesh("cpu") as mesh:
        await run_snippets(mesh, "test_further_snippets_run_as_printed", folder)


async def run_snippets(mesh: Mesh, test: str, folder: Path) -> None:
    mine = [name for name, by in SNIPPETS.items() if by == f"tests/mesh/{Path(__file__).name}::{test}"]
    assert mine, test
    for name in mine:
        await run_snippet(mesh, name, folder)


def at(mesh: Mesh, text: str) -> str:
    """The text with the mesh's addresses in the place of those that compose files publish."""
    text = re.sub(r"\b(localhost|127\.0\.0\.1):8000\b", http_address(mesh), text)
    return re.sub(r"\b127\.0\.0\.1:500[56]0\b", mesh.routers[0], text)


async def run_snippet(mesh: Mesh, name: str, folder: Path) -> None:
    page, language, number = name.split()
    text = at(mesh, docs_pages.snippets(ROOT / page, language)[int(number) - 1])
    if language == "python":
        (folder / "snippet.py").write_text(text)
        printed = await run("python snippet.py", folder)
    else:
        if shutil.which("node") is None or not (NODE / "node_modules").exists():
            return
        node = node_or_skip()
        (folder / "node_modules").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (folder / "node_modules" / "radixmesh").symlink_to(NODE)
        (folder / "snippet.mjs").write_text(text)
        printed = await run(f"{node} snippet.mjs", folder)
    assert printed.strip(), name


async def test_commands_that_need_no_mesh(folder: Path) -> None:
    page = folder / "docs" / "observability.md"
    shutil.copy(ROOT / "docs" / "observability.md", page)
    for command in of_test("test_commands_that_need_no_mesh"):
        if "make_certificates" in command and shutil.which("openssl") is None:
            continue
        await run(command, folder)
    assert page.read_text() == (ROOT / "docs" / "observability.md").read_text()
    if shutil.which("openssl"):
        assert (folder / "tls" / "alice.pem").exists()


async def test_packed_ids_are_read_and_written(folder: Path) -> None:
    """The page reads the very ids that it writes, packed as daemons pack them."""
    read, write = of_test("test_packed_ids_are_read_and_written")
    assert [int(word) for word in (await run(read, folder)).split()] == [1, 74, 311]
    assert (await run(write, folder)).strip() == base64.b64encode(pack_ints([1, 74, 311])).decode() in read


@pytest.mark.full
async def test_loads_measure_the_mesh(folder: Path) -> None:
    turn = [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A mesh of daemons."}]
    (folder / "chats.json").write_text(json.dumps([{"conversations": turn * 2} for _ in range(4)]))
    async with running_mesh("cpu") as mesh:
        for command in of_test("test_loads_measure_the_mesh"):
            printed = await run(at(mesh, command), folder, added={"RADIXMESH_ROUTER": mesh.routers[0]})
            assert "failed" not in printed, printed


@pytest.mark.full
async def test_a_folder_of_the_readers_is_served(folder: Path) -> None:
    """./my-model is the tiny one; the ports are free ones."""
    (folder / "my-model").symlink_to(ROOT / "compose" / "models" / "tiny-llama")
    for command in of_test("test_a_folder_of_the_readers_is_served"):
        port, grpc_port = free_ports(2)
        names = re.findall(r"--served-model-name (\S+)", command) or ["my-model"]
        command = re.sub(r" --port \d+", "", command) + f" --port {port} --grpc-port {grpc_port}"
        process = await start(command, folder)
        assert process.stdout is not None
        printed = ""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while f"is served at http://127.0.0.1:{port}/v1" not in printed:
                    line = await process.stdout.readline()
                    assert line, printed
                    printed += line.decode()
            answer = await run(f"curl -s http://127.0.0.1:{port}/v1/models", folder)
            assert [entry["id"] for entry in json.loads(answer)["data"]] == names[0].split(",")
        finally:
            kill(process)
            await process.wait()
