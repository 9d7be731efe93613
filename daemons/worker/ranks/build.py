"""Build of this worker: ranks of one group compute together, so all of them have to be of one."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import radixmesh

# All that decides on what ranks say in their collectives, and in which order.
_FOLDERS = ("worker", "runtime")
_DIGITS = 12


@cache
def build_of_worker() -> str:
    """Release, digest of the code that runs here, and version of torch: equal on two workers of one build."""
    digest = hashlib.sha256()
    daemons = Path(__file__).parents[2]
    for folder in _FOLDERS:
        for file in sorted((daemons / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(daemons)}\n".encode())
            digest.update(file.read_bytes())
    try:
        torch = f"/torch-{version('torch')}"
    except PackageNotFoundError:  # A simulated worker needs none.
        torch = ""
    return f"{radixmesh.__version__}+{digest.hexdigest()[:_DIGITS]}{torch}"
