"""Outputs whose prompt is computed here and which go on elsewhere: the prefill side of transfers. Pure, no I/O.

A request with a target runs as any other until its first token is there. Then it ends here, and the pages of its prompt
stay locked in the prefix cache until the worker has gathered them.
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
    """KV to be sent. pages: of the target's tokens, int32, from the one on that holds the first of them."""

    target: KvTarget
    pages: IntArray
    generations: IntArray
    held: Match
    state: EpochState


class KvHandovers:
    """Of one planner. finish: ends a live request."""

    def __init__(self, finish: Callable[[Sequence, SequenceEnd], None]) -> None:
        self._finish = finish
        self._running: list[Sequence] = []
        self._wanted: list[Handover] = []
        self.num_started = 0

    def begin_epoch(self) -> None:
        """Requests in slots wait again; locks of the epoch before are void."""
        self._running.clear()
        self._wanted.clear()

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
                continue
            state.settle(sequence)
            self._hand_over(state, sequence)

    def take_wanted(self) -> list[Handover]:
        """KV to be sent; each is told once, and to be released()."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def released(self, handover: Handover, current: EpochState | None) -> None:
        """Its pages are gathered, or will not be."""
        if current is handover.state:
            current.pages.cache.unlock(handover.held)

    def _hand_over(self, state: EpochState, sequence: Sequence) -> None:
        target, pages = sequence.submission.send_kv_to, state.pages_of(sequence.slot)
        assert target is not None
        ids, page_size = sequence.token_ids()[: target.end], state.group.page_size
        is_same = digest_of(sequence.cache_name, ids) == target.tokens_digest
        # Behind the end of the request its full pages are the cache's.
        namespace = pages.namespace_of(sequence)
        self._finish(sequence, SequenceEnd(FinishReason.HANDED_OVER))
        match = pages.cache.match(namespace, ids)
        if not is_same or len(match.pages) * page_size < target.end:
            # The decode side computes it: nothing arrives there in time.
            log.warning("kv_not_handed_over", transfer=target.transfer_id, is_same=is_same, pages=len(match.pages))
            return
        pages.cache.lock(match)
        sent = match.pages[target.first_token // page_size :]
        self._wanted.append(
            Handover(
                target=target, pages=sent, generations=pages.pool.generations[sent].copy(), held=match, state=state
            )
        )
        self.num_started += 1
