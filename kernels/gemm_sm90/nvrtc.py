"""CUDA C++ compiled at run time (NVRTC), kept on disk by the hash of its source; common code comes with the sources."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from radixmesh.kernels.gemm_sm90.cuda_driver import bindings
from radixmesh.kernels.gemm_sm90.shipped import archive, read_shipped

_DIGEST_BYTES = 32


class NvrtcError(RuntimeError):
    """The library is not there, or does not compile the source; the message holds its log."""


class Nvrtc:
    """folder: of compiled kernels. Raises NvrtcError, and DriverError where cuda-bindings is not there."""

    def __init__(self, folder: Path | None = None) -> None:
        self._api = bindings("nvrtc")
        _load_builtins()
        self._folder = folder or _default_folder()
        self.version = self._checked("nvrtcVersion", self._api.nvrtcVersion())
        self._reading = threading.Lock()
        self._shipped: Mapping[str, bytes] | None = None

    def cubin(self, source: str, architecture: str = "sm_90a") -> bytes:
        """Machine code: as it was shipped, or from disk where it was compiled before, or compiled."""
        options = _options(architecture)
        key = key_of(source, self.version, architecture)
        shipped = self._shipped_codes().get(key)
        if shipped is not None:
            return shipped
        kept = self._folder / f"{key}.cubin"
        code = _read(kept)
        if code is None:
            code = self._compile(source, options)
            # Without a place to keep it, it is compiled at every start.
            with contextlib.suppress(OSError):
                _write(kept, code)
        return code

    def _shipped_codes(self) -> Mapping[str, bytes]:
        with self._reading:
            if self._shipped is None:
                major, minor = self.version
                self._shipped = read_shipped(archive((int(major), int(minor))))
        return self._shipped

    def _compile(self, source: str, options: list[str]) -> bytes:
        api = self._api
        [program] = self._checked(
            "nvrtcCreateProgram", api.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
        )
        try:
            [status] = api.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            if status != api.nvrtcResult.NVRTC_SUCCESS:
                raise NvrtcError(f"a kernel does not compile: {self._log(program)}")
            [size] = self._checked("nvrtcGetCUBINSize", api.nvrtcGetCUBINSize(program))
            code = bytearray(size)
            self._checked("nvrtcGetCUBIN", api.nvrtcGetCUBIN(program, code))
            return bytes(code)
        finally:
            api.nvrtcDestroyProgram(program)

    def _log(self, program: object) -> str:
        _, size = self._api.nvrtcGetProgramLogSize(program)
        log = bytearray(max(size, 1))
        self._api.nvrtcGetProgramLog(program, log)
        return bytes(log).rstrip(b"\0").decode(errors="replace")

    def _checked(self, function: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of a call beside its status."""
        status, *found = result
        if status != self._api.nvrtcResult.NVRTC_SUCCESS:
            raise NvrtcError(f"{function}: {status!r}")
        return tuple(found)


def key_of(source: str, version: tuple[int, ...], architecture: str = "sm_90a") -> str:
    """The name of a source's machine code: a hash of all that it depends on."""
    return hashlib.sha256("\0".join([source, *_options(architecture), str(version)]).encode()).hexdigest()


def _options(architecture: str) -> list[str]:
    return [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space"]


def _read(path: Path) -> bytes | None:
    """Reads what `_write` wrote; None if nothing is there, or what is there is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Another process may be writing the same: each has a file of its own until it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _load_builtins() -> None:
    """Wheels keep it beside the library, where that does not look for it."""
    for path in Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path))


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixmesh" / "kernels"
