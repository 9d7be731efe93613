"""The seam of drafters, which propose tokens that a step verifies beside the last token of a row.

    host      propose()            rows whose tokens the host knows: the CPU worker, and windows of drafts of a GPU
    device    DeviceDrafter        in the step itself, from the tokens that the device has (cuda/step/device_drafter.py)

A drafter changes no output: the target samples each position with its own noise, and a draft counts only where it is
the token that was sampled. So a drafter may guess, but what it costs is bounded: propose() runs in the device's step,
waits for nothing, and its time and memory do not grow with the length of a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.worker.runner import SampleInput, Segment
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree

if TYPE_CHECKING:
    import torch

    from radixmesh.daemons.worker.cuda.step.device_drafter import DeviceDrafter

MOST_BEHIND = 128
"""Of the tokens of a row that a network lacks, those that one step computes at most, beside the last one: what bounds a
step in which drafts pay again."""
_Proposal = TypeVar("_Proposal", IntArray, DraftTree)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """A decode that drafts are wanted for: the tokens that it has, and how many may follow them, `most` >= 1.

    pages: int32, those of the row's slot, for all of its tokens and `most` drafts.
    """

    sample: SampleInput
    most: int
    slot: int = 0
    pages: IntArray = field(default_factory=empty_ints)


class Drafter(ABC):
    """Proposes continuations of rows. Used by one thread.

    One that keeps something of tokens, in pages of its own beside the target's, is told on the CPU what happens to
    those: `admitted`, `computed`, `moved`, `copied`, `received` and `cleared`, in the order in which it happens to the
    target's.
    """

    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs `computed` takes, from 0."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        """For each row at most `most` ids, int32, that may follow its prompt and output; none where it has no guess.

        A row's proposal depends on that row alone: never on another request's tokens, which may be another tenant's.
        """

    def propose_trees(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        """As propose(), of at most `most` drafts a row in all. Default: chains."""
        return [DraftTree.chain(ids) for ids in self.propose(rows)]

    def admitted(self, slot: int) -> None:
        """Another request took the slot. Default: nothing is kept."""
        return

    def computed(self, segments: Sequence[Segment], hidden: tuple[torch.Tensor, ...]) -> None:
        """The target computed segments. hidden: outputs of `hidden_layers` for their tokens, [tokens, hidden] each,
        valid until it returns. Default: nothing is kept."""
        return

    def moved(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """KV of drafts that were accepted, of these tokens of the pool, is on others now, where their positions lie.
        Default: nothing is kept."""
        return

    def copied(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of a page are on another page too. Default: nothing is kept."""
        return

    @property
    def features(self) -> torch.Tensor | None:
        """Numbers of each token of the pool, [tokens, *], that it cannot compute anew. They go with the target's KV to
        host memory and back. Default: there are none."""
        return None

    def received(self, indexes: IntArray, *, has_features: bool = False) -> None:
        """KV that was computed elsewhere, or earlier, is on these tokens of the pool now. has_features: with what
        `features` had of them. Default: nothing is kept."""
        return

    def cleared(self) -> None:
        """Nothing is on any page. Default: nothing is kept."""
        return

    def on_device(self) -> DeviceDrafter | None:
        """The same proposals, made on a GPU inside a step. None: the host proposes, some steps behind the device."""
        return None


class EachRow(Drafter):
    """A drafter from a function of one row: the input of sampling its next token, and the most drafts."""

    def __init__(self, draft: Callable[[SampleInput, int], Sequence[int]]) -> None:
        self._draft = draft

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        return [np.array(list(self._draft(row.sample, row.most))[: row.most], np.int32) for row in rows]


class ByGrammar(Drafter):
    """Rows that follow a grammar are drafted by `guided`, up to max_guided ids; others by `free`, up to max_free, which
    alone may keep something of tokens."""

    def __init__(self, guided: Drafter, max_guided: int, free: Drafter, max_free: int) -> None:
        self._guided, self._max_guided = guided, max_guided
        self._free, self._max_free = free, max_free

        self.hidden_layers = free.hidden_layers

    def admitted(self, slot: int) -> None:
        self._free.admitted(slot)

    def computed(self, segments: Sequence[Segment], hidden: tuple[torch.Tensor, ...]) -> None:
        self._free.computed(segments, hidden)

    def moved(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        self._free.moved(sources, targets)

    def copied(self, source: int, target: int, num_tokens: int) -> None:
        self._free.copied(source, target, num_tokens)

    @property
    def features(self) -> torch.Tensor | None:
        return self._free.features

    def received(self, indexes: IntArray, *, has_features: bool = False) -> None:
        self._free.received(indexes, has_features=has_features)

    def cleared(self) -> None:
        self._free.cleared()

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        return self._by_guide(rows, self._guided.propose, self._free.propose)

    def propose_trees(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        return self._by_guide(rows, self._guided.propose_trees, self._free.propose_trees)

    def _by_guide(
        self,
        rows: Sequence[DraftRow],
        guided_of: Callable[[Sequence[DraftRow]], Sequence[_Proposal]],
        free_of: Callable[[Sequence[DraftRow]], Sequence[_Proposal]],
    ) -> list[_Proposal]:
        has_guide = [row.sample.guide is not None for row in rows]
        guided = iter(guided_of(_shortened(rows, has_guide, True, self._max_guided)))
        free = iter(free_of(_shortened(rows, has_guide, False, self._max_free)))
        return [next(guided) if is_guided else next(free) for is_guided in has_guide]


class NoDrafts(Drafter):
    """Proposes nothing."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        return [empty_ints()] * len(rows)


def _shortened(rows: Sequence[DraftRow], has_guide: Sequence[bool], wanted: bool, most: int) -> list[DraftRow]:
    chosen = (row for row, is_guided in zip(rows, has_guide, strict=True) if is_guided is wanted)
    return [replace(row, most=min(row.most, most)) for row in chosen]


def drafts_of(drafter: Drafter, rows: Sequence[DraftRow], vocab_size: int) -> list[IntArray]:
    """Proposals of a drafter, each cut before its first id outside the vocabulary: that has no embedding."""
    proposals = drafter.propose(rows)
    assert len(proposals) == len(rows), f"{type(drafter).__name__} drafted for {len(proposals)} of {len(rows)} rows"
    return [_in_vocabulary(ids[: row.most], vocab_size) for row, ids in zip(rows, proposals, strict=True)]


def trees_of(drafter: Drafter, rows: Sequence[DraftRow], vocab_size: int) -> list[DraftTree]:
    """As drafts_of(), of trees: without an id outside the vocabulary and what follows it."""
    proposals = drafter.propose_trees(rows)
    assert len(proposals) == len(rows), f"{type(drafter).__name__} drafted for {len(proposals)} of {len(rows)} rows"
    return [tree.cut(row.most, vocab_size) for row, tree in zip(rows, proposals, strict=True)]


def _in_vocabulary(ids: IntArray, vocab_size: int) -> IntArray:
    is_token = (ids >= 0) & (ids < vocab_size)
    return ids if is_token.all() else ids[: int(np.argmin(is_token))]
