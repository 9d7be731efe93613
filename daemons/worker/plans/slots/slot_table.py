"""Slots: where requests live between steps. Arrays by slot, so that a decode step touches all rows at once.

FREE --admit--> OCCUPIED --release of its generation, or a new epoch--> FREE

Token ranges of an occupied slot, cached_len <= computed_len <= total_len <= max_total_len:

    0 ........ cached_len ........ computed_len ........ total_len
    | adopted pages | computed here     | known, no KV yet    |
    |----- prompt_ids -----|------ output_ids ----------------|

Lengths count what was launched. The tokens from known_len to total_len are being sampled by steps that still run: their
values are on the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, Task
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.limits import Limits

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """The part of an admit that never changes."""

    request_id: str
    index: int
    task: Task
    prompt_ids: IntArray
    sampling: Sampling
    min_tokens: int
    suppressed_ids: IntArray
    logprobs_start: int
    cache_namespace: str
    guide: Guide | None = None


class SlotTable:
    """State of all slots. Callers have checked what they ask for; arrays are [num_slots] unless said otherwise.

    tokens: int32 [num_slots, max_total_len], prompt then output. page_tables: int32 [num_slots, max_pages_per_slot], of
    which the first num_pages count. page_users: int32 [num_pages of the pool], slots that hold the page.
    Both tables are zeroed lazily by the system: memory is used only as far as requests reach.
    """

    def __init__(self, limits: Limits) -> None:
        num = limits.num_slots
        self._page_size = limits.page_size
        self.generations = np.zeros(num, np.int32)
        self.is_occupied = np.zeros(num, np.bool_)
        self.prompt_len = np.zeros(num, np.int32)
        self.computed_len = np.zeros(num, np.int32)
        self.total_len = np.zeros(num, np.int32)
        self.known_len = np.zeros(num, np.int32)
        self.max_total_len = np.zeros(num, np.int32)
        self.num_pages = np.zeros(num, np.int32)
        self.seeds = np.zeros(num, np.uint64)
        self.is_sampled = np.zeros(num, np.bool_)
        self.is_generating = np.zeros(num, np.bool_)
        self.logprobs_start = np.zeros(num, np.int32)
        """First position whose logprobs the slot's request has not got yet."""
        self.batch_from_len = np.zeros(num, np.int32)
        """Total length from which decodes of the slot may go as DecodeRows; the maximum if never."""
        self.is_bounded = np.zeros(num, np.bool_)
        """True if the slot decoded with several tokens a row: the plans alone give only bounds of its length then."""
        self.is_uncertain = np.zeros(num, np.bool_)
        """True if a decode row of the slot may yield nothing: its lengths are those of the case that it does."""
        self.tokens = np.zeros((num, limits.max_total_len), np.int32)
        self.page_tables = np.zeros((num, limits.max_pages_per_slot), np.int32)
        self.page_users = np.zeros(limits.num_pages, np.int32)
        self.decode_set: IntArray = empty_ints()
        self._occupants: list[Occupant | None] = [None] * num

    @property
    def num_occupied(self) -> int:
        return int(np.count_nonzero(self.is_occupied))

    def occupant(self, slot: int) -> Occupant:
        """Of an occupied slot."""
        occupant = self._occupants[slot]
        assert occupant is not None, f"slot {slot} is free"
        return occupant

    def pages(self, slot: int) -> IntArray:
        """View of the slot's pages, in the order of its tokens."""
        return self.page_tables[slot, : self.num_pages[slot]]

    def admit(
        self,
        admit: Admit,
        *,
        can_batch: bool,
        is_suppressed_by_runner: bool = False,
        guide: Guide | None = None,
        is_uncertain: bool = False,
    ) -> None:
        """Fills a free slot. `can_batch`: the runner takes its decodes as DecodeRows; once min_tokens are reached, or
        at once if it suppresses ids itself. guide: of a request that follows a grammar."""
        slot, sampling = admit.slot, admit.sampling
        prompt_len = len(admit.prompt_ids)
        total_len = prompt_len + len(admit.output_ids)
        self.generations[slot] = admit.generation
        self.is_occupied[slot] = True
        self.prompt_len[slot] = prompt_len
        self.computed_len[slot] = admit.cached_len
        self.total_len[slot] = self.known_len[slot] = total_len
        self.max_total_len[slot] = admit.max_total_len
        self.seeds[slot] = sampling.seed or 0
        self.is_sampled[slot] = not sampling.is_greedy
        self.is_generating[slot] = admit.task is Task.GENERATE
        self.is_bounded[slot] = False
        self.is_uncertain[slot] = is_uncertain
        self.logprobs_start[slot] = admit.logprobs_start
        is_suppressed = len(admit.suppressed_ids) and not is_suppressed_by_runner
        suppressed_len = prompt_len + admit.min_tokens if is_suppressed else 0
        self.batch_from_len[slot] = min(suppressed_len, 2**31 - 1) if can_batch else 2**31 - 1
        self.tokens[slot, :prompt_len] = admit.prompt_ids
        self.tokens[slot, prompt_len:total_len] = admit.output_ids
        num_pages = self.num_pages[slot] = len(admit.cached_pages)
        self.page_tables[slot, :num_pages] = admit.cached_pages
        self.page_users[admit.cached_pages] += 1
        self._occupants[slot] = Occupant(
            request_id=admit.request_id,
            index=admit.index,
            task=admit.task,
            prompt_ids=admit.prompt_ids,
            sampling=sampling,
            min_tokens=admit.min_tokens,
            suppressed_ids=admit.suppressed_ids,
            logprobs_start=admit.logprobs_start,
            cache_namespace=admit.cache_namespace,
            guide=guide,
        )

    def append_pages(self, slots: npt.NDArray[np.int_], counts: npt.NDArray[np.int_], pages: IntArray) -> None:
        """Appends `counts` pages each to the page tables of occupied `slots`, which differ; no page occurs twice."""
        firsts = self.num_pages[slots] - (np.cumsum(counts) - counts)
        columns = np.repeat(firsts, counts) + np.arange(len(pages))
        self.page_tables[np.repeat(slots, counts), columns] = pages
        self.num_pages[slots] += counts
        self.page_users[pages] += 1

    def last_pages(self, slots: npt.NDArray[np.int_]) -> IntArray:
        """Last page of each slot, -1 where it has none."""
        num_pages = self.num_pages[slots]
        return np.where(num_pages > 0, self.page_tables[slots, np.maximum(num_pages - 1, 0)], np.int32(-1))

    def release(self, slot: int, generation: int) -> bool:
        """Frees the slot if it is occupied by `generation`; False if that one is gone already."""
        if not self.is_occupied[slot] or self.generations[slot] != generation:
            return False
        self.page_users[self.pages(slot)] -= 1
        self.is_occupied[slot] = self.is_uncertain[slot] = False
        self.num_pages[slot] = 0
        self._occupants[slot] = None
        return True

    def clear(self) -> None:
        """A new epoch: all slots are free, generations start anew."""
        self.is_occupied[:] = self.is_uncertain[:] = False
        self.generations[:] = 0
        self.num_pages[:] = 0
        self.page_users[:] = 0
        self.decode_set = empty_ints()
        self._occupants = [None] * len(self._occupants)

    def room(self, slots: IntArray, most: int) -> IntArray:
        """Tokens that a decode of each of `slots` may yield, int32 in [0, most]: the KV of its last token and of all it
        yields but the last has a page, and max_total_len is kept."""
        total_len = self.total_len[slots]
        with_pages = self.num_pages[slots].astype(np.int64) * self._page_size - total_len + 1
        room = np.minimum(with_pages, self.max_total_len[slots] - total_len)
        clipped: IntArray = np.clip(room, 0, most).astype(np.int32)
        return clipped

    def has_room(self, slots: IntArray) -> BoolArray:
        """Those of `slots` that can take a token more: their last one has a page, and max_total_len is not reached."""
        total_len = self.total_len[slots]
        has_page: BoolArray = self.num_pages[slots].astype(np.int64) * self._page_size >= total_len
        return has_page & (total_len < self.max_total_len[slots])
