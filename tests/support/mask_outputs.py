"""Outputs whose masks processes beside a worker fill, and a device that samples by them, held against matchers here."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, MaskWords
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.step.sampling.slot_chains import SlotChains
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from support.guided_runs import MODEL, backend, vocabulary

NUM_SLOTS, NUM_PROCESSES, MAX_LEN = 6, 2, 200
PROMPT = np.array([5, 6, 7], np.int32)
SOURCES = [
    GrammarSource(GrammarForm.REGEX, text) for text in ("([ab]{2,5}c )*d", "[0-9]{200}", "(yes|no)( and [a-z]*)*")
]
FORCING = [
    GrammarSource(GrammarForm.REGEX, text)
    for text in ("(forever and a day |never ever )*!", "([0-9]abcdefghijklmnopqrstuvwxyz){40}", "([ab]{2,5}c )*d")
]
MAX_DRAFTS = 3
_FOLLOWED = 0.85  # Of forced ids: as likely, sampling cuts a text otherwise.
TIMEOUT_S = 180.0


def until(is_done: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < ends_s, what
        time.sleep(0.005)


class ProcessOutputs(ABC):
    """Outputs in slots, and beside each a matcher of this process that goes the same way."""

    memory: SlotMasks | SlotChains

    def __init__(self, sources: Sequence[GrammarSource], num_processes: int) -> None:
        self.guides = ProcessGuides(num_processes, MODEL, "xgrammar")
        self.guides.attach(self.memory, num_slots=NUM_SLOTS, max_total_len=MAX_LEN)
        assert self.guides.wait_ready(TIMEOUT_S)
        self.store = GrammarStore(backend().format, backend)
        self.rng = np.random.default_rng(1)
        self.tokens: dict[int, list[int]] = {}
        self.slots: IntArray | None = None
        """Of all steps; None: those with outputs."""
        self._matchers: dict[int, GrammarMatcher] = {}
        self._artefacts = [backend().compile(source) for source in sources]

    def admit(self, slot: int, output_ids: Sequence[int] = (), blob: bytes | None = None) -> None:
        artefact = self._artefacts[slot % len(self._artefacts)]
        matcher = self._matchers[slot] = backend().load(artefact).matcher()
        assert all(matcher.accept(token) for token in output_ids)
        self.tokens[slot] = list(output_ids)
        admit = Admit(
            slot=slot,
            generation=1,
            request_id=str(slot),
            prompt_ids=PROMPT,
            output_ids=np.array(output_ids, np.int32),
            max_total_len=MAX_LEN,
            sampling=Sampling(),
            grammar_hash=str(slot % len(self._artefacts)) if blob is None else "broken",
        )
        self.guides.admitted(admit, artefact if blob is None else blob, self.store, self.memory.sink(admit))
        self.memory.admitted(admit)

    def release(self, slot: int) -> None:
        self.guides.released(slot)
        del self.tokens[slot], self._matchers[slot]

    def row(self, slot: int) -> int:
        return int(self.guides._row_of_slot[slot])

    def is_over(self, slot: int) -> bool:
        return bool(self._matchers[slot].is_over)

    @abstractmethod
    def mask_of(self, slot: int) -> MaskWords | None:
        """The mask that the device would find for the slot's next token."""

    @abstractmethod
    def sample(self, slot: int) -> list[int]:
        """Tokens that the device yields in a step; none without a mask."""

    @property
    def are_rows_free(self) -> bool:
        return sum(map(len, self.memory._free)) == self.memory.num_rows

    def check(self) -> None:
        """All masks come, on the device too, and are those of the matchers here."""
        slots = list(self.tokens)
        self.guides.wait(slots, None)
        assert not self.guides.has_errors, list(self.guides.errors())
        for slot in slots:
            mask = self.mask_of(slot)
            assert mask is not None and not self.guides.is_late(slot)
            assert (mask == self.expected(slot)).all(), slot

    def expected(self, slot: int) -> MaskWords:
        words: MaskWords = np.zeros(-(-vocabulary().vocab_size // 32), np.int32)
        if self._matchers[slot].is_over:
            return words - 1
        self._matchers[slot].fill(words)
        return words

    def step(self) -> None:
        """Samples for each slot, as a step on a device does."""
        slots = np.array(sorted(self.tokens), np.int32) if self.slots is None else self.slots
        yielded = [self.sample(slot) if slot in self.tokens else [] for slot in slots.tolist()]
        ids = np.full((len(slots), 1 + MAX_DRAFTS), -1, np.int32)
        for index, tokens in enumerate(yielded):
            ids[index, : len(tokens)] = tokens
        got = ids if isinstance(self.memory, SlotChains) else ids[:, 0]
        assert self.guides.launched(slots, lambda: got).acquire(timeout=TIMEOUT_S)

    def step_amid_changes(self, num: int) -> None:
        """So many steps. Every fifth one another output takes a slot at once, with tokens from before. At the end all
        leave, and their rows are free."""
        for slot in range(NUM_SLOTS):
            self.admit(slot)
        for number in range(num):
            self.check()
            self.step()
            if number % 5 == 4:
                slot = number % NUM_SLOTS
                self.check()
                before = () if self.is_over(slot) else self.tokens[slot]
                self.release(slot)
                self.admit(slot, before)
        self.check()
        for slot in range(NUM_SLOTS):
            self.release(slot)
        until(lambda: self.are_rows_free, "rows whose outputs have left are free again")

    def _sampled(self, slot: int, mask: MaskWords, likely: int | None = None) -> int:
        assert (mask == self.expected(slot)).all(), "a mask that is there is right, or it is not there"
        token = likely
        if token is None or self.rng.random() > _FOLLOWED:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocabulary().vocab_size)
            token = int(self.rng.choice(np.flatnonzero(bits)))
        self._matchers[slot].accept(token)
        self.tokens[slot].append(token)
        return token


class Outputs(ProcessOutputs):
    """A mask an output, which the worker copies to its device."""

    memory: SlotMasks

    def __init__(self) -> None:
        num_ids = vocabulary().vocab_size
        self.memory = SlotMasks(
            HostDevice(), num_slots=NUM_SLOTS, max_rows=NUM_SLOTS, vocab_size=num_ids, num_processes=NUM_PROCESSES
        )
        super().__init__(SOURCES, NUM_PROCESSES)

    def mask_of(self, slot: int) -> MaskWords | None:
        row = self.row(slot)
        if self.memory.positions[row] != len(PROMPT) + len(self.tokens[slot]):
            return None
        mask: MaskWords = self.memory._host.words_MW.numpy()[row]
        return mask

    def sample(self, slot: int) -> list[int]:
        mask = self.mask_of(slot)
        return [] if mask is None else [self._sampled(slot, mask)]


class ChainOutputs(ProcessOutputs):
    """Chains of one process, which takes seconds to start: the device reads them where they are written, as the kernels
    do. most: tokens of a row so far in a step."""

    memory: SlotChains

    def __init__(self) -> None:
        self.memory = SlotChains(
            HostDevice(),
            NUM_SLOTS,
            NUM_SLOTS,
            vocab_size=vocabulary().vocab_size,
            max_drafts=MAX_DRAFTS,
            num_processes=1,
        )
        super().__init__(FORCING, 1)
        self.most = 0

    def chain_of(self, slot: int) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Masks from the slot's next token on, and the ids between them; none where the chain has no mask for it."""
        row, position = self.row(slot), len(PROMPT) + len(self.tokens[slot])
        version = int(self.memory.versions[row, 0])
        chain = 2 * row + version % 2
        base, num_ids, *ids = self.memory.heads[chain].tolist()
        behind = position - base
        own = self.tokens[slot][len(self.tokens[slot]) - behind :] if behind > 0 else []
        if version <= 0 or not 0 <= behind <= num_ids or own != ids[:behind]:
            return self.memory.words[:0], []
        first = chain * (1 + self.memory.max_forced)
        return self.memory.words[first + behind : first + num_ids + 1], ids[behind:num_ids]

    def mask_of(self, slot: int) -> MaskWords | None:
        masks, _ = self.chain_of(slot)
        if not len(masks):
            return None
        mask: MaskWords = masks[0]
        return mask

    def sample(self, slot: int) -> list[int]:
        masks, ids = self.chain_of(slot)
        tokens: list[int] = []
        for mask, likely in zip(masks[: 1 + MAX_DRAFTS], [*ids, None], strict=False):
            tokens.append(self._sampled(slot, mask, likely))
            if tokens[-1] != likely:
                break
        self.most = max(self.most, len(tokens))
        return tokens
