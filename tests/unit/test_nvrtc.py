"""Machine code kept on disk: what is not whole is compiled again, and a folder that takes nothing does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc


class _Nvrtc(Nvrtc):
    """Without the library."""

    version = (13, 0)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
