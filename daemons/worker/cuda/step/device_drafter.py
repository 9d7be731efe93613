"""Drafters that propose on the device, in the step that verifies what they propose: nothing passes through the host."""

from __future__ import annotations

from abc import ABC, abstractmethod

from radixmesh.kernels.sampling.drafts import DraftInputs, SlotLengths
from radixmesh.kernels.sampling.ngram import propose_ngrams


class DeviceDrafter(ABC):
    """The seam's device end. Its work is part of captured steps: fixed launches, and no wait for the host."""

    @abstractmethod
    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        """Drafts for the rows whose `starts` is negative: up to counts[row] ids in the row's column of window_WB, with
        the position of the first one in `starts` and their number in `counts`; others keep what the host sent.

        state.tokens_SL has prompt and output of each slot, but not yet its last token, which may be sent with `inputs`.
        """


class DeviceNgram(DeviceDrafter):
    """See `speculation/ngram.py`."""

    def __init__(self, *, min_match: int, max_match: int, window: int) -> None:
        self._min_match, self._max_match, self._window = min_match, max_match, window

    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        propose_ngrams(inputs, state, min_match=self._min_match, max_match=self._max_match, window=self._window)
