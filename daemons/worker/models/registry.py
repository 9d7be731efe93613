"""Finds the model family of an architecture: each folder beside this file that has `ARCHITECTURES` is one."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from radixmesh.daemons.worker.registry import Registry

if TYPE_CHECKING:
    # Imports torch, which takes seconds: looking up names must not.
    from radixmesh.daemons.worker.models.model import ModelFamily


def model_families() -> Registry[ModelFamily]:
    """Families by architecture name. A family's own `__init__.py` is imported here, its maths only by its creator."""
    creators: dict[str, Callable[[], ModelFamily]] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.ispkg:
            continue
        package = f"{__package__}.{module.name}"
        for architecture in getattr(import_module(package), "ARCHITECTURES", ()):
            assert architecture not in creators, f"two families claim {architecture}"
            creators[architecture] = partial(_create, package)
    return Registry("model architecture", creators)


def _create(package: str) -> ModelFamily:
    from radixmesh.daemons.worker.models.model import ModelFamily

    family = import_module(package).create_family()
    assert isinstance(family, ModelFamily), package
    return family
