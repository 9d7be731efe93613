"""Prefill chunks: requests in slots catch up, and waiting ones are admitted while budget and memory allow."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.runtime.arrays import as_ints, empty_ints
from radixmesh.daemons.runtime.step import Admit, Grant, Task
from radixmesh.daemons.scheduler.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.growth import GrowthEstimate
from radixmesh.daemons.scheduler.planner_counters import PlannerCounters
from radixmesh.daemons.scheduler.prefix_cache import Match
from radixmesh.daemons.scheduler.queue import WaitingQueue
from radixmesh.daemons.scheduler.request import Lifecycle, Request
from radixmesh.daemons.scheduler.validation import pages_for


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """chunk_tokens: most tokens of one request in one step. max_running: most requests in slots. ahead_pages: granted
    beyond the prompt when its prefill finishes."""

    chunk_tokens: int
    max_running: int
    ahead_pages: int


class Prefill:
    """Fills a plan's token budget with chunks. Memory that running requests are expected to need is left to them."""

    def __init__(
        self, limits: PrefillLimits, queue: WaitingQueue, growth: GrowthEstimate, counters: PlannerCounters
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._growth = growth
        self._counters = counters

    def add_chunks(self, state: EpochState, draft: PlanDraft) -> None:
        """Continues prefills, then admits. A prefill that waits for pages keeps new requests out."""
        state.prefilling = [r for r in state.prefilling if _is_prefilling(state, r)]
        is_blocked = False
        for request in state.prefilling:
            if draft.token_budget <= 0:
                return
            is_blocked |= not self._add_chunk(state, draft, request)
        while not is_blocked and not draft.has_retracted and draft.token_budget > 0:
            request_or_none = self._queue.head()
            if request_or_none is None or not self._admit(state, draft, request_or_none):
                return

    def _add_chunk(self, state: EpochState, draft: PlanDraft, request: Request) -> bool:
        """Adds the next chunk of a request in a slot; False if there is no page for a single token."""
        table, page_size, slot = state.table, state.group.page_size, request.slot
        planned, target = int(table.planned_len[slot]), int(table.target_len[slot])
        num_pages, available = int(table.num_pages[slot]), state.pages.num_available
        length = min(target - planned, draft.token_budget, self._limits.chunk_tokens)
        length = min(length, (num_pages + available) * page_size - planned)
        if length <= 0:
            return False
        is_last = planned + length == target
        missing = max(0, pages_for(planned + length, page_size) - num_pages)
        if is_last:
            most = pages_for(request.max_total_len - 1, page_size) - num_pages
            missing = max(missing, min(missing + self._limits.ahead_pages, most, available))
        if missing:
            pages = state.pages.grant(as_ints([slot]), as_ints([missing]))
            draft.grants.append(Grant(slot=slot, pages=pages))
        draft.add_chunk(slot, request.generation, length, is_last=is_last)
        table.planned_len[slot] += length
        if is_last and request.submission.task is Task.GENERATE:
            state.decode_set.join(slot)
        return True

    def _admit(self, state: EpochState, draft: PlanDraft, request: Request) -> bool:
        """Admits the request with its first chunk; False if it has to wait."""
        table = state.table
        if not table.num_free or table.num_running >= self._limits.max_running:
            return False
        ids = request.token_ids()
        match = state.pages.match(request, ids)
        if not self._fits(state, request, match):
            state.pages.cache.unlock(match)
            return False
        self._queue.admitted(request)
        cached_len = len(match.pages) * state.group.page_size
        slot = table.take(request, cached_len)
        state.pages.attach(slot, match)
        request.lifecycle = Lifecycle.RUNNING
        if request.cached_tokens < 0:
            request.cached_tokens = min(cached_len, request.prompt_len)
        self._counters.admitted(len(ids), cached_len)
        draft.admits.append(_admit_of(state, request, match, cached_len))
        state.prefilling.append(request)
        self._add_chunk(state, draft, request)
        return True

    def _fits(self, state: EpochState, request: Request, match: Match) -> bool:
        """Whether the request and what the running ones are expected to need still fit; alone it must."""
        page_size = state.group.page_size
        # A token's page at least: a slot that cannot start only holds others up.
        if state.pages.num_available < 1:
            return False
        if not state.table.num_running:
            return True
        wanted = min(request.max_total_len - 1, request.total_len + int(self._growth.num_tokens))
        needed = pages_for(wanted, page_size) - len(match.pages)
        return needed + self._growth.reserved_pages(state.table, page_size) <= state.pages.num_available


def _is_prefilling(state: EpochState, request: Request) -> bool:
    slot = request.slot
    return (
        request.lifecycle is Lifecycle.RUNNING
        and state.table.requests[slot] is request
        and bool(state.table.planned_len[slot] < state.table.target_len[slot])
    )


def _admit_of(state: EpochState, request: Request, match: Match, cached_len: int) -> Admit:
    submission = request.submission
    min_tokens = submission.stop.min_tokens
    return Admit(
        slot=request.slot,
        generation=request.generation,
        request_id=request.key.request_id,
        index=request.key.index,
        task=submission.task,
        prompt_ids=submission.prompt_ids,
        output_ids=request.output_ids(),
        cached_len=cached_len,
        cached_pages=match.pages,
        cached_page_generations=state.pages.pool.generations[match.pages],
        max_total_len=request.max_total_len,
        sampling=submission.sampling,
        min_tokens=min_tokens,
        suppressed_ids=as_ints(sorted(request.end_ids)) if min_tokens else empty_ints(),
        logprobs_start=request.logprobs_start,
        cache_namespace=request.cache_name,
        adapter=request.adapter,
    )
