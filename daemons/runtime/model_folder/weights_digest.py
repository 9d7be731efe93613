"""Digest of a folder's weights, of all their bytes.

`model_fingerprint()` reads headers alone, which is enough among workers that an operator starts together. What outlives
them, or is shared by replicas that never met, needs the content: fine-tunes of one base have equal headers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

# Read and hashed by one thread at a time: SHA-256 makes about 2 GB/s of one core.
_BLOCK_BYTES = 32 << 20


class _Block(NamedTuple):
    file: Path
    offset: int


def weights_digest(folder: Path, *, num_threads: int = 4) -> str:
    """SHA-256 (hex) over names, sizes and the digests of all 32 MiB blocks of a folder's *.safetensors.

    Takes 8 s of CPU time for 16 GB, so it belongs on threads of its own. Raises MeshError
    BAD_CHECKPOINT where there are no weights, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = f"{folder} holds no *.safetensors: name a folder in Hugging Face format"
        raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, message, {"path": str(folder)})
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(num_threads, "weights_digest") as threads:
            # Names and sizes first: no two lists of files read the same then.
            for file in files:
                digest.update(f"{len(file.name)}:{file.name}:{file.stat().st_size};".encode())
            for block in threads.map(_digest_of, _blocks(files)):
                digest.update(block)
    except OSError as error:
        message = f"the weights in {folder} cannot be read ({error}): copy them again"
        raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, message, {"path": str(folder)}) from error
    return digest.hexdigest()


def _blocks(files: list[Path]) -> Iterator[_Block]:
    for file in files:
        yield from (_Block(file, offset) for offset in range(0, file.stat().st_size, _BLOCK_BYTES))


def _digest_of(block: _Block) -> bytes:
    with block.file.open("rb") as stream:
        data = os.pread(stream.fileno(), _BLOCK_BYTES, block.offset)
    return hashlib.sha256(data).digest()
