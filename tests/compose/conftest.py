"""An engine and the images, once for all tests here."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.containers import COMPOSE
from support.engine import Engine, NoEngineError, find_or_start_engine

ROOT = COMPOSE.parent
BASE = "radixmesh-base:bookworm"
# The archive of the base image is kept here, so that a second run does not make it again.
BASE_CACHE = ROOT / ".tools" / "base"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Skips all tests, with the reason, where there is no engine and none can be started."""
    try:
        found = find_or_start_engine()
    except NoEngineError as error:
        if os.environ.get("RADIXMESH_REQUIRE_ENGINE"):
            raise
        pytest.skip(str(error))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def images(engine: Engine) -> Engine:
    """The engine, with both images built from this tree. On an engine of our own the base image is Debian's Python, by
    debootstrap: there is no registry to be counted on."""
    environment = dict(engine.environment)
    if os.environ.get("RADIXMESH_IMAGES") == "built":
        return engine  # Whoever says so has built them from what is to be tested.
    if engine.is_ours:
        environment |= {"RADIXMESH_BASE": BASE, "CACHE": str(BASE_CACHE)}
        _timed("base image", [str(COMPOSE / "make_base.sh"), BASE], environment)
    _timed("wheels", [str(COMPOSE / "fetch_wheels.sh")], environment)
    environment["RADIXMESH_BUILD_NETWORK"] = "none"  # The build asks nobody: all it needs lies in compose/wheels.
    _timed("images", ["docker", "compose", "-f", str(COMPOSE / "local.yml"), "build"], environment)
    return engine


def _timed(what: str, command: list[str], environment: dict[str, str]) -> None:
    started = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=Path(ROOT), capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, f"{what}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    print(f"\n{what}: {time.monotonic() - started:.1f} s")
