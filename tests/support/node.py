"""Runs scripts of the Node client."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

NODE = Path(__file__).parents[2] / "clients" / "node"


def node_or_skip() -> str:
    """The interpreter; skips the test where it or the client's packages are missing."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine: the Node client is not tested")
    if not (NODE / "node_modules" / "@grpc" / "grpc-js").is_dir():
        pytest.skip(f"{NODE}/node_modules is missing: run 'make node' (needs npm)")
    return node


async def run_node(node: str, *arguments: str, **environment: str) -> str:
    """Runs node, asserts that it ends well, and gives what it wrote."""
    process = await asyncio.create_subprocess_exec(
        node,
        *arguments,
        cwd=NODE,
        env={"PATH": os.environ["PATH"], **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output = (await asyncio.wait_for(process.communicate(), 90))[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output[-6000:]
    return output
