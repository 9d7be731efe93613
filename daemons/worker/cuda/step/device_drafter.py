"""Drafters that propose on the device, in the step that verifies what they propose: nothing passes through the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.models.model import HiddenStates
from radixmesh.kernels.sampling.draft_trees import TreeRows
from radixmesh.kernels.sampling.drafts import DraftInputs, DraftRows, SlotLengths
from radixmesh.kernels.sampling.ngram import propose_ngrams

if TYPE_CHECKING:
    from radixmesh.daemons.worker.cuda.step.sampling.slot_sampler import SlotSampler


class DeviceDrafter(ABC):
    """The seam's device end. Its work is part of captured steps: fixed launches, and no wait for the host.

    One that keeps something of tokens is told what happens to them; by default nothing is kept. hidden_layers: layers
    of the target whose outputs `computed` takes, from 0. has_trees: drafts are trees, with what each follows in
    parents_WB of the inputs. has_levels: a step drafts for all rows as often as one of them may have drafts.
    """

    hidden_layers: tuple[int, ...] = ()
    has_trees: bool = False
    has_levels: bool = False

    def begin(self, state: SlotLengths, sampler: SlotSampler, *, max_rows: int, max_drafts: int) -> None:
        """Before all steps: of up to max_rows rows, each with up to max_drafts drafts."""
        return

    @abstractmethod
    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        """Drafts for the rows whose `starts` is negative: up to counts[row] ids in the row's column of window_WB, with
        the position of the first one in `starts` and their number in `counts`; others keep what the host sent.

        state.tokens_SL has prompt and output of each slot, but not yet its last token, which may be sent with `inputs`.
        """

    def computed(self, rows: DraftRows, hidden: HiddenStates, trees: TreeRows | None = None) -> None:
        """The target computed these positions; `hidden` has its states. Part of the step. trees: of steps with trees,
        where the KV of positions is."""
        return

    def kept_planes(self) -> list[torch.Tensor]:
        """Memory by the token of the target's pool, [layers, tokens, ...], whose rows move with its KV."""
        return []

    def warm_up(self, *, is_captured: bool) -> None:
        """Compiles what is launched outside of captured steps. is_captured: steps are, and this may be."""
        return

    def admitted(self, admit: Admit) -> None:
        """A request took a slot."""
        return

    def launching(self, slots: IntArray, *, has_drafts: bool) -> None:
        """A step of these slots is about to be launched, behind all work so far."""
        return

    def launched(self, slots: IntArray, counts: IntArray, num_drafts: IntArray) -> None:
        """A step that drafted is over: what its rows yielded, and how many drafts each had."""
        return


class DeviceNgram(DeviceDrafter):
    """See `speculation/ngram.py`."""

    def __init__(self, *, min_match: int, max_match: int, window: int) -> None:
        self._min_match, self._max_match, self._window = min_match, max_match, window

    def propose(self, inputs: DraftInputs, state: SlotLengths) -> None:
        propose_ngrams(inputs, state, min_match=self._min_match, max_match=self._max_match, window=self._window)
