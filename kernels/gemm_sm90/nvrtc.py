"""CUDA C++ compiled at run time (NVRTC), kept on disk by the hash of its source."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from pathlib import Path

import torch

_DIGEST_BYTES = 32


class NvrtcError(RuntimeError):
    """The library is not there, or does not compile the source; the message holds its log."""


class Nvrtc:
    """library: for tests; otherwise the one that torch brings. folder: of compiled kernels. Raises NvrtcError."""

    def __init__(self, library: ctypes.CDLL | None = None, folder: Path | None = None) -> None:
        self._library = library or _load_library()
        _declare(self._library)
        self._folder = folder or _default_folder()

    @property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def cubin(self, source: str, architecture: str = "sm_90a") -> bytes:
        """Machine code, from disk where it was compiled before."""
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space"]
        key = hashlib.sha256("\0".join([source, *options, str(self.version)]).encode()).hexdigest()
        kept = self._folder / f"{key}.cubin"
        code = _read(kept)
        if code is None:
            code = self._compile(source, options)
            # Without a place to keep it, it is compiled at every start.
            with contextlib.suppress(OSError):
                _write(kept, code)
        return code

    def _compile(self, source: str, options: list[str]) -> bytes:
        library, program = self._library, ctypes.c_void_p()
        created = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
        self._check("nvrtcCreateProgram", created)
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if library.nvrtcCompileProgram(program, len(options), arguments):
                raise NvrtcError(f"a kernel does not compile: {self._log(program)}")
            size = ctypes.c_size_t()
            self._check("nvrtcGetCUBINSize", library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            code = ctypes.create_string_buffer(size.value)
            self._check("nvrtcGetCUBIN", library.nvrtcGetCUBIN(program, code))
            return code.raw
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(size.value, 1))
        self._library.nvrtcGetProgramLog(program, log)
        return log.value.decode(errors="replace")

    def _check(self, function: str, status: int) -> None:
        if status:
            name: bytes = self._library.nvrtcGetErrorString(status)
            raise NvrtcError(f"{function}: {name.decode()} ({status})")


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


def _load_library() -> ctypes.CDLL:
    version: str | None = torch.version.cuda
    if version is None:
        raise NvrtcError("this torch is not built for CUDA")
    name = f"libnvrtc.so.{version.split('.')[0]}"
    # Wheels keep it beside torch, where the loader does not look; nor does the library itself for what it loads.
    for folder in sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib")):
        _load_builtins(folder)
        if (folder / name).is_file():
            return ctypes.CDLL(str(folder / name))
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise NvrtcError(f"{name} is not there: {error}") from error


def _load_builtins(folder: Path) -> None:
    for path in folder.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path))


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixmesh" / "kernels"


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures: dict[str, list[type[ctypes._CData]]] = {
        "nvrtcVersion": [pointer, pointer],
        "nvrtcCreateProgram": [pointer, text, text, integer, pointer, pointer],
        "nvrtcCompileProgram": [pointer, integer, pointer],
        "nvrtcDestroyProgram": [pointer],
        "nvrtcGetCUBINSize": [pointer, pointer],
        "nvrtcGetCUBIN": [pointer, pointer],
        "nvrtcGetProgramLogSize": [pointer, pointer],
        "nvrtcGetProgramLog": [pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, integer
    library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = [integer], text
