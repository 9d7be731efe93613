"""Environments of other people's clients: made when a test runs, from the registries; without them it is skipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

INSTALL_S = 300.0
# Some import torch and more before they begin: minutes on a machine that is busy.
RUN_S = 600.0
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class PythonEnvironment:
    """A virtual environment with packages, installed by uv: pip takes minutes for the same."""

    def __init__(self, folder: Path, *packages: str) -> None:
        uv = _uv(folder)
        self.bin = folder / "venv" / "bin"
        _install([uv, "venv", "-q", "--python", sys.executable, str(folder / "venv")], folder)
        _install([uv, "pip", "install", "-q", "--python", str(self.bin / "python"), *packages], folder)

    def version(self, package: str) -> str:
        """The installed version of a package, which may be named with extras and a bound."""
        code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        command = [str(self.bin / "python"), "-c", code, re.split(r"[\[<>=]", package)[0]]
        return run_client(command, self.bin).strip()


class NodeEnvironment:
    """A folder with packages of npm."""

    def __init__(self, folder: Path, *packages: str) -> None:
        npm, node = shutil.which("npm"), shutil.which("node")
        if npm is None or node is None:
            pytest.skip("no node and npm on this machine")
        self.node, self.folder = node, folder
        (folder / "package.json").write_text('{"private": true, "type": "module"}')
        _install([npm, "install", "--silent", "--no-audit", "--no-fund", *packages], folder)

    def version(self, package: str) -> str:
        """The installed version of a package."""
        return str(json.loads((self.folder / "node_modules" / package / "package.json").read_text())["version"])


def run_client(command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Output of a client that ends well. No variable of this process reaches it but those that find programs."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{output[-6000:]}"
    return output


def _uv(folder: Path) -> str:
    if found := shutil.which("uv"):
        return found
    target = folder / "uv"
    _install([sys.executable, "-m", "pip", "install", "-q", "--target", str(target), "uv"], folder)
    return str(target / "bin" / "uv")


def _install(command: Sequence[str], folder: Path) -> None:
    """Skips the test where a registry lacks something or does not answer."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"not installed within {INSTALL_S:g} s: {' '.join(command[-3:])}")
    if done.returncode:
        pytest.skip(f"cannot be installed: {' '.join(command[-3:])}: {(done.stderr or done.stdout)[-300:]}")
