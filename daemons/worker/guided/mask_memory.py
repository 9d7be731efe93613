"""Memory that masks are written to: of one output, or of all outputs that a device reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import MaskWords


class MaskMemory(ABC):
    """Masks of many outputs that a device reads where they lie. all_words: int32 [rows, words]."""

    all_words: MaskWords

    @abstractmethod
    def publish(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """These rows hold the masks of the tokens at these positions of prompt and output. Any thread."""


class MaskSink(ABC):
    """Memory of one output's masks. One thread at a time. words: row `row` of `memory`, where it is of one."""

    words: MaskWords
    memory: MaskMemory | None = None
    row: int = 0

    @abstractmethod
    def publish(self, position: int) -> None:
        """`words` hold the mask of the token at `position` of prompt and output."""

    @abstractmethod
    def release(self) -> None:
        """The output has ended, and nothing is written any more."""


class HostSink(MaskSink):
    """Masks that the step thread itself reads."""

    def __init__(self, vocab_size: int) -> None:
        self.words = np.zeros(-(-vocab_size // 32), np.int32)

    def publish(self, position: int) -> None:
        return

    def release(self) -> None:
        return
