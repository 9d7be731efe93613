"""The guides of the slots that follow a grammar, as steps need them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.guided.step_follower import StepFollower
from radixmesh.daemons.worker.runner import SampleInput

# The step thread has the rest of a step for its own work, and plans ahead run meanwhile.
_WAIT_SHARE, _MOST_WAIT_S = 0.6, 0.005


class SlotGuides:
    """Used by the step thread. max_drafts: forced tokens that are made ready with each mask."""

    def __init__(self, vocab_size: int, max_drafts: int = 0) -> None:
        self._vocab_size, self._max_drafts = vocab_size, max_drafts
        self._filler = MaskFiller()
        self._follower = StepFollower(self._filler)
        self._guides: dict[int, Guide] = {}
        self._let_follow_s = 0.0

    def __len__(self) -> int:
        return len(self._guides)

    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> Guide:
        """At the end of the admit's output; its mask is being filled from now on."""

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
        self._filler.begin(guide)
        return guide

    def is_late(self, slot: int) -> bool:
        """The slot follows a grammar, and the mask of its next token is not there."""
        guide = self._guides.get(slot)
        return guide is not None and not guide.is_ready

    def released(self, slot: int) -> None:
        """The slot is free."""
        guide = self._guides.pop(slot, None)
        if guide is not None:
            guide.close()

    def clear(self) -> None:
        """All slots are free."""
        for slot in list(self._guides):
            self.released(slot)

    @property
    def has_errors(self) -> bool:
        """An output cannot go on."""
        return any(guide.error is not None for guide in self._guides.values())

    def errors(self) -> Iterator[tuple[int, MeshError]]:
        """Slots whose outputs cannot go on; again each time."""
        for slot, guide in self._guides.items():
            if guide.error is not None:
                yield slot, guide.error

    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Tokens were sampled for these slots."""
        if self._guides:
            pairs = ((self._guides.get(slot), of_slot) for slot, of_slot in tokens)
            self._filler.follow([(guide, of_slot) for guide, of_slot in pairs if guide is not None])

    def launched(self, slots: Sequence[int], tokens: Callable[[], IntArray]) -> threading.Lock:
        """A step of these slots was launched: its tokens are followed as soon as they are known. tokens: as of
        `StepHandle`. Returns the step for let_follow()."""
        return self._follower.launched([self._guides.get(slot) for slot in slots], tokens)

    def let_follow(self, through: threading.Lock) -> None:
        """Leaves the interpreter's lock to the thread that fills the masks behind a step, until it is through, at most
        for a part of the time between two calls: masks are wanted before the next step samples, results are not."""
        now_s = time.monotonic()
        most_s = min(_MOST_WAIT_S, _WAIT_SHARE * (now_s - self._let_follow_s))
        through.acquire(timeout=most_s)
        self._let_follow_s = now_s

    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        """Waits until the masks of these slots are there, for at most so long together; for a slow one not at all.
        None: for all, as long as it takes."""
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


def jump_forward(sample: SampleInput, most: int) -> Sequence[int]:
    """Drafts for `EachRow` (speculation/drafter.py): tokens of the text that an output's grammar forces, none for any
    other output."""
    return () if sample.guide is None else sample.guide.forced_ids(most)
