"""Copies of a few words by the device itself, from pinned host memory or to it: the copy engines may be busy with KV.

A small copy to the device waits there for all that other streams have given the engine before, which is milliseconds of
KV that comes back from the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixmesh.kernels.prepared_kernel import PreparedKernel

_BLOCK = 1024  # Words of a program.


# Any number of words to any place: a kernel that is compiled while requests wait would hold them up.
@triton.jit(do_not_specialize=["source", "target", "num"])
def _copy_words_kernel(source, target, num, WORD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source.to(tl.pointer_type(WORD)) + at, mask=at < num)
    tl.store(target.to(tl.pointer_type(WORD)) + at, words, mask=at < num)


class WordCopies:
    """Of one device. Addresses are of its memory, or of memory that it reaches: another device's, the host's that is
    pinned. Copies are in order with the work of the current stream; a source stays as it is until then."""

    def __init__(self) -> None:
        self._ints = PreparedKernel(_copy_words_kernel, WORD=tl.int32, BLOCK=_BLOCK)
        self._bytes = PreparedKernel(_copy_words_kernel, WORD=tl.uint8, BLOCK=_BLOCK)

    def ints(self, source: int, target: int, num: int) -> None:
        """Copies int32 [num], num > 0; both addresses are multiples of 4."""
        assert num > 0 and source % 4 == target % 4 == 0, (source, target, num)
        self._ints.launch(triton.cdiv(num, _BLOCK), 1, source, target, num)

    def bytes(self, source: int, target: int, num: int) -> None:
        """Copies uint8 [num], num > 0."""
        assert num > 0, num
        self._bytes.launch(triton.cdiv(num, _BLOCK), 1, source, target, num)
