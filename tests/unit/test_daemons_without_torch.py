"""The daemons that hold no weights run with what their image installs, and nothing else: it has no torch, for one."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

_PINNED = Path(__file__).parents[2] / "compose/requirements/daemons.txt"
# Imports every module of the daemon, not its `__main__` alone: what is imported late fails in the image as well.
_PROGRAM = """
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"{{name}} is not in the image", name=name)
sys.meta_path.insert(0, Absent())
package = importlib.import_module("radixmesh.daemons.{daemon}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
module = importlib.import_module("radixmesh.daemons.{daemon}.__main__")
try:
    module.main(["--help"])
except SystemExit as leave:
    sys.exit(leave.code)
"""


def _absent_from_the_image() -> set[str]:
    """Top-level modules of every distribution installed here that the image does not pin."""
    pinned = {_canonical(line.split("==")[0]) for line in _PINNED.read_text().splitlines() if "==" in line}
    return {
        module
        for module, distributions in metadata.packages_distributions().items()
        if module != "radixmesh" and not any(_canonical(name) in pinned | {"radixmesh"} for name in distributions)
    }


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@pytest.mark.parametrize("daemon", ["tokenizer", "detokenizer", "scheduler", "router", "front"])
def test_a_daemon_needs_what_its_image_has(daemon: str) -> None:
    absent = _absent_from_the_image()
    assert {"torch", "safetensors", "transformers", "prompt_toolkit"} <= absent
    program = _PROGRAM.format(daemon=daemon, absent=absent)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--listen" in done.stdout


def test_the_block_blocks() -> None:
    program = _PROGRAM.format(daemon="router", absent={"torch", "grpc"})
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 1


def test_the_images_health_check_needs_what_the_image_has() -> None:
    program = f"""
import sys
absent = {_absent_from_the_image()}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{{name}} is not in the image", name=name)
sys.meta_path.insert(0, Absent())
from radixmesh.cli.__main__ import main
sys.argv = ["radixmesh", "health", "--help"]
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
