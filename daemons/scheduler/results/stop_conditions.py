"""Stop conditions of an output: an EOS id unless ignored, a stop id, max_tokens, the context's end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.scheduler.sequence import Sequence


class SequenceEnd(NamedTuple):
    """Why an output ended; `stop_id` where an id ended it."""

    reason: FinishReason
    stop_id: int | None = None


class StopWatch:
    """Ids that end some live output, so that one array lookup a step finds the rows worth a look.

    Counts by id: requests that share a stop id may end in any order.
    """

    def __init__(self, vocab_size: int) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(vocab_size, np.int32)

    def watch(self, ids: Iterable[int]) -> None:
        for token in ids:
            self._counts[token] += 1

    def unwatch(self, ids: Iterable[int]) -> None:
        for token in ids:
            self._counts[token] -= 1

    def is_watched(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Per id whether it ends some live output. Ids are in the vocabulary."""
        return self._counts[ids] > 0


def end_of(sequence: Sequence) -> SequenceEnd | None:
    """True if the last token of the request's output ends it. An end before min_tokens does not count."""
    num_output = len(sequence.output)
    if num_output:
        token = sequence.output[-1]
        if token in sequence.end_ids and num_output > sequence.submission.stop.min_tokens:
            return SequenceEnd(FinishReason.STOP, token)
    if sequence.total_len >= sequence.max_total_len:
        return SequenceEnd(FinishReason.LENGTH)
    return None


def end_ids_of(eos_ids: Iterable[int], stop_ids: Iterable[int], *, ignore_eos: bool) -> frozenset[int]:
    return frozenset(stop_ids) | (frozenset() if ignore_eos else frozenset(eos_ids))
