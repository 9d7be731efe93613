"""Memory that masks are written to: of one output, or of all outputs that a device reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import MaskWords


class MaskMemory(ABC):
    """Masks of many outputs that a device reads. num_words: of a mask.

    A host may read memory that it shares with a device a hundred times slower than its own (where the driver maps it
    write-combined), and a library that fills a mask clears it bit by bit. So masks are filled elsewhere, and written
    here whole.
    """

    num_words: int

    @abstractmethod
    def publish(self, words: MaskWords, rows: Sequence[int], positions: Sequence[int]) -> None:
        """words, int32 [rows, words], are the masks of the tokens at these positions of prompt and output; `rows` are
        those of this memory. Any thread."""


class MaskSink(ABC):
    """Memory of one output's masks. One thread at a time. words: to be filled, the host's own memory. row: of `memory`,
    where a device reads the masks."""

    words: MaskWords
    memory: MaskMemory | None = None
    row: int = 0

    @abstractmethod
    def publish(self, position: int) -> None:
        """`words` hold the mask of the token at `position` of prompt and output."""

    @abstractmethod
    def release(self) -> None:
        """The output has ended, and nothing is written any more."""


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
