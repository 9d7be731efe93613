"""Imports of the scripts in bench/, which are no package and share names with folders of tests (hostile, mesh)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


@contextmanager
def bench_imports(*folders: str) -> Iterator[None]:
    """Within, modules of bench/ and of these folders of it can be imported by their names; after it, none can.

    Whatever is collected later would else find bench/hostile.py where it means tests/hostile.
    """
    before = list(sys.path)
    sys.path[:0] = [str(BENCH), *(str(BENCH / folder) for folder in folders)]
    try:
        yield
    finally:
        sys.path[:] = before
        ours = [name for name, module in sys.modules.items() if _is_of_bench(getattr(module, "__file__", None))]
        for name in ours:
            del sys.modules[name]


def _is_of_bench(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(BENCH)
