"""Prefill chunks: requests in slots catch up, and waiting ones are admitted while budget and memory allow."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.runtime.arrays import as_ints, empty_ints
from radixmesh.daemons.runtime.rpc.frames import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES
from radixmesh.daemons.runtime.steps.step import Admit, Task
from radixmesh.daemons.runtime.steps.step_codec import admit_bytes
from radixmesh.daemons.scheduler.cache.prefix_cache import Match, Probe
from radixmesh.daemons.scheduler.planning.admission.decode_reserve import DecodeReserve
from radixmesh.daemons.scheduler.planning.admission.grammar_gate import GrammarGate
from radixmesh.daemons.scheduler.planning.admission.prefill_alignment import PrefillAlignment
from radixmesh.daemons.scheduler.planning.admission.rank_placement import RankLoads, likely_rank, rank_order
from radixmesh.daemons.scheduler.planning.counters import PlannerCounters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.queue.inflight_prefixes import InflightPrefixes
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.queue.validation import pages_for
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver
from radixmesh.daemons.scheduler.tiers.kv_fetches import KvFetches
from radixmesh.daemons.scheduler.tiers.kv_loads import KvLoads, LoadTurn
from radixmesh.daemons.scheduler.transfers.arrivals import KvArrivals
from radixmesh.daemons.scheduler.transfers.handovers import KvHandovers

# Upper bound of sequences that wait for a prefix at a time: more could not all run next anyway.
_MAX_WAITING = 256
# Plans in a row in which the oldest prefill of several chunks leaves its tokens to prefixes that more wait for.
_MOST_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """chunk_tokens: of each request in one step, see Prefill._continue(). max_running: most requests in slots,
    max_running_of_rank: in those of one data-parallel rank. ahead_pages: granted beyond the prompt when its prefill
    finishes. inflight_prefix_min_tokens: see InflightPrefixes. align_steps: see PrefillAlignment."""

    chunk_tokens: int
    max_running: int
    ahead_pages: int
    max_running_of_rank: int
    inflight_prefix_min_tokens: int = 32
    align_steps: int = 0


class Prefill:
    """Fills a plan's token budget with chunks. Memory that running requests are expected to need is left to them."""

    def __init__(
        self,
        limits: PrefillLimits,
        queue: WaitingQueue,
        decode_reserve: DecodeReserve,
        counters: PlannerCounters,
        observer: SequenceObserver,
        grammars: GrammarGate,
        arrivals: KvArrivals,
        handovers: KvHandovers,
        loads: KvLoads,
        fetches: KvFetches,
    ) -> None:
        self._loads_from_host = loads
        self._fetches = fetches
        self._observer = observer
        self._limits = limits
        self._queue = queue
        self._decode_reserve = decode_reserve
        self._counters = counters
        self._grammars = grammars
        self._arrivals = arrivals
        self._handovers = handovers
        self._inflight_prefixes = InflightPrefixes(
            queue,
            counters,
            min_tokens=limits.inflight_prefix_min_tokens,
            max_waiting=min(_MAX_WAITING, limits.max_running),
        )
        self._alignment = PrefillAlignment(limits.align_steps, limits.max_running_of_rank)
        self._passed_over: dict[Sequence, int] = {}
        """By how many plans in a row, of the oldest prefill of each rank."""
        self._num_reserved: dict[int, int] = {}
        """Pages that running requests of a rank are expected to ask for, where counted in this plan."""
        self._loads: RankLoads | None = None

    def begin_plan(self, state: EpochState) -> None:
        """Slots have changed since the last plan. Unparks the sequences whose prefix is computed by now."""
        self._num_reserved.clear()
        self._loads = None
        self._inflight_prefixes.release(state)

    def add_chunks(self, state: EpochState, draft: PlanDraft, *, may_admit: bool, only: Sequence | None = None) -> None:
        """Continues prefills, then admits. A prefill that waits for pages keeps new requests out.

        only: nobody else is admitted.
        """
        if only is not None:
            may_admit &= only.lifecycle is Lifecycle.WAITING and not self._queue.is_parked(only)
        state.prefilling = [r for r in state.prefilling if _is_prefilling(state, r)]
        if only is None and may_admit and self._alignment.holds(state, len(self._queue)):
            self._counters.num_held_plans += 1
            return
        self._continue(state, draft)
        self._admit_waiting(state, draft, may_admit, only)
        if only is None and not draft.has_retracted:
            self._extend_leaders(state, draft)

    def _continue(self, state: EpochState, draft: PlanDraft) -> None:
        """Adds the next chunks of requests in slots: as many tokens together as a chunk for each of them.

        Those that end with their chunk get it. What the others may have together goes to the one that most wait for,
        of equals to the oldest: side by side all of them would end when the last one does, for steps that take as long.
        Nobody starves: one that is admitted takes no token that those in slots could have, and the oldest is passed
        over _MOST_PASSES times in a row.
        """
        table, most = state.table, self._limits.chunk_tokens
        left: dict[Sequence, int] = {}
        oldest: dict[int, Sequence] = {}
        shares = [0] * len(draft.token_budgets)
        for sequence in state.prefilling:
            rank = table.rank_of(sequence.slot)
            left[sequence] = table.target_len.item(sequence.slot) - table.planned_len.item(sequence.slot)
            shares[rank] += min(left[sequence], most)
            if left[sequence] > most:
                oldest.setdefault(rank, sequence)

        def turn(sequence: Sequence) -> tuple[bool, bool, int]:
            if left[sequence] <= most:
                return False, False, 0
            is_due = self._passed_over.get(sequence, 0) >= _MOST_PASSES
            return True, not is_due, -self._inflight_prefixes.num_followers(sequence)

        blocked: set[int] = set()
        for sequence in sorted(state.prefilling, key=turn):
            rank = table.rank_of(sequence.slot)
            before = draft.token_budgets[rank]
            if min(before, shares[rank]) <= 0:
                continue
            if not self._add_chunk(state, draft, sequence, rank, most=shares[rank]):
                blocked.add(rank)
            shares[rank] -= before - draft.token_budgets[rank]
        self._passed_over = {
            sequence: self._passed_over.get(sequence, 0) + 1
            for sequence in oldest.values()
            if not draft.has_chunk(sequence.slot)
        }
        for rank in blocked:
            # Nobody enters where a prefill waits for pages.
            draft.token_budgets[rank] = 0

    def _admit_waiting(self, state: EpochState, draft: PlanDraft, may_admit: bool, only: Sequence | None) -> None:
        while may_admit and not draft.has_retracted and max(draft.token_budgets) > 0:
            # An admit carries its tokens, cached pages and options whole, however little of it is to be computed.
            if draft.num_admit_bytes >= MAX_FRAME_BYTES or len(draft.admits) >= MAX_FRAME_ENTRIES:
                return
            request_or_none = only or self._queue.head()
            if request_or_none is None or not self._admit(state, draft, request_or_none) or only is not None:
                return

    def _extend_leaders(self, state: EpochState, draft: PlanDraft) -> None:
        """Gives what is left of the step's tokens to prefixes that others wait for: these leave it over by waiting.

        And to the rest of the leader's own prompt, if it is no more than a chunk: it would be in their step otherwise.
        """
        for sequence, until in self._inflight_prefixes.awaited():
            if not _is_prefilling(state, sequence):
                continue
            rank = state.table.rank_of(sequence.slot)
            target = state.table.target_len.item(sequence.slot)
            end = target if target - until <= self._limits.chunk_tokens else until
            most = end - state.table.planned_len.item(sequence.slot)
            if most > 0 and draft.token_budgets[rank] > 0:
                self._add_chunk(state, draft, sequence, rank, most=most)

    def has_room(self, state: EpochState, sequence: Sequence, rank: int) -> bool:
        """True if a request could be admitted to that rank now."""
        probe = state.ranks[rank].probe(sequence)
        return self._has_slot(state, rank) and self._has_pages(state, sequence, probe.num_pages, rank)

    def missing_pages(self, state: EpochState, sequence: Sequence, rank: int) -> int:
        """Pages that a request lacks for its admission there; 0 or less = it lacks a slot alone."""
        pages = state.ranks[rank]
        needed = self._wanted_pages(state, sequence) - pages.probe(sequence).num_pages
        return needed + self._reserved(state, rank) - pages.num_available

    def num_due_followers(self, state: EpochState) -> int:
        """Requests whose wait for a prefix ends with the results of the plans in flight, as far as there are slots."""
        return min(self._inflight_prefixes.num_due(state), self._limits.max_running - state.table.num_running)

    def reserved_pages(self, state: EpochState, slot: int, page_size: int) -> int:
        """Pages that are kept for a running request."""
        return self._decode_reserve.reserved_of(state.table, page_size, slot)

    def _add_chunk(
        self, state: EpochState, draft: PlanDraft, sequence: Sequence, rank: int, *, most: int | None = None
    ) -> bool:
        """Adds the next chunk of a request in a slot; False if there is no page for a single token.

        most: tokens of it; None = --chunk-tokens.

        No chunk is added where the logprobs of its prompt would make the result's message too long: the next plan's
        turn.
        """
        table, page_size, slot = state.table, state.group.page_size, sequence.slot
        planned, target = table.planned_len.item(slot), table.target_len.item(slot)
        pages = state.ranks[rank]
        num_pages, available = table.num_pages.item(slot), pages.num_available
        most = self._limits.chunk_tokens if most is None else most
        length = min(target - planned, draft.token_budgets[rank], most)
        length = min(length, (num_pages + available) * page_size - planned)
        if length <= 0:
            return False
        token_bytes = _logprob_bytes(sequence)
        if token_bytes:
            length = min(length, (MAX_FRAME_BYTES - draft.num_logprob_bytes) // token_bytes)
            if length <= 0:
                return True
            draft.num_logprob_bytes += length * token_bytes
        is_last = planned + length == target
        missing = max(0, pages_for(planned + length, page_size) - num_pages)
        if is_last:
            most_pages = pages_for(sequence.max_total_len - 1, page_size) - num_pages
            missing = max(missing, min(missing + self._limits.ahead_pages, most_pages, available))
        if missing:
            slots, counts = as_ints([slot]), as_ints([missing])
            grant = draft.extend_grants if draft.has_chunk(slot) else draft.add_grants
            grant(slots, counts, pages.grant(slots, counts))
        draft.add_chunk(slot, sequence.generation, length, is_last=is_last, rank=rank)
        table.plan_chunk(slot, planned + length)
        if is_last and sequence.submission.task is Task.GENERATE and sequence.submission.send_kv_to is None:
            # One whose KV goes elsewhere ends with its first token.
            state.decode_set.join(slot)
        return True

    def _admit(self, state: EpochState, draft: PlanDraft, sequence: Sequence) -> bool:
        """Admits a sequence with its first chunk, or parks it behind its leader; False if it and all behind it wait."""
        table, limits = state.table, self._limits
        if table.num_running >= limits.max_running:
            return self._prefetch(state, sequence)
        if sequence.submission.grammar is not None and not self._grammars.may_pass(sequence):
            return True
        if sequence.submission.transfer_id and not self._arrivals.may_pass(sequence):
            return True
        if table.num_ranks == 1:
            if table.num_running >= limits.max_running_of_rank:
                return self._prefetch(state, sequence)
            return self._admit_to(state, draft, sequence, 0)
        if self._loads is None:
            num_parked = self._fetches.num_parked() + self._loads_from_host.num_parked()
            load_cost = self._loads_from_host.cost
            self._loads = RankLoads(state, num_parked, load_cost, self._fetches.store_cost(load_cost))
        # The cheapest one that takes it: a cached prefix is no reason to wait while others are idle.
        ranks = rank_order(state, draft, self._loads, sequence, limits.max_running_of_rank)
        if not ranks:
            return self._prefetch(state, sequence)
        return any(self._admit_to(state, draft, sequence, rank) for rank in ranks)

    def _admit_to(self, state: EpochState, draft: PlanDraft, sequence: Sequence, rank: int) -> bool:
        """The same on a rank that has a slot."""
        pages, page_size = state.ranks[rank], state.group.page_size
        probe = pages.probe(sequence)
        if pages.host is not None:
            turn = self._turn(state, sequence, probe, rank)
            if turn is not LoadTurn.NOTHING:
                return turn is LoadTurn.PARKED
            probe = pages.probe(sequence)
        ahead = self._inflight_prefixes.ahead_of(state, sequence, probe.num_pages * page_size)
        # A leader on another rank computes nothing for this one.
        if ahead is not None and state.table.rank_of(ahead.leader.slot) == rank:
            return self._inflight_prefixes.park(sequence, ahead)
        if not self._has_pages(state, sequence, probe.num_pages, rank):
            return False
        match = pages.match(sequence, probe)
        # The prefix that was found is locked now, and cannot be evicted for it any more.
        if not self._has_pages(state, sequence, len(match.pages), rank):
            pages.cache.unlock(match)
            return False
        self._enter(state, draft, sequence, match, rank)
        return True

    def _prefetch(self, state: EpochState, sequence: Sequence) -> bool:
        """There is no slot: True if the request has KV on the host that is loaded meanwhile, and so the next one's turn
        comes."""
        if not state.hosts:
            return False
        rank = 0 if state.table.num_ranks == 1 else likely_rank(state, sequence)
        return self._turn(state, sequence, state.ranks[rank].probe(sequence), rank) is LoadTurn.PARKED

    def _turn(self, state: EpochState, sequence: Sequence, probe: Probe, rank: int) -> LoadTurn:
        """The outcome of looking below a rank's device for what a request lacks."""
        if state.group.has_kv_store and self._fetches.is_parked(state, sequence, probe, rank):
            turn = LoadTurn.PARKED
        else:
            turn = self._load_turn(state, sequence, probe, rank)
        if turn is LoadTurn.PARKED and self._loads is not None:
            self._loads.num_parked[rank] += 1
        return turn

    def _load_turn(self, state: EpochState, sequence: Sequence, probe: Probe, rank: int) -> LoadTurn:
        has_pages = self._has_pages(state, sequence, probe.num_pages, rank)
        if not has_pages and not state.table.running_on(rank) and self._loads_from_host.let_go(state):
            has_pages = self._has_pages(state, sequence, probe.num_pages, rank)
        return self._loads_from_host.turn(state, sequence, probe, rank, has_pages=has_pages)

    def _enter(self, state: EpochState, draft: PlanDraft, sequence: Sequence, match: Match, rank: int) -> None:
        """A request with a locked match takes a slot."""
        self._queue.admitted(sequence)
        cached_len = len(match.pages) * state.group.page_size
        slot = state.table.take(sequence, cached_len, rank)
        state.ranks[rank].attach(slot, match)
        sequence.lifecycle = Lifecycle.RUNNING
        self._handovers.admitted(sequence)
        self._arrivals.admitted(sequence)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(cached_len, sequence.prompt_len)
        self._counters.admitted(sequence.total_len, cached_len)
        self._observer.admitted(sequence)
        admit = _admit_of(state, sequence, match, cached_len, rank)
        draft.admits.append(admit)
        draft.num_admit_bytes += admit_bytes(admit)
        state.prefilling.append(sequence)
        self._inflight_prefixes.lead(state, sequence, cached_len)
        self._add_chunk(state, draft, sequence, rank)
        reserved = self.reserved_pages(state, slot, state.group.page_size)
        self._num_reserved[rank] = self._reserved(state, rank) + reserved
        if self._loads is not None:
            self._loads.admitted(state, slot)
            state.recent.admitted(sequence, rank)

    def _has_slot(self, state: EpochState, rank: int) -> bool:
        table, limits = state.table, self._limits
        return table.running_on(rank) < limits.max_running_of_rank and table.num_running < limits.max_running

    def _has_pages(self, state: EpochState, sequence: Sequence, num_cached: int, rank: int) -> bool:
        """True if the request and what the running ones are expected to need still fit; alone it must."""
        pages = state.ranks[rank]
        available = pages.num_available
        # A token's page at least: a slot that cannot start only holds others up.
        if available < 1:
            return False
        if not state.table.running_on(rank):
            # Admitted with fewer pages than its tokens take, it would give way again and compute nothing, until a
            # transfer or a load returns some. With more than there will ever be it fails once all are back.
            pool = pages.pool
            least = min(pages_for(sequence.total_len, state.group.page_size), pool.num_pages - pool.num_quarantined)
            is_whole = not (pool.num_leased or pool.num_loading)
            return is_whole or least - num_cached <= available
        return self._wanted_pages(state, sequence) - num_cached + self._reserved(state, rank) <= available

    def _wanted_pages(self, state: EpochState, sequence: Sequence) -> int:
        wanted = min(sequence.max_total_len - 1, sequence.total_len + int(self._decode_reserve.num_tokens))
        return pages_for(wanted, state.group.page_size)

    def _reserved(self, state: EpochState, rank: int) -> int:
        num = self._num_reserved.get(rank)
        if num is None:
            num = self._decode_reserve.reserved_pages(state.table, state.group.page_size, rank)
            self._num_reserved[rank] = num
        return num


def _is_prefilling(state: EpochState, sequence: Sequence) -> bool:
    slot = sequence.slot
    return (
        sequence.lifecycle is Lifecycle.RUNNING
        and state.table.sequences[slot] is sequence
        and state.table.planned_len.item(slot) < state.table.target_len.item(slot)
    )


def _logprob_bytes(sequence: Sequence) -> int:
    """Bytes that a result has for each token of a chunk, 0 = no logprobs of the prompt are wanted (any more)."""
    sampling = sequence.submission.sampling
    if not sampling.prompt_logprobs or sequence.logprobs_start >= sequence.prompt_len:
        return 0
    return 4 + 8 * (sampling.num_top_logprobs or 0)


def _admit_of(state: EpochState, sequence: Sequence, match: Match, cached_len: int, rank: int) -> Admit:
    submission = sequence.submission
    min_tokens = submission.stop.min_tokens
    return Admit(
        slot=sequence.slot,
        generation=sequence.generation,
        request_id=sequence.key.request_id,
        index=sequence.key.index,
        task=submission.task,
        prompt_ids=submission.prompt_ids,
        output_ids=sequence.output_ids(),
        cached_len=cached_len,
        cached_pages=match.pages,
        cached_page_generations=state.ranks[rank].pool.generations[match.pages],
        max_total_len=sequence.max_total_len,
        sampling=submission.sampling,
        min_tokens=min_tokens,
        suppressed_ids=as_ints(sorted(sequence.end_ids)) if min_tokens else empty_ints(),
        logprobs_start=sequence.logprobs_start,
        cache_namespace=sequence.cache_name,
        grammar_hash="" if submission.grammar is None else submission.grammar.hash,
        adapter=sequence.adapter,
        trace_context=sequence.trace_context,
    )
