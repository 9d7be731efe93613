"""The guides of the slots that follow a grammar, as steps need them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.guided.step_follower import StepFollower, StepRows
from radixmesh.daemons.worker.runner import SampleInput

# The step thread has the rest of a step for its own work, and plans ahead run meanwhile.
_WAIT_SHARE, _MOST_WAIT_S = 0.6, 0.005


class Guides(ABC):
    """Of all slots. Used by the step thread."""

    reads_blobs: bool = False
    """Grammars are read elsewhere, which says so of those that are none: this process needs no library for them."""

    def __init__(self) -> None:
        self._let_follow_s = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """Slots that follow a grammar."""

    @abstractmethod
    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> Guide | None:
        """At the end of the admit's output; its mask is being filled from now on. None: the step thread reads no masks
        of it."""

    @abstractmethod
    def is_late(self, slot: int) -> bool:
        """The slot follows a grammar, and the mask of its next token is not there."""

    @abstractmethod
    def released(self, slot: int) -> None:
        """The slot is free."""

    @abstractmethod
    def clear(self) -> None:
        """All slots are free."""

    @property
    @abstractmethod
    def has_errors(self) -> bool:
        """An output cannot go on."""

    @abstractmethod
    def errors(self) -> Iterator[tuple[int, MeshError]]:
        """Slots whose outputs cannot go on; again each time."""

    @abstractmethod
    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Tokens were sampled for these slots."""

    @abstractmethod
    def launched(self, slots: IntArray, tokens: Callable[[], IntArray]) -> threading.Lock:
        """A step of these slots, of its decode rows and then of its chunks that sample, was launched: its tokens are
        followed as soon as they are known. tokens: as of `StepHandle`. Returns the step for let_follow()."""

    def let_follow(self, through: threading.Lock) -> None:
        """Leaves the interpreter's lock to the thread that moves outputs on behind a step, until it is through, at most
        for a part of the time between two calls: masks are wanted before the next step samples, results are not."""
        now_s = time.monotonic()
        most_s = min(_MOST_WAIT_S, _WAIT_SHARE * (now_s - self._let_follow_s))
        through.acquire(timeout=most_s)
        self._let_follow_s = now_s

    @abstractmethod
    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        """Waits until the masks of these slots are there, for at most so long together; for a slow one not at all.
        None: for all, as long as it takes."""

    @abstractmethod
    def close(self) -> None:
        """The worker ends."""


class SlotGuides(Guides):
    """Threads of this process fill masks. max_drafts: forced tokens that are made ready with each mask."""

    def __init__(self, vocab_size: int, max_drafts: int = 0) -> None:
        super().__init__()
        self._vocab_size, self._max_drafts = vocab_size, max_drafts
        self._filler = MaskFiller()
        self._follower = StepFollower()
        self._guides: dict[int, Guide] = {}
        self._failures_seen = -1
        """Of all guides, when none of these had an error."""
        self._before: tuple[IntArray, _Rows] | None = None
        """Slots of the step that was launched last, and its rows, if no output has come or left since."""

    def __len__(self) -> int:
        return len(self._guides)

    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> Guide:
        def start() -> tuple[GrammarMatcher, GreedyTokens]:
            return store.get(admit.grammar_hash, blob).matcher(), store.tokens

        guide = self._guides[admit.slot] = Guide(
            start,
            self._vocab_size,
            position=len(admit.prompt_ids) + len(admit.output_ids),
            output_ids=admit.output_ids,
            sink=sink,
            max_drafts=self._max_drafts,
        )
        self._before = None
        self._filler.begin(guide)
        return guide

    def is_late(self, slot: int) -> bool:
        guide = self._guides.get(slot)
        return guide is not None and not guide.is_ready

    def released(self, slot: int) -> None:
        guide = self._guides.pop(slot, None)
        if guide is not None:
            self._before = None
            guide.close()

    def clear(self) -> None:
        for slot in list(self._guides):
            self.released(slot)

    @property
    def has_errors(self) -> bool:
        failures = Guide.num_failures
        if failures == self._failures_seen:
            return False
        has_errors = any(guide.error is not None for guide in self._guides.values())
        self._failures_seen = -1 if has_errors else failures
        return has_errors

    def errors(self) -> Iterator[tuple[int, MeshError]]:
        for slot, guide in self._guides.items():
            if guide.error is not None:
                yield slot, guide.error

    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        if self._guides:
            pairs = ((self._guides.get(slot), of_slot) for slot, of_slot in tokens)
            self._filler.follow([(guide, of_slot) for guide, of_slot in pairs if guide is not None])

    def launched(self, slots: IntArray, tokens: Callable[[], IntArray]) -> threading.Lock:
        before = self._before
        if before is None or before[0] is not slots:
            # Steps that only advance have the array of the one before.
            guides = [self._guides.get(slot) for slot in np.asarray(slots).tolist()]
            before = self._before = slots, _Rows(guides, self._filler)
        return self._follower.launched(before[1], tokens)

    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        ends = time.monotonic() + (seconds or 0.0)
        for slot in slots:
            guide = self._guides.get(slot)
            if guide is None:
                continue
            if seconds is None:
                while not guide.wait(60.0):
                    pass
            elif not guide.is_slow:
                left_s = ends - time.monotonic()
                # Once is enough: until its mask is there nobody waits for it again.
                guide.is_slow = not guide.wait(left_s) and left_s > 0

    def close(self) -> None:
        return


class _Rows(StepRows):
    """guides: of a step's first rows, None of those that follow no grammar."""

    def __init__(self, guides: Sequence[Guide | None], filler: MaskFiller) -> None:
        self._guides, self._filler = guides, filler

    def follow(self, tokens: IntArray) -> None:
        ids = tokens[: len(self._guides)].tolist()
        pairs = zip(self._guides, ids, strict=True)
        self._filler.follow_here([(guide, (token,)) for guide, token in pairs if guide is not None and token >= 0])

    def fail(self, error: Exception) -> None:
        Guide.fail_all([guide for guide in self._guides if guide is not None], error)


def jump_forward(sample: SampleInput, most: int) -> Sequence[int]:
    """Drafts for `EachRow` (speculation/drafter.py): tokens of the text that an output's grammar forces, none for any
    other output."""
    return () if sample.guide is None else sample.guide.forced_ids(most)
