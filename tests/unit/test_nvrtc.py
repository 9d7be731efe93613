"""Machine code kept on disk: what is not whole is compiled again, and a folder that takes nothing does no harm."""

from __future__ import annotations

import lzma
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton")

from support.bench_modules import bench_imports

from radixmesh.kernels.gemm_sm90 import nvrtc as nvrtc_module
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc, key_of
from radixmesh.kernels.gemm_sm90.shipped import archive, read_shipped, write_shipped


class _Nvrtc(Nvrtc):
    """Without the library."""

    version = (13, 0)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()
        self._shipped: Mapping[str, bytes] | None = {}
        self.compiled: list[str] = []

    def _compile(self, source: str, options: list[str]) -> bytes:
        self.compiled.append(source)
        return b"code of " + source.encode()


def test_a_source_is_compiled_once(tmp_path: Path) -> None:
    folder = tmp_path / "there" / "kernels"
    first, second = _Nvrtc(folder), _Nvrtc(folder)
    assert first.cubin("a") == second.cubin("a") == b"code of a"
    assert second.cubin("b") == b"code of b"
    assert (first.compiled, second.compiled) == (["a"], ["b"])
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"short", b"0" * 32, b"0" * 32 + b"code of a"])
def test_what_is_not_whole_is_compiled_again(tmp_path: Path, content: bytes) -> None:
    nvrtc = _Nvrtc(tmp_path)
    nvrtc.cubin("a")
    [kept] = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(content)
    assert nvrtc.cubin("a") == b"code of a" and nvrtc.compiled == ["a", "a"]
    assert kept.read_bytes() == whole
    kept.write_bytes(whole[:-1])
    assert nvrtc.cubin("a") == b"code of a" and len(nvrtc.compiled) == 3


def test_a_folder_that_takes_nothing_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    nvrtc = _Nvrtc(blocked / "kernels")
    assert nvrtc.cubin("a") == b"code of a"
    assert list(tmp_path.iterdir()) == [blocked]


def test_shipped_code_is_neither_compiled_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shipped(archive((13, 0), tmp_path), {key_of("a", (13, 0)): b"shipped"})
    monkeypatch.setattr(nvrtc_module, "archive", lambda version: archive(version, tmp_path))
    nvrtc = _Nvrtc(tmp_path / "kernels")
    nvrtc._shipped = None
    assert nvrtc.cubin("a") == b"shipped" and not nvrtc.compiled and not nvrtc._folder.exists()
    assert nvrtc.cubin("b") == b"code of b"
    # Another version's code is another's.
    nvrtc.version, nvrtc._shipped = (13, 1), None
    assert nvrtc.cubin("a") == b"code of a"


@pytest.mark.parametrize("content", [None, b"", b"no archive", lzma.compress(b"no files" * 100)])
def test_an_archive_that_is_broken_or_not_there_ships_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "archive"
    if content is not None:
        path.write_bytes(content)
    assert read_shipped(path) == {}


def test_the_kernels_of_common_models_are_shipped_as_their_sources_are() -> None:
    """Fails after a change of the sources: run bench/gpu/ship_cubins.py where NVRTC is installed."""
    with bench_imports():
        from gpu.ship_cubins import variants
    codes = read_shipped(archive((13, 0)))
    keys = {key_of(variant.source(), (13, 0)) for variant in variants()}
    assert keys == codes.keys()
    assert all(code.startswith(b"\x7fELF") for code in codes.values())
    assert archive((13, 0)).stat().st_size < 2 << 20
