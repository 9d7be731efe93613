"""Outputs whose prompt is computed here and which go on elsewhere: the prefill side of transfers. Pure, no I/O.

A request with a target runs as any other until its first token is there. Its KV is sent in chunks, from the slot's own
pages. Each is asked for with the plan that computes it, and names that step: the worker copies it behind the step,
without waiting for what comes of that, and compares the generations of the pages. With its first token the request ends
here, and nobody is granted its pages until the worker has gathered the last chunk. One whose target is not known yet
keeps its slot until that has come, a second at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.cache.prefix_cache import Match
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget, digest_of

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handover:
    """A chunk of KV to be sent: tokens [first_token, first_token + num_tokens). rank: the data-parallel rank that has
    it. pages: int32, from the one on that holds the first of them. after_step: computes the last of them."""

    target: KvTarget
    rank: int
    first_token: int
    num_tokens: int
    pages: IntArray
    generations: IntArray
    after_step: int
    state: EpochState

    @property
    def is_last(self) -> bool:
        """No chunk follows."""
        return self.first_token + self.num_tokens == self.target.end


CHUNK_TOKENS = 256
"""Chunks but the last are multiples of it: as staging lays tokens out."""


# The decode side makes a place within milliseconds of the submit, or has none.
_TARGET_S = 1.0


@dataclass(slots=True)
class _Sending:
    """Of a request: tokens up to `sent` were asked for, and `planned` were as the last plan was made. last: the chunk
    that ends it."""

    sent: int
    planned: int
    is_meant: bool = True
    is_begun: bool = False
    last: Handover | None = None


class _Held(NamedTuple):
    """Pages that nobody is granted: locked in the cache, or leased since the cache has others with their tokens."""

    match: Match
    leased: IntArray


class KvHandovers:
    """Of one planner. finish: ends a live request. chunk_tokens: as many are sent ahead of the rest, 0: all at once."""

    def __init__(self, finish: Callable[[Sequence, SequenceEnd], None], *, chunk_tokens: int = 2048) -> None:
        self._finish = finish
        self._chunk_tokens = -(-chunk_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        self._running: list[Sequence] = []
        self.sending: dict[Sequence, _Sending] = {}
        """Of requests from their admission until they are over."""
        self._held: dict[Handover, _Held | None] = {}
        """Kept while a last chunk is gathered; None: the slot has it yet."""
        self._wanted: list[Handover] = []
        self._given_up: list[KvTarget] = []
        self._without_target: dict[Sequence, float] = {}
        """Since when, of requests that have nothing else to wait for."""
        self._now = 0.0
        self.num_started = self.num_chunks = 0

    @property
    def num_running(self) -> int:
        """Requests in slots that end with their first token."""
        return len(self._running)

    def begin_epoch(self) -> None:
        """Requests in slots wait again; locks of the epoch before are void."""
        self._running.clear()
        self.sending.clear()
        self._held.clear()
        self._wanted.clear()
        self._given_up.clear()
        self._without_target.clear()

    def admitted(self, sequence: Sequence) -> None:
        """A request took a slot."""
        if sequence.submission.send_kv_to is not None:
            self._running.append(sequence)

    def planned(self, state: EpochState, step_id: int) -> None:
        """Asks for what the plan of a step will have computed. Call after every plan."""
        for sequence in self._running:
            if sequence.lifecycle is Lifecycle.RUNNING:
                self._send_ahead(state, sequence, step_id)

    def processed(self, state: EpochState) -> None:
        """Ends those whose first token has come. Call after every result."""
        if not self._running:
            return
        running, self._running = self._running, []
        for sequence in running:
            if sequence.lifecycle is not Lifecycle.RUNNING:
                continue  # Over, or retracted: its next admission brings it back.
            num_known = sequence.prompt_len + len(sequence.submission.resumed_output_ids)
            is_due = state.table.total_len.item(sequence.slot) > num_known
            if not is_due or self._awaits_target(sequence):
                self._running.append(sequence)
                continue
            state.settle(sequence)
            self._hand_over(state, sequence)

    def targeted(self, state: EpochState | None, sequence: Sequence, target: KvTarget) -> None:
        """The target of a live request has come, behind its submit."""
        sequence.submission = replace(sequence.submission, send_kv_to=target)
        if state is not None and sequence in self._running and sequence.lifecycle is Lifecycle.RUNNING:
            self._send_ahead(state, sequence, state.last_step_id)

    def pass_time(self, state: EpochState, now: float) -> None:
        """Ends what was begun for requests that are over, and requests that have their token and wait for their target
        no longer. Call before each plan."""
        self._now = now
        for sequence in [s for s in self.sending if s.lifecycle is Lifecycle.FINISHED]:
            self._give_up(sequence)
        if self._without_target:
            self._without_target = {
                sequence: since
                for sequence, since in self._without_target.items()
                if sequence.lifecycle is Lifecycle.RUNNING
            }
            self.processed(state)

    def take_wanted(self) -> list[Handover]:
        """KV to be sent; each is told once, and to be released()."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_given_up(self) -> list[KvTarget]:
        """Transfers of which a part was sent, and the rest will not be; each is told once."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def released(self, handover: Handover, current: EpochState | None) -> None:
        """Its pages are gathered, or will not be."""
        held = self._held.pop(handover, None)
        if current is handover.state and held is not None:
            pages = current.ranks[handover.rank]
            pages.cache.unlock(held.match)
            pages.end_lease(held.leased)

    def _send_ahead(self, state: EpochState, sequence: Sequence, step_id: int) -> None:
        """Asks for the next chunk of a prompt, if enough of it is planned."""
        target, table, slot = sequence.submission.send_kv_to, state.table, sequence.slot
        assert target is not None
        if not target.is_known:
            return
        planned = table.planned_len.item(slot)
        sending = self.sending.get(sequence)
        if sending is None:
            is_meant = _is_meant(target, sequence)
            sending = self.sending[sequence] = _Sending(target.first_token, table.computed_len.item(slot), is_meant)
        num_in_step, sending.planned = planned - sending.planned, planned
        start = sending.sent
        if not sending.is_meant or start == target.end:
            return
        num = target.end - start
        if planned < target.end:
            num = (planned - start) // CHUNK_TOKENS * CHUNK_TOKENS
            # The next step may be the last one: what is sent behind that is to be little.
            least = self._chunk_tokens if target.end - planned > num_in_step else CHUNK_TOKENS
            if not self._chunk_tokens or num < least:
                return
        page_size = state.group.page_size
        pages = table.pages[slot, start // page_size : -(-(start + num) // page_size)].copy()
        handover = Handover(
            target=target,
            rank=table.rank_of(slot),
            first_token=start,
            num_tokens=num,
            pages=pages,
            generations=state.pages_of(slot).pool.generations[pages].copy(),
            after_step=step_id,
            state=state,
        )
        sending.sent, sending.is_begun = start + num, True
        if handover.is_last:
            sending.last = handover
            self._held[handover] = None
        self._wanted.append(handover)
        self.num_chunks += 1

    def _awaits_target(self, sequence: Sequence) -> bool:
        """True for a request that has its token, while it may still hear where its KV goes."""
        target = sequence.submission.send_kv_to
        if target is None or target.is_known:
            self._without_target.pop(sequence, None)
            return False
        return self._now < self._without_target.setdefault(sequence, self._now) + _TARGET_S

    def _give_up(self, sequence: Sequence) -> None:
        sending = self.sending.pop(sequence, None)
        if sending is not None and sending.is_begun and sequence.submission.send_kv_to is not None:
            self._given_up.append(sequence.submission.send_kv_to)

    def _hand_over(self, state: EpochState, sequence: Sequence) -> None:
        sending, pages = self.sending.get(sequence), state.pages_of(sequence.slot)
        last = None if sending is None else sending.last
        namespace = pages.namespace_of(sequence)
        leased = pages.lend(sequence) if last in self._held else None
        # Of one that is not handed over the router tells the decode side, which need not find out.
        reason = FinishReason.LENGTH if last is None else FinishReason.HANDED_OVER
        self._without_target.pop(sequence, None)
        self._finish(sequence, SequenceEnd(reason))
        if last is None:
            # The decode side computes it: nothing arrives there in time.
            target = sequence.submission.send_kv_to
            log.warning("kv_not_handed_over", transfer="" if target is None else target.transfer_id)
            self._give_up(sequence)
            return
        del self.sending[sequence]
        self.num_started += 1
        if leased is not None:
            # Behind the end of the request its full pages are the cache's.
            match = pages.cache.match(namespace, sequence.token_ids()[: last.target.end])
            pages.cache.lock(match)
            self._held[last] = _Held(match, leased)


def _is_meant(target: KvTarget, sequence: Sequence) -> bool:
    """True for the tokens, and the cache, that the target was reserved for."""
    return digest_of(sequence.cache_name, sequence.token_ids()[: target.end]) == target.tokens_digest
