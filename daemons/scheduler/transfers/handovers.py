"""Outputs whose prompt is computed here and which go on elsewhere: the prefill side of transfers. Pure, no I/O.

A request with a target runs as any other until its first token is there. Meanwhile what is computed is sent in chunks,
from the slot's own pages: the worker compares their generations as it copies them, so nothing is locked for that. Then
it ends here, and the pages of the last chunk stay locked in the prefix cache until the worker has gathered them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.cache.prefix_cache import Match
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState
from radixmesh.daemons.scheduler.results.stop_conditions import SequenceEnd
from radixmesh.daemons.scheduler.sequence import Lifecycle, Sequence
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget, digest_of

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A chunk of KV to be sent: tokens [first_token, first_token + num_tokens). rank: the data-parallel rank that has
    it. pages: int32, from the one on that holds the first of them. held: what stays locked until it is gathered."""

    target: KvTarget
    rank: int
    first_token: int
    num_tokens: int
    pages: IntArray
    generations: IntArray
    held: Match | None
    state: EpochState

    @property
    def is_last(self) -> bool:
        """No chunk follows."""
        return self.first_token + self.num_tokens == self.target.end


CHUNK_TOKENS = 256
"""Chunks but the last are multiples of it: as staging lays tokens out."""


class KvHandovers:
    """Of one planner. finish: ends a live request. chunk_tokens: as many are sent ahead of the rest, 0: all at once."""

    def __init__(self, finish: Callable[[Sequence, SequenceEnd], None], *, chunk_tokens: int = 2048) -> None:
        self._finish = finish
        self._chunk_tokens = -(-chunk_tokens // CHUNK_TOKENS) * CHUNK_TOKENS
        self._running: list[Sequence] = []
        self.sent: dict[Sequence, int] = {}
        """Position up to which the KV of a request was sent ahead; nothing is, and 0, for one of other tokens."""
        self._wanted: list[Handover] = []
        self._given_up: list[KvTarget] = []
        self.num_started = self.num_chunks = 0

    def begin_epoch(self) -> None:
        """Requests in slots wait again; locks of the epoch before are void."""
        self._running.clear()
        self.sent.clear()
        self._wanted.clear()
        self._given_up.clear()

    def admitted(self, sequence: Sequence) -> None:
        """A request took a slot."""
        if sequence.submission.send_kv_to is not None:
            self._running.append(sequence)

    def processed(self, state: EpochState) -> None:
        """Ends those whose first token has come. Call after every result."""
        if not self._running:
            return
        running, self._running = self._running, []
        for sequence in running:
            if sequence.lifecycle is not Lifecycle.RUNNING:
                continue  # Over, or retracted: its next admission brings it back.
            num_known = sequence.prompt_len + len(sequence.submission.resumed_output_ids)
            if state.table.total_len.item(sequence.slot) <= num_known:
                self._running.append(sequence)
                self._send_ahead(state, sequence)
                continue
            state.settle(sequence)
            self._hand_over(state, sequence)

    def pass_time(self) -> None:
        """Ends what was begun for requests that are over. Call before each plan."""
        for sequence in [s for s in self.sent if s.lifecycle is Lifecycle.FINISHED]:
            self._give_up(sequence)

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
        if current is handover.state and handover.held is not None:
            current.ranks[handover.rank].cache.unlock(handover.held)

    def _send_ahead(self, state: EpochState, sequence: Sequence) -> None:
        """Sends what is computed of a prompt, if that is enough for a chunk."""
        target, table, slot = sequence.submission.send_kv_to, state.table, sequence.slot
        assert target is not None
        if not self._chunk_tokens:
            return
        start = self.sent.get(sequence, target.first_token)
        # Never the last chunk: that is sent when the first token is there.
        end = min(table.computed_len.item(slot), target.end - 1)
        num = (end - start) // CHUNK_TOKENS * CHUNK_TOKENS
        if num < self._chunk_tokens:
            return
        if sequence not in self.sent and not _is_meant(target, sequence):
            return
        page_size = state.group.page_size
        pages = table.pages[slot, start // page_size : -(-(start + num) // page_size)].copy()
        generations = state.pages_of(slot).pool.generations[pages].copy()
        self.sent[sequence] = start + num
        self._wanted.append(
            Handover(
                target=target,
                rank=table.rank_of(slot),
                first_token=start,
                num_tokens=num,
                pages=pages,
                generations=generations,
                held=None,
                state=state,
            )
        )
        self.num_chunks += 1

    def _give_up(self, sequence: Sequence) -> None:
        if self.sent.pop(sequence, None) is not None and sequence.submission.send_kv_to is not None:
            self._given_up.append(sequence.submission.send_kv_to)

    def _hand_over(self, state: EpochState, sequence: Sequence) -> None:
        target, rank = sequence.submission.send_kv_to, state.table.rank_of(sequence.slot)
        pages = state.ranks[rank]
        assert target is not None
        ids, page_size = sequence.token_ids()[: target.end], state.group.page_size
        is_same = _is_meant(target, sequence)
        # Behind the end of the request its full pages are the cache's.
        namespace = pages.namespace_of(sequence)
        self._finish(sequence, SequenceEnd(FinishReason.HANDED_OVER))
        match = pages.cache.match(namespace, ids)
        if not is_same or len(match.pages) * page_size < target.end:
            # The decode side computes it: nothing arrives there in time.
            log.warning("kv_not_handed_over", transfer=target.transfer_id, is_same=is_same, pages=len(match.pages))
            self._give_up(sequence)
            return
        pages.cache.lock(match)
        start = self.sent.pop(sequence, target.first_token)
        rest = match.pages[start // page_size :]
        self._wanted.append(
            Handover(
                target=target,
                rank=rank,
                first_token=start,
                num_tokens=target.end - start,
                pages=rest,
                generations=pages.pool.generations[rest].copy(),
                held=match,
                state=state,
            )
        )
        self.num_started += 1
        self.num_chunks += 1


def _is_meant(target: KvTarget, sequence: Sequence) -> bool:
    """True for the tokens, and the cache, that the target was reserved for."""
    return digest_of(sequence.cache_name, sequence.token_ids()[: target.end]) == target.tokens_digest
