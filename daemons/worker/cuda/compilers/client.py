"""Kernels of a start, compiled by another process while this one measures the device.

That process imports what it needs while the worker does. It is told which kernels there are, and leaves them in
Triton's cache, where the worker finds them. What it fails to compile is compiled when the worker needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from radixmesh.daemons.runtime.telemetry.logs import get_logger

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

_log = get_logger(__name__)

_SERVER = "radixmesh.daemons.worker.cuda.compilers.server"
# Of fewer cores the worker itself needs most.
_LEAST_CORES = 4
_TIMEOUT_S = 120.0
# Fields of the worker's settings that decide which kernels there are.
_SETTINGS = (
    *("dtype", "kv_dtype", "quantization", "model_impl", "kernels", "attention_backend", "deterministic"),
    *("page_size", "num_slots", "max_tokens_per_step", "max_total_len", "cuda_graphs", "cuda_pdl", "tp_size"),
)


def start_compilers(folder: Path, settings: object) -> KernelCompilers | None:
    """Starts the process, which ends when the worker does. None where a start of this model with these settings has
    left its kernels in the cache, or where the process would only take cores from the worker."""
    cores = len(os.sched_getaffinity(0))
    if cores < _LEAST_CORES or os.environ.get("TRITON_INTERPRET"):
        return None
    try:
        note = _note(folder, settings)
        return None if note.exists() else KernelCompilers(cores - 2, note)
    # A folder that cannot be read is said by what reads the model.
    except OSError as error:
        _log.warning("kernels_not_compiled_beside", reason=str(error))
        return None


def _note(folder: Path, settings: object) -> Path:
    """A file in Triton's cache that stands for the kernels of a model with some settings."""
    hashed = hashlib.sha256((folder / "config.json").read_bytes())
    hashed.update(repr([(name, getattr(settings, name)) for name in _SETTINGS]).encode())
    hashed.update(repr([version(package) for package in ("torch", "triton")]).encode())
    spec = find_spec("radixmesh.kernels")
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(location).rglob("*.py")):
            hashed.update(path.read_bytes())
    cache = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton/cache"
    return Path(cache) / f"radixmesh-{hashed.hexdigest()[:32]}"


class KernelCompilers:
    """A process that compiles up to `most` kernels at once. `ask` is called once at most, then `wait`, then `keep`.

    note: the file that `keep` writes.
    """

    def __init__(self, most: int, note: Path) -> None:
        self._note = note
        self._process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # With its children, which hold its output open for as long as they live.
            process_group=0,
        )
        self._answering: threading.Thread | None = None
        self.num_kernels = 0
        self._answer = ""

    def keep(self) -> None:
        """Tells the next start that all its kernels are in the cache."""
        with suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.touch()

    def ask(self, launch_all: Callable[[], None]) -> None:
        """Has the kernels that `launch_all` launches compiled; none of them is run. Raises what it raises."""
        from triton.runtime import driver

        started = time.monotonic()
        with asked_kernels() as kernels:
            launch_all()
        target = driver.active.get_current_target()
        request = {"target": [target.backend, target.arch, target.warp_size], "kernels": kernels}
        self.num_kernels = len(kernels)
        # The request is larger than what a pipe holds, and the process may still be importing.
        self._answering = threading.Thread(
            target=self._talk, args=(json.dumps(request),), name="compilers", daemon=True
        )
        self._answering.start()
        _log.info("kernels_asked", kernels=self.num_kernels, seconds=round(time.monotonic() - started, 3))

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Returns once what was asked for is compiled, or the process is gone. meanwhile: work of this process."""
        started = time.monotonic()
        meanwhile()
        if self._answering is None:
            self._talk("")
            return
        self._answering.join()
        answer: dict[str, object] = {}
        with suppress(ValueError):
            answer = json.loads(self._answer)
        if not answer:
            _log.warning("kernels_not_compiled_beside", reason="the process that compiles has ended")
            return
        waited = round(time.monotonic() - started, 3)
        _log.info("kernels_compiled_beside", kernels=self.num_kernels, **answer, waited_s=waited)

    def _talk(self, request: str) -> None:
        with suppress(OSError):
            try:
                self._answer, _ = self._process.communicate(request, timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.communicate()


@contextmanager
def asked_kernels() -> Iterator[list[dict[str, str]]]:
    """Triton kernels that are launched inside are neither compiled nor run, but described: each once. One thread of a
    process may be inside."""
    from triton.runtime.jit import JITFunction, get_full_name, serialize_specialization_data

    run, compile_one = JITFunction.run, JITFunction._do_compile
    kernels: list[dict[str, str]] = []
    noted: list[tuple[dict[object, object], object]] = []

    def only_note(self: JITFunction[object], *args: object, grid: object, warmup: bool, **kwargs: object) -> object:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(
        self: JITFunction[object],
        key: object,
        signature: object,
        device: int,
        constants: object,
        options: object,
        attributes: object,
        warmup: bool,
    ) -> object:
        specialization = serialize_specialization_data(
            get_full_name(self.fn), signature, constants, attributes, options, key
        )
        kernels.append({"module": self.fn.__module__, "name": self.fn.__qualname__, "specialization": specialization})
        # Further launches find something there.
        ready = self.device_caches[device][0]
        ready[key] = kernels
        noted.append((ready, key))
        return None

    JITFunction.run, JITFunction._do_compile = only_note, note
    try:
        yield kernels
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_one
        for ready, key in noted:
            ready.pop(key, None)
