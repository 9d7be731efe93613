"""Triton kernels of a warm-up, compiled side by side ahead of it: one by one they take most of a first start.

A step's Python runs as ever, but kernels are handed to threads that compile them instead of to the device. Memory that
they would have written keeps what it held, so nothing else may take places in memory from it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.compilers.launchers import load_launchers_apart
from radixmesh.kernels.prepared_kernel import PreparedKernel

try:
    from triton import AsyncCompileMode
except ImportError:  # Triton before 3.5: kernels are compiled as they come.
    AsyncCompileMode = None

_log = get_logger(__name__)

# Beside them the device is still being measured by the thread that starts the worker.
_MAX_THREADS = 16


def can_compile_ahead() -> bool:
    """False where Triton has no such mode, or its kernels are interpreted."""
    return AsyncCompileMode is not None and not os.environ.get("TRITON_INTERPRET")


def compile_ahead(launch_all: Callable[[], None]) -> None:
    """Compiles the kernels that `launch_all` launches. Those kept from an earlier start are only read.

    Where that fails they are compiled one by one later, and the log says why.
    """
    started = time.monotonic()
    try:
        with compiling_ahead() as kernels:
            launch_all()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _log.warning("kernels_not_compiled_ahead", reason=f"{type(error).__name__}: {error}")
        return
    _log.info("kernels_compiled", kernels=len(kernels), seconds=round(time.monotonic() - started, 3))


class _Compilers(ThreadPoolExecutor):
    """Threads that hand out kernels ready to be launched, on the device of that index.

    Triton leaves the rest to a kernel's first launch: a C compiler makes the function that launches it, which takes
    0.2 s each, and the driver loads its code.
    """

    def __init__(self, device: int | None) -> None:
        super().__init__(min(_MAX_THREADS, os.cpu_count() or 1), "compile")
        self._device = device
        self._makes_ready = load_launchers_apart()

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """fn: Triton's, compiles a kernel."""

        def compile_whole() -> object:
            kernel = fn()
            if not self._makes_ready:
                return kernel
            try:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                kernel._init_handles()
            except Exception:
                # It comes again at the first launch, and is said there. What is half ready would not be made anew.
                if kernel.module is None:
                    kernel._run = None
            return kernel

        return super().submit(compile_whole)


@contextmanager
def compiling_ahead() -> Iterator[Sequence[object]]:
    """Triton kernels that are launched inside are compiled, each once, and not run: those so far. It ends when all are.

    One that does not compile is left to its first launch, which says why. One thread of a process may be inside.
    """
    run, compile_one = JITFunction.run, JITFunction._do_compile
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def only_compile(self: JITFunction[object], *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def compile_once(self: JITFunction[object], key: str, signature: object, device: int, *rest: object) -> object:
        kernel = compile_one(self, key, signature, device, *rest)
        # Further launches find it there, compiled or not.
        self.device_caches[device][0].setdefault(key, kernel)
        return kernel

    JITFunction.run, JITFunction._do_compile = only_compile, compile_once
    # One that was compiled before would run, with numbers that another one has not brought.
    PreparedKernel.is_only_compiled = True
    try:
        with (
            _Compilers(device) as threads,
            AsyncCompileMode(threads, ignore_errors=True) as mode,
        ):
            yield mode.raw_futures
    finally:
        PreparedKernel.is_only_compiled = False
        JITFunction.run, JITFunction._do_compile = run, compile_one
