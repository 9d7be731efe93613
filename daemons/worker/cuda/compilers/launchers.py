"""Loads the C extensions through which Triton launches kernels, so that no kernel gets the launcher of another one.

Triton builds an extension for each signature and loads all of them under one name, `__triton_launcher`. CPython knows
extensions like these by file and name. When it loads a file again, it writes the functions into the module that
`sys.modules` has under the name, and that is the last one loaded, of whichever file. A thread that was given this
module and has yet to take `launch` out of it would launch its kernel with another signature: a TypeError where the
numbers of arguments differ, and wrong arguments on the device where they do not. Kernels that differ in their constants
alone share a file, so that a warm-up with several threads loads most files more than once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Protocol, cast


class _Build(Protocol):
    """triton.runtime.build."""

    _load_module_from_path: Callable[[str, str], ModuleType]


class _ApartLoader:
    """Loads one extension at a time, each as a module that nothing writes to later."""

    def __init__(self, load: Callable[[str, str], ModuleType]) -> None:
        self._load = load
        self._lock = threading.Lock()

    def __call__(self, name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with self._lock:
            own.__dict__.update(self._load(name, path).__dict__)
        return own


def load_launchers_apart() -> bool:
    """From now on Triton loads extensions in this way, in all threads. May be called again.

    False where this Triton loads them by other means: kernels are to be made ready by one thread alone.
    """
    from triton.runtime import build as of_triton

    build = cast(_Build, of_triton)
    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return False
    if not isinstance(load, _ApartLoader):
        build._load_module_from_path = _ApartLoader(load)
    return True


def hash_triton() -> None:
    """Triton's hash of its own library, which takes 0.4 s and more: its compiler asks for it at the first kernel of a
    process, and keeps it. The interpreter's lock is free meanwhile."""
    # Another Triton has it elsewhere, or under another name.
    with suppress(ImportError, AttributeError, OSError):
        from triton.runtime.cache import triton_key

        triton_key()
