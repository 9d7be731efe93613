"""Page-locked memory of the host that it reads as fast as any other of its own.

Memory that the driver gives out page-locked may be mapped write-combined, where the host reads a hundred times slower.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

_log = get_logger(__name__)

# Of one registration at most, the largest page of memory, and threads that register at a time.
_LOCKED_WORDS, _HUGE_WORDS = 1 << 28, 1 << 19
_LOCKING_THREADS = 8
_PAGE_WORDS = 1024
# Results of cudaHostUnregister: success, and cudaErrorHostMemoryNotRegistered.
_UNREGISTERED = (0, 713)


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
        _unlock_refused()
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
            if locked:
                _unlock(locked, self.words)
            flag = "--" + field.replace("_", "-")
            message = f"{4 * num} bytes of page-locked memory cannot be had ({error}): set a smaller {flag}"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field}) from error
        # Before the addresses may be another's: what is registered cannot be registered again.
        weakref.finalize(self, _unlock, locked, self.words).atexit = False


class _Refused(NamedTuple):
    """Memory that is still registered. words: keep its addresses from being given to anyone else."""

    addresses: list[int]
    words: torch.Tensor


# Of the process, as registrations are. Finalizers run on any thread, and ahead of each other.
_refused: deque[_Refused] = deque()


def _unlock(addresses: list[int], words: torch.Tensor) -> None:
    """Gives `words` back to the allocator if the driver lets go of them, else keeps them and tries again when memory is
    locked or unlocked the next time."""
    if addresses:
        _refused.append(_Refused(addresses, words))
        _unlock_refused()


def _unlock_refused() -> None:
    for _ in range(len(_refused)):
        try:
            addresses, words = _refused.popleft()
        except IndexError:
            return  # Another thread is at it.
        left = list(addresses)
        try:
            # Within a capture it would be refused, and the capture be over.
            if not torch.cuda.is_current_stream_capturing():
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                left = [at for at in addresses if int(runtime.cudaHostUnregister(at)) not in _UNREGISTERED]
        finally:
            if left:
                _refused.append(_Refused(left, words))
                _log.warning("memory_stays_locked", parts=len(left))
