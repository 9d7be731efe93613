"""Memory that masks are written to: of one output, or of all outputs that a device reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import MaskWords


class MaskMemory(ABC):
    """Masks of many outputs, of which a device has copies. words: int32 [masks, words of a mask], to be filled; the
    host reads them as fast as any memory of its own, because a library that fills a mask clears it bit by bit.

    A row may be filled as soon as the token of its mask before is known: the device is through with that one.
    """

    words: MaskWords

    @abstractmethod
    def publish(self, rows: Sequence[int] | IntArray, positions: Sequence[int] | IntArray) -> None:
        """These rows of `words` hold the masks of the tokens at these positions of prompt and output. Any thread."""


class SharedMaskMemory(MaskMemory):
    """Masks that processes beside the worker fill, each those of rows of its own that lie together.

    descriptor: of the memory of `words`; -1: it is this process's alone. rows_a_part: rows of each process, the first
    so many are the first one's."""

    descriptor: int
    rows_a_part: int


class MaskSink(ABC):
    """Memory of one output's masks. One thread at a time. words: to be filled. memory: of many outputs, of which
    `words` are a row."""

    words: MaskWords
    memory: MaskMemory | None = None
    row: int = 0

    @abstractmethod
    def publish(self, position: int) -> None:
        """`words` hold the mask of the token at `position` of prompt and output."""

    @abstractmethod
    def release(self) -> None:
        """The output has ended, and nothing is written any more."""

    def failed(self, error: MeshError) -> None:
        """The output cannot go on: no mask comes any more. Told once, by the thread that found it."""
        return


class ChainSink(MaskSink):
    """Memory of a mask and of those behind tokens that the grammar forces. max_forced: most of them at a time."""

    max_forced: int

    @abstractmethod
    def publish_chain(self, position: int, words: MaskWords, forced: Sequence[int]) -> None:
        """words [1 + forced ids, num_words]: the mask of the token at `position`, and of the one behind each id."""


class HostSink(MaskSink):
    """Masks that the step thread itself reads."""

    def __init__(self, vocab_size: int) -> None:
        self.words = np.zeros(-(-vocab_size // 32), np.int32)

    def publish(self, position: int) -> None:
        return

    def release(self) -> None:
        return
