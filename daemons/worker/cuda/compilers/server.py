"""A process that compiles Triton kernels into Triton's cache, each in a child of its own, and needs no GPU.

    python -m radixmesh.daemons.worker.cuda.compilers.server 14 < REQUEST > ANSWER

REQUEST and ANSWER are one JSON object each, see `client.py`. Children are forked when everything is imported, so that a
kernel costs its compilation alone; they share neither an interpreter's lock nor a CUDA context with the worker. Kernels
with the most source begin first: one that takes seconds and begins last would be waited for alone.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import JITFunction

from radixmesh.daemons.worker.cuda.compilers.launchers import hash_triton

# Imported before a child is forked: kernels, and what they import.
_PRELOADED = ("radixmesh.daemons.worker.cuda.runner", "radixmesh.daemons.worker.cuda.ops")


def main() -> None:
    most, began = int(sys.argv[1]), time.monotonic()
    # The worker's own thread must not wait for a core: it measures GEMMs meanwhile.
    os.nice(10)
    # Collections take a fifth of the imports, and find nothing.
    gc.disable()
    beside = threading.Thread(target=_prepare_triton, name="triton")
    beside.start()
    for name in _PRELOADED:
        importlib.import_module(name)
    prepare_launcher = _launcher_builder()
    imported = time.monotonic() - began
    text = sys.stdin.read()
    # A child has but the thread that forked it.
    beside.join()
    if not text:
        return  # Nothing is asked for, or whoever asked is gone.
    request = json.loads(text)
    started = time.monotonic()
    target = GPUTarget(*request["target"])
    _compile_for(target)
    with suppress(Exception):
        # Asks the assembler for its version, through a process, once for all children.
        make_backend(target).hash()
    kernels: list[dict[str, str]] = request["kernels"]
    kernels.sort(key=_source_len, reverse=True)
    # None in a child either: it would go over, and so copy, all that was imported here.
    gc.freeze()
    failed = run_in_children([partial(_compile, kernel, prepare_launcher) for kernel in kernels], most)
    seconds = round(time.monotonic() - started, 3)
    answer = {"failed": failed, "imported_s": round(imported, 3), "seconds": seconds}
    sys.stdout.write(json.dumps(answer) + "\n")


def run_in_children(tasks: Sequence[Callable[[], None]], most: int) -> int:
    """Runs each task in a forked child, `most` at once; the number of those that raised. One thread of this process."""
    running: set[int] = set()
    failed = 0
    for task in tasks:
        if len(running) == most:
            failed += _one_ended(running)
        pid = os.fork()
        if not pid:
            _run(task)
        running.add(pid)
    while running:
        failed += _one_ended(running)
    return failed


def _run(task: Callable[[], None]) -> None:
    """Does not return: neither buffers nor exit handlers of the parent are the child's."""
    status = 1
    with suppress(BaseException):
        task()
        status = 0
    os._exit(status)


def _one_ended(running: set[int]) -> bool:
    """Waits for one of these children, takes it out, and says whether it failed."""
    while True:
        pid, status = os.wait()
        if pid in running:
            running.remove(pid)
            return status != 0


def _compile_for(target: GPUTarget) -> None:
    """Has Triton compile for a device that this process does not ask."""
    device = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    triton.runtime.driver.set_active(device)


def _prepare_triton() -> None:
    """Does once for all children what Triton does in each process that compiles: it hashes its own library, which takes
    as long as a kernel. And has a C compiler make its functions for the driver, for which the worker would wait."""
    from triton.backends.nvidia import driver

    with suppress(Exception):
        driver.CudaUtils()
    hash_triton()


def _compile(request: dict[str, str], prepare_launcher: Callable[[CompiledKernel], None]) -> None:
    prepare_launcher(_function(request).preload(request["specialization"]))


def _function(request: dict[str, str]) -> JITFunction[object]:
    function = getattr(importlib.import_module(request["module"]), request["name"])
    while not isinstance(function, JITFunction):
        function = function.fn
    return function


def _source_len(request: dict[str, str]) -> int:
    """Characters of a kernel with the functions that it calls; 0 for one that is not there, which fails later."""
    try:
        return source_len(_function(request))
    except Exception:
        return 0


def source_len(function: JITFunction[object]) -> int:
    """Characters of a function of Triton's with those that it calls, each once."""
    seen: dict[int, int] = {}
    todo = [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = len(one.src)
        names = one.fn.__globals__
        todo += [names[name] for name in one.fn.__code__.co_names if isinstance(names.get(name), JITFunction)]
    return sum(seen.values())


def _launcher_builder() -> Callable[[CompiledKernel], None]:
    """Builds the C function that launches a kernel, which Triton keeps in its cache too."""
    from triton.backends.nvidia import driver

    # Asks the dynamic linker's cache through a process, once for all children.
    with suppress(Exception):
        driver.library_dirs()

    def prepare(kernel: CompiledKernel) -> None:
        # A launcher that cannot be built says so at the first launch.
        with suppress(Exception):
            driver.CudaLauncher(kernel.src, kernel.metadata)

    return prepare


if __name__ == "__main__":
    main()
