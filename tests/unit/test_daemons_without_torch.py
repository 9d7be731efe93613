"""The daemons that hold no weights start where torch is not installed: their image has none."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is not in the image", name=name)
sys.meta_path.insert(0, Absent())
module = importlib.import_module("radixmesh.daemons.{daemon}.__main__")
try:
    module.main(["--help"])
except SystemExit as leave:
    sys.exit(leave.code)
"""
# What the requirements of the daemons' image leave out, of what is installed for tests.
_BLOCKED = ("torch", "safetensors", "huggingface_hub", "prompt_toolkit", "transformers", "triton")


@pytest.mark.parametrize("daemon", ["tokenizer", "detokenizer", "scheduler", "router", "front"])
def test_daemons_need_no_torch(daemon: str) -> None:
    program = _PROGRAM.format(daemon=daemon, blocked=_BLOCKED)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--listen" in done.stdout


def test_the_block_blocks() -> None:
    program = _PROGRAM.format(daemon="router", blocked=("torch", "grpc"))
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60).returncode == 1
