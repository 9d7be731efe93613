"""Both images, built from this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from support.containers import COMPOSE
from support.engine import Engine

ROOT = COMPOSE.parent
BASE = "radixmesh-base:bookworm"
# The archive of the base image is kept here, so that a second run does not make it again.
BASE_CACHE = ROOT / ".tools" / "base"


def build_images(engine: Engine) -> None:
    """On an engine of our own the base image is Debian's Python, by debootstrap: there is no registry to be counted on.

    Raises AssertionError with the last words of a build that fails."""
    environment = dict(engine.environment)
    if os.environ.get("RADIXMESH_IMAGES") == "built":
        return  # Whoever says so has built them from what is to be tested.
    if engine.is_ours:
        environment |= {"RADIXMESH_BASE": BASE, "CACHE": str(BASE_CACHE)}
        _timed("base image", [str(COMPOSE / "make_base.sh"), BASE], environment)
    _timed("wheels", [str(COMPOSE / "fetch_wheels.sh")], environment)
    environment["RADIXMESH_BUILD_NETWORK"] = "none"  # The build asks nobody: all it needs lies in compose/wheels.
    _timed("images", ["docker", "compose", "-f", str(COMPOSE / "local.yml"), "build"], environment)


def _timed(what: str, command: list[str], environment: dict[str, str]) -> None:
    started = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=Path(ROOT), capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, f"{what}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    print(f"\n{what}: {time.monotonic() - started:.1f} s", file=sys.stderr)
