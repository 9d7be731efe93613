"""Machine code of common variants that comes with the sources, so that a first start does not compile them.

    python bench/gpu/ship_cubins.py        # where NVRTC is installed, after a change of the kernels' sources

One archive for each version of NVRTC, of files `KEY.cubin`; KEY is the hash that `nvrtc.py` keeps its own by, so that
code of other sources, options or versions is never found.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

# An archive that unpacks to more is cut off, and so found broken.
_MAX_BYTES = 64 << 20


def archive(version: tuple[int, int], folder: Path | None = None) -> Path:
    """The archive of code that this version of NVRTC compiled, there or not."""
    return (folder or Path(__file__).parent) / f"cubins_nvrtc{version[0]}.{version[1]}.tar.xz"


def read_shipped(path: Path) -> dict[str, bytes]:
    """Code by key; nothing where there is no archive, or a broken one."""
    try:
        data = lzma.LZMADecompressor().decompress(path.read_bytes(), max_length=_MAX_BYTES)
        with tarfile.open(fileobj=io.BytesIO(data)) as files:
            return {
                member.name.removesuffix(".cubin"): file.read()
                for member in files
                if (file := files.extractfile(member)) is not None
            }
    except (OSError, lzma.LZMAError, tarfile.TarError):
        return {}


def write_shipped(path: Path, codes: Mapping[str, bytes]) -> None:
    """The same codes give the same archive."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as files:
        for key, code in sorted(codes.items(), key=lambda item: (len(item[1]), item[0])):
            member = tarfile.TarInfo(f"{key}.cubin")
            member.size = len(code)
            files.addfile(member, io.BytesIO(code))
    path.write_bytes(lzma.compress(raw.getvalue(), preset=9 | lzma.PRESET_EXTREME))
