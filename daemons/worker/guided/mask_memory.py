"""Memory that masks are written to: of one output, or of all outputs that a device reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import MaskWords

Rows = Sequence[int] | IntArray


class MaskMemory(ABC):
    """Masks of many outputs, by rows. words: int32 [masks, words of a mask], to be filled; the host reads them as fast
    as any memory of its own, because a library that fills a mask clears it bit by bit.

    An output's next mask may be filled as soon as the token of the one before is known.
    """

    words: MaskWords

    def begin(self, rows: Rows) -> Rows:
        """Indexes in `words` of the next masks of these outputs, which are filled from now on. Any thread."""
        return rows

    @abstractmethod
    def publish(self, rows: Rows, positions: Rows) -> None:
        """The masks of these outputs that were begun are those of the tokens at these positions of prompt and output.
        Any thread."""


class SharedMaskMemory(ABC):
    """Masks that processes beside the worker fill, each those of rows of its own that lie together.

    descriptor: of the memory; -1: it is this process's alone. rows_a_part: rows of each process, the first so many are
    the first one's; num_rows: of all of them."""

    descriptor: int
    rows_a_part: int
    num_rows: int

    @property
    @abstractmethod
    def shape(self) -> Mapping[str, int]:
        """The arguments of `shared_masks` (`mask_server.py`) in a process that maps the memory."""

    @abstractmethod
    def reported(self, rows: IntArray, positions: IntArray) -> None:
        """A process has filled the masks in these rows, of the tokens at these positions. Any thread."""


class MaskSink(ABC):
    """Memory of one output's masks. One thread at a time. memory: of many outputs, of which it has a row."""

    memory: MaskMemory | None = None
    row: int = 0

    @property
    @abstractmethod
    def words(self) -> MaskWords:
        """The next mask, to be filled."""

    @abstractmethod
    def publish(self, position: int) -> None:
        """`words` hold the mask of the token at `position` of prompt and output."""

    @abstractmethod
    def release(self) -> None:
        """The output has ended, and nothing is written any more."""

    def failed(self, error: MeshError) -> None:
        """The output cannot go on: no mask comes any more. Told once, by the thread that found it."""
        return


class HostSink(MaskSink):
    """Masks that the step thread itself reads."""

    def __init__(self, vocab_size: int) -> None:
        self._words: MaskWords = np.zeros(-(-vocab_size // 32), np.int32)

    @property
    def words(self) -> MaskWords:
        return self._words

    def publish(self, position: int) -> None:
        return

    def release(self) -> None:
        return
