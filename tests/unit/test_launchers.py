"""Launchers of Triton's kernels: C extensions that all have one name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import build

from radixmesh.daemons.worker.cuda.compilers.launchers import load_launchers_apart

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler here")

# As `make_launcher` of Triton's driver for CUDA writes them, but for what `launch` does.
_SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&definition); }
"""

Load = Callable[[int], object]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads the extension of that number, whose `launch` says the number."""
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    monkeypatch.setitem(sys.modules, "__triton_launcher", None)
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield lambda number: build.compile_module_from_src(_SOURCE % number, "__triton_launcher")


def test_a_launcher_keeps_its_function_when_the_file_of_another_is_loaded_again(load: Load) -> None:
    assert load_launchers_apart() and load_launchers_apart()
    loaded = [load(number) for number in range(3)]
    for number in range(3):
        load(number)
        assert [of.launch() for of in loaded] == [0, 1, 2], number


def test_threads_get_the_launchers_that_they_ask_for(load: Load) -> None:
    load_launchers_apart()
    numbers = [number % 5 for number in range(5_000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(lambda number: load(number).launch(), numbers)) == numbers
    finally:
        sys.setswitchinterval(interval)


def test_a_triton_that_loads_otherwise_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(build, "_load_module_from_path")
    assert not load_launchers_apart()
