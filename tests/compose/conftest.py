"""An engine and the images, once for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.engine import Engine, NoEngineError, find_or_start_engine
from support.images import build_images


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
    """The engine, with both images built from this tree."""
    build_images(engine)
    return engine
