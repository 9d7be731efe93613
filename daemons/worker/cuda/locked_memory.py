"""Page-locked memory of the host that it reads as fast as any other of its own.

Memory that the driver gives out page-locked may be mapped write-combined, where the host reads a hundred times slower.
"""

from __future__ import annotations

import math
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError

# Of one registration at most, the largest page of memory, and threads that register at a time.
_LOCKED_WORDS, _HUGE_WORDS = 1 << 28, 1 << 19
_LOCKING_THREADS = 8
_PAGE_WORDS = 1024


class LockedMemory:
    """int32 `words` [num] of host memory that the device reads and writes where it lies, until this object is gone.
    device: threads are on the first one unless told otherwise, and would make a context there.

    torch's own page-locked blocks are rounded up to a power of two. Raises INVALID_ARGUMENT if it cannot be had.

    rows: memory that is locked as it is, at the start of a page; None: new memory, zeroed. It is locked in parts of
    `part_words`, each a multiple of `page_words` where there is a common multiple with pages of memory. field: the
    setting that is to be smaller where it cannot be had.
    """

    def __init__(
        self,
        num: int,
        device: torch.device,
        rows: npt.NDArray[np.uint8] | None = None,
        page_words: int = 1,
        *,
        field: str = "host_kv_bytes",
    ) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        locked: list[int] = []
        unit = math.lcm(page_words, _HUGE_WORDS)
        self.part_words = _LOCKED_WORDS - _LOCKED_WORDS % unit or _LOCKED_WORDS

        def lock(start: int) -> None:
            part = self.words[start : start + self.part_words]
            if rows is None:
                # The kernel finds zeroed memory for it, which takes longest: on all threads at once.
                # Not as a tensor: one that was made in inference mode is not written to by other threads.
                part.numpy()[::_PAGE_WORDS] = 0
            with torch.cuda.device(device):
                torch.cuda.check_error(int(runtime.cudaHostRegister(part.data_ptr(), 4 * len(part), 0)))
            locked.append(part.data_ptr())

        try:
            if rows is None:
                memory = mmap.mmap(-1, 4 * num)
                memory.madvise(mmap.MADV_HUGEPAGE)
                self.words = torch.frombuffer(memory, dtype=torch.int32)
            else:
                self.words = torch.from_numpy(rows.reshape(-1).view(np.int32))
            with ThreadPoolExecutor(_LOCKING_THREADS) as pool:
                list(pool.map(lock, range(0, num, self.part_words)))
        except (MemoryError, OSError, RuntimeError) as error:
            _unlock(locked, None)
            flag = "--" + field.replace("_", "-")
            message = f"{4 * num} bytes of page-locked memory cannot be had ({error}): set a smaller {flag}"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field}) from error
        # Before the addresses may be another's: what is registered cannot be registered again.
        weakref.finalize(self, _unlock, locked, self.words).atexit = False


def _unlock(addresses: list[int], words: torch.Tensor | None) -> None:
    """words: stay mapped until then."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for address in addresses:
        runtime.cudaHostUnregister(address)
