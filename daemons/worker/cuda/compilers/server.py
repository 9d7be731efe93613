"""A process that compiles Triton kernels into Triton's cache, each in a child of its own, and needs no GPU.

    python -m radixmesh.daemons.worker.cuda.compilers.server 14 < REQUEST > ANSWER

REQUEST and ANSWER are one JSON object each, see `client.py`. Children are forked when everything is imported, so that a
kernel costs its compilation alone; they share neither an interpreter's lock nor a CUDA context with the worker.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

# Imported before a child is forked: kernels, and what they import.
_PRELOADED = ("radixmesh.daemons.worker.cuda.runner", "radixmesh.daemons.worker.cuda.ops")


def main() -> None:
    most = int(sys.argv[1])
    # The worker's own thread must not wait for a core: it measures GEMMs meanwhile.
    os.nice(10)
    for name in _PRELOADED:
        importlib.import_module(name)
    prepare_launcher = _launcher_builder()
    text = sys.stdin.read()
    if not text:
        return  # Nothing is asked for, or whoever asked is gone.
    request = json.loads(text)
    started = time.monotonic()
    _compile_for(GPUTarget(*request["target"]))
    kernels: list[dict[str, str]] = request["kernels"]
    failed = run_in_children([partial(_compile, kernel, prepare_launcher) for kernel in kernels], most)
    sys.stdout.write(json.dumps({"failed": failed, "seconds": round(time.monotonic() - started, 3)}) + "\n")


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


def _compile(request: dict[str, str], prepare_launcher: Callable[[CompiledKernel], None]) -> None:
    function = getattr(importlib.import_module(request["module"]), request["name"])
    while not isinstance(function, JITFunction):
        function = function.fn
    prepare_launcher(function.preload(request["specialization"]))


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
