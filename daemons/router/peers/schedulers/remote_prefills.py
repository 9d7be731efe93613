"""Prompts that one scheduler computes for an output that runs at another, which gets their KV.

begin --> RESERVING --the decode side has a place--> PREFILLING --handed over--> SENDING --second token, or left--> gone
              |                                          |
              +----- no place, or nothing to send -------+--- lost, rejected --> gone: the decode side is told

Where no other output waits for a place at the decode side, the prompt is submitted while the place is made, and its
target follows: to make one takes two calls, for which the prefill does not wait then. One that gets no place has begun
for nothing, and is ended.

An output that moves from a scheduler which lives is such a prompt as well, with the ids that it has: its former
scheduler finds their KV in its cache, and sends it, where that was measured to be cheaper than to compute them anew.

The output is at its decode side from the start, and waits there. The prefill's first token is the output's: as it comes
it goes to the client, and to the decode side with a new attempt, which begins with the second. That the prefill is over
comes some milliseconds later, when its scheduler has settled the step; a token with which the output ends, and one
whose logprobs are not there, wait for that. Whatever happens to its prefill, that side computes the prompt itself: at
once when it is told so here, otherwise when nothing has come for some seconds.
So nothing of an output's life depends on any of this, and nothing is kept for it beyond the table here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.submit import reservation_of
from radixmesh.daemons.router.placement.move_costs import MoveCosts, MoveWay
from radixmesh.daemons.router.requests.journal import MAX_ATTEMPT_NO, Output, OutputState
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.scheduler.v1 import scheduler_pb2

log = get_logger(__name__)

# Renewed every second: the decode side takes three seconds without news for the end of a prefill.
_LEASE_MS = 15_000
_RENEW_S = 1.0
_TELL_AGAIN_S = 60.0
# Far beyond what a router's outputs need at a time; more run in place.
_MOST = 4096


@dataclass(slots=True, eq=False)
class _Prefill:
    output: Output
    decode: SchedulerLink
    prefill: SchedulerLink
    num_tokens: int
    """To be computed."""
    since: float
    is_move: bool = False
    """From where it ran."""
    is_ahead: bool = False
    """It was submitted before there was a place."""
    is_begun: bool = False
    """It was submitted, and there is a place."""
    is_sending: bool = False


class RemotePrefills:
    """By transfer id. least_tokens: shorter prompts, or those of which less is not cached, run in place. timeout_s: a
    prefill that takes longer, its wait in the queue included, is given up. clock: monotonic seconds."""

    def __init__(
        self,
        placement: LinkPlacement,
        *,
        least_tokens: int,
        timeout_s: float = 60.0,
        costs: MoveCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._least_tokens = max(1, least_tokens)
        self._timeout_s = timeout_s
        self._clock = clock
        self.costs = costs or MoveCosts(clock)
        self._prefills: dict[str, _Prefill] = {}
        self._renewed = 0.0
        self._tell_again_at = 0.0
        self.num_handed_over = self.num_in_place = self.num_moved = 0

    def __len__(self) -> int:
        return len(self._prefills)

    def begin(self, output: Output, decode: SchedulerLink) -> None:
        """An output is about to be submitted to `decode`: reserves a place for its KV there, if that is worth it."""
        output.transfer_id = ""
        request = output.request
        if decode.role == scheduler_pb2.SCHEDULER_ROLE_PREFILL:
            self._tell_why_whole(output)
            return
        if decode.role != scheduler_pb2.SCHEDULER_ROLE_DECODE or output.ids or request.resolved.is_pooled:
            return
        if output.index:
            # The outputs of a request share the KV of its prompt: they wait for that of the first.
            first = self._prefills.get(request.outputs[0].transfer_id)
            if first is not None and first.decode is decode:
                output.transfer_id = request.outputs[0].transfer_id
            return
        # Prompt logprobs come from computing the prompt.
        if request.are_prompt_logprobs_due or len(self._prefills) >= _MOST:
            return
        if request.num_prompt < self._least_tokens:
            return
        if request.num_prompt - self._placement.matched_tokens(output, decode) < self._least_tokens:
            return
        best = self._cheapest(output, self._placement.table.prefilling(output), decode)
        if best is None:
            return
        uncached = request.num_prompt - self._placement.matched_tokens(output, best)
        self._reserve(output, decode, best, uncached)

    def _tell_why_whole(self, output: Output) -> None:
        """Says now and then that a prefill group decodes, since no decode group holds requests of that length."""
        room, needed = self._placement.table.decode_room(output.request), output.request.max_total_len
        if 0 < room < needed and self._clock() >= self._tell_again_at:
            self._tell_again_at = self._clock() + _TELL_AGAIN_S
            log.warning("decode_groups_too_small", tokens=needed, most=room, advice="raise --num-pages there")

    def begin_move(self, output: Output, source: SchedulerLink, target: SchedulerLink) -> MoveWay:
        """An output is about to be submitted to `target`, and was at `source` until now: reserves a place for its KV
        there, if that is cheaper than a prefill. The way that it takes."""
        output.transfer_id = ""
        uncached = self.num_lacking(output, target)
        if not self._can_move_kv(output, source, target) or uncached < self._least_tokens:
            return MoveWay.PREFILL
        for sibling in output.request.outputs:
            # They share the KV of their prompt, and wait for that of the first.
            first = self._prefills.get(sibling.transfer_id)
            if sibling is not output and first is not None and first.decode is target:
                output.transfer_id = sibling.transfer_id
                return MoveWay.KV
        if self.costs.choose(uncached) is MoveWay.PREFILL:
            return MoveWay.PREFILL
        # Its tokens are in the cache there, but for the last page.
        self._reserve(output, target, source, max(1, source.page_size), is_move=True)
        self.num_moved += 1
        return MoveWay.KV

    def num_lacking(self, output: Output, target: SchedulerLink) -> int:
        """Tokens of prompt and output so far that are not cached there."""
        return max(0, output.request.num_prompt + len(output.ids) - self._placement.matched_tokens(output, target))

    def _can_move_kv(self, output: Output, source: SchedulerLink, target: SchedulerLink) -> bool:
        request = output.request
        is_there = source.is_connected and source.is_group_serving and bool(source.kv_heads)
        is_there &= not (source.load.is_leaving or source.load.is_draining)
        takes_it = target.role == scheduler_pb2.SCHEDULER_ROLE_DECODE and output.attempt_no + 2 < MAX_ATTEMPT_NO
        is_simple = not request.resolved.is_pooled and not request.are_prompt_logprobs_due
        return is_there and takes_it and is_simple and len(self._prefills) < _MOST

    def _reserve(
        self, output: Output, decode: SchedulerLink, prefill: SchedulerLink, num_tokens: int, *, is_move: bool = False
    ) -> None:
        transfer_id = secrets.token_hex(12)
        self._prefills[transfer_id] = _Prefill(output, decode, prefill, num_tokens, self._clock(), is_move)
        output.transfer_id = transfer_id
        decode.reserve(reservation_of(output, transfer_id, _LEASE_MS, prefill.page_size, prefill.kv_heads))

    def submitted(self, output: Output) -> None:
        """The output is at its decode side now: its prefill begins, where there will likely be a place for its KV."""
        found = self._prefills.get(output.transfer_id)
        if found is None or found.output is not output or found.is_move or found.is_begun:
            return
        # One that waits longer than a call takes has no room, nor have those behind it.
        others = (prefill for prefill in self._prefills.values() if prefill is not found and not prefill.is_begun)
        if any(other.decode is found.decode for other in others):
            return
        if found.prefill.takes_kv_targets and found.prefill.is_group_serving:
            found.is_ahead = True
            bare = scheduler_pb2.TransferTarget(transfer_id=output.transfer_id)
            found.prefill.prefill(output, output.transfer_id, bare)

    def answered(self, decode: SchedulerLink, result: scheduler_pb2.ReservationResult) -> None:
        """The decode side has a place, or none."""
        found = self._prefills.get(result.transfer_id)
        if found is None or found.decode is not decode or found.is_begun:
            return
        if not found.prefill.is_group_serving and not (found.is_move or found.is_ahead):
            found.prefill = self._other_than(found)
        if not result.HasField("target") or not found.prefill.is_group_serving:
            if result.HasField("error"):
                log.info("prefill_in_place", transfer=result.transfer_id, error=result.error.message)
            self._cancel(found)
            self._give_up(result.transfer_id, found, is_known=result.HasField("target"))
            return
        found.is_begun = True
        if found.is_ahead:
            found.prefill.send_target(result.target)
        else:
            found.prefill.prefill(found.output, result.transfer_id, result.target)

    def token_came(self, prompt: RemotePrompt) -> bool:
        """The prefill has brought a token, ahead of its end. True: it is the output's, which goes on behind it."""
        found = self._prefills.get(prompt.transfer_id)
        if found is None or prompt.is_given or prompt.is_ending or not self._give(found, prompt):
            return False
        self._go_on(found)
        return True

    def over(self, prompt: RemotePrompt, *, is_handed_over: bool) -> bool:
        """The prefill is done, or will not be. True: its first token is the output's, which goes on behind it, and
        token_came() has not said so."""
        transfer_id, output = prompt.transfer_id, prompt.output
        found = self._prefills.get(transfer_id)
        if found is None:
            return False
        is_given = not prompt.is_given and self._give(found, prompt)
        is_ended = is_given and output.known_ending is not None
        if is_handed_over:
            self.num_handed_over += 1
            found.is_sending = True
        elif not is_ended:
            self._give_up(transfer_id, found, is_known=True)
        if is_given and not is_ended:
            self._go_on(found)
        return is_given

    def _give(self, found: _Prefill, prompt: RemotePrompt) -> bool:
        """Appends a prompt's tokens to the journal's. False: a token of the decode side's own is as good, and there,
        since it has given up the transfer, or none is wanted any more."""
        output = prompt.output
        is_wanted = found.decode.is_connected and found.decode.is_without_tokens(output)
        is_wanted &= output.state is OutputState.RUNNING and output.attempt_no < MAX_ATTEMPT_NO
        return is_wanted and prompt.give()

    def _go_on(self, found: _Prefill) -> None:
        """The decode side may have begun by itself, and gone on with another token: it gets a new attempt."""
        former = found.decode.submit_again(found.output)
        self.costs.again(found.decode, former, found.decode.last_sequence)
        self._placement.on_left(found.decode, former)
        self._placement.take_sent(found.decode, None)

    def end(self, output: Output) -> None:
        """The output is not at its scheduler any more, or has its first token."""
        transfer_id, output.transfer_id = output.transfer_id, ""
        found = self._prefills.get(transfer_id)
        if found is None or found.output is not output:
            return
        del self._prefills[transfer_id]
        if found.decode.is_connected:
            found.decode.reserve(scheduler_pb2.Reservation(transfer_id=transfer_id, is_cancelled=True))
        self._cancel(found)

    def tick(self, now: float) -> None:
        """Gives up prefills whose group is lost or that take too long, and renews the leases of those that go on, of
        all at one scheduler by one frame. Call every 0.1 s or so."""
        for transfer_id, found in tuple(self._prefills.items()):
            if found.is_sending:
                continue
            is_late = now - found.since >= self._timeout_s
            # A prompt that waits for room may go elsewhere when that is there; KV of a move is nowhere else.
            is_lost = not found.prefill.is_group_serving and (found.is_begun or found.is_ahead or found.is_move)
            if is_late or is_lost:
                # A scheduler would begin anew with its next worker: that takes longer to load than any prompt.
                self._cancel(found)
                self._give_up(transfer_id, found, is_known=True)
        if not self._prefills or now - self._renewed < _RENEW_S:
            return
        self._renewed = now
        for transfer_id, found in tuple(self._prefills.items()):
            if not found.decode.is_without_tokens(found.output):
                # It decodes: what has come is its own by now.
                del self._prefills[transfer_id]
            elif not found.is_sending:
                # Also while it waits for room there.
                found.decode.reserve(scheduler_pb2.Reservation(transfer_id=transfer_id, lease_ms=_LEASE_MS))

    def _cancel(self, found: _Prefill) -> None:
        """Ends the prefill where it runs."""
        output = found.output
        if (found.is_begun or found.is_ahead) and not found.is_sending and found.prefill.is_connected:
            found.prefill.cancel(output.request, below_attempt=output.attempt + 1, index=output.index)

    def _give_up(self, transfer_id: str, found: _Prefill, *, is_known: bool) -> None:
        """The decode side computes the prompt. is_known: it still waits for KV."""
        del self._prefills[transfer_id]
        self.num_in_place += 1
        if is_known and found.decode.is_connected:
            found.decode.reserve(scheduler_pb2.Reservation(transfer_id=transfer_id, is_cancelled=True))

    def _cheapest(self, output: Output, links: Iterable[SchedulerLink], decode: SchedulerLink) -> SchedulerLink | None:
        costs = {link: self._cost(output, link) for link in links if link is not decode}
        return min(costs, key=lambda link: costs[link]) if costs else None

    def _other_than(self, found: _Prefill) -> SchedulerLink:
        """A prefill side that sends to the place reserved for another; that one where there is none."""
        former = found.prefill
        links = [
            link
            for link in self._placement.table.prefilling(found.output)
            if link.is_group_serving and (link.page_size, link.kv_heads) == (former.page_size, former.kv_heads)
        ]
        return self._cheapest(found.output, links, found.decode) or former

    def _cost(self, output: Output, link: SchedulerLink) -> tuple[int, int]:
        """Tokens that are computed there before the prompt's last one, then requests."""
        own = sum(p.num_tokens for p in self._prefills.values() if p.prefill is link and not p.is_sending)
        uncached = output.request.num_prompt - self._placement.matched_tokens(output, link)
        return max(own, link.load.waiting_tokens) + uncached, link.load.num_running + link.num_prefills
