"""Moves of running outputs between schedulers: a resume of each whose former attempt ends by plan.

The former scheduler is told to end the attempt, and whatever it still sends has no handle any more; the next one gets
the prompt and the ids that the journal has, as a higher attempt. So rows of two attempts never mix, and the output is
token for token what it would have been. Outputs of one request that are on one scheduler move together: they share the
KV of their prompt.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.move_gain import MovableOutputs, gain_of, is_uneven, remaining_of
from radixmesh.daemons.router.requests.journal import MAX_ATTEMPT_NO, Output, OutputState, Request
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool

log = get_logger(__name__)

# As often as loads come: in between there is little new to know.
_EVEN_OUT_S = 0.5
# Requests whose move is estimated at one look, those that are cheapest to prefill: each takes some 50 us.
_MOST_ESTIMATED = 32
# An output stays that long at least where it was placed, and is moved for evenness so often at most.
_LEAST_STAY_S = 1.0
_MOST_MOVES = 8
# Each move begins anew at the end of a queue: one that has brought no token is followed by one more at most. With all
# eight in a row a client could wait for eight queues.
_MOST_BARREN_MOVES = 2


class OutputMoves:
    """Of the outputs on one router's schedulers.

    leave_after_s: how long a group may not serve before its outputs leave for one that does. evens_out: whether outputs
    leave an overloaded scheduler where that saves more than it costs. on_moved: told why, and how many.
    """

    def __init__(
        self,
        pool: SchedulerPool,
        placement: LinkPlacement,
        *,
        leave_after_s: float,
        evens_out: bool = True,
        on_moved: Callable[[str, int], None] = lambda reason, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._leave_after_s = leave_after_s
        self._evens_out = evens_out
        self._on_moved = on_moved
        self._clock = clock
        self._evened_out = 0.0

    def tick(self, now: float) -> None:
        """Call every 0.1 s or so."""
        for link in self._pool.links:
            if link.is_connected and link.num_running and (reason := self._why_leave(link, now)):
                self._leave(link, reason)
        if self._evens_out and now - self._evened_out > _EVEN_OUT_S:
            self._evened_out = now
            self._even_out(now)

    def leave(self, link: SchedulerLink) -> int:
        """From now on outputs go on elsewhere as soon as another scheduler can take them; how many did at once."""
        link.is_draining = link.is_left = True
        return self._leave(link, "drain")

    def move(
        self, links: Iterable[SchedulerLink], *, to: SchedulerLink | None, request_id: str = "", most: int = 0
    ) -> int:
        """Moves outputs that are on links: of one request or of all, to one scheduler or where the policy places them.

        most: so many at most, 0 = all; requests are not split for it. Returns how many have moved; those that no
        other scheduler can take stay. Raises INVALID_ARGUMENT for `to` that takes nothing now.
        """
        if to is not None and not to.takes_submits:
            message = f"{to.address} takes no outputs now: choose another, or none and let the policy choose"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "to_address"})
        num = 0
        for link in tuple(links):
            for outputs in _movable(link.outputs()):
                if request_id not in ("", outputs[0].request.request_id) or link is to:
                    continue
                if most and num + len(outputs) > most:
                    return num
                num += self._move(link, outputs, "operator", to)
        return num

    def _why_leave(self, link: SchedulerLink, now: float) -> str:
        if link.is_left or link.load.is_leaving:
            return "drain"
        is_standby = link.load.group == scheduler_pb2.GROUP_STATE_STANDBY
        is_late = now - link.group_since >= self._leave_after_s
        return "group" if not link.is_group_serving and (is_standby or is_late) else ""

    def _leave(self, link: SchedulerLink, reason: str) -> int:
        return sum(self._move(link, outputs, reason) for outputs in _movable(link.outputs()))

    def _move(
        self, link: SchedulerLink, outputs: Sequence[Output], reason: str, to: SchedulerLink | None = None
    ) -> int:
        """Moves outputs of one request to `to`, or to the best of those that serve; how many: none or all."""
        now = self._clock()
        links = [other for other in self._takers(outputs, now) if other is not link and to in (None, other)]
        if not links:
            return 0
        for output in outputs:
            self._pool.take_from(link, output)
        ways = set()
        for output in outputs:
            output.num_moves += 1
            output.num_barren_moves = 1 + (0 if len(output.ids) > output.num_submitted else output.num_barren_moves)
            ways.add(self._pool.place(output, links, source=link))
        self._on_moved(reason, len(outputs))
        log.info(
            "outputs_moved",
            request_id=outputs[0].request.request_id,
            reason=reason,
            count=len(outputs),
            source=link.address,
            target=outputs[0].scheduler.address if outputs[0].scheduler is not None else "",
            by=" and ".join(sorted(way.value for way in ways if way is not None)),
            output_tokens=sum(len(output.ids) for output in outputs),
        )
        return len(outputs)

    def _takers(self, outputs: Sequence[Output], now: float) -> list[SchedulerLink]:
        """Schedulers that serve and can take all of them."""
        table = self._pool.table
        links = [link for link in table.links(table.able(outputs[0]).tolist()) if link.is_group_serving]
        return [link for link in links if all(o.backoff_until.get(link.address, 0.0) <= now for o in outputs)]

    def _even_out(self, now: float) -> None:
        """Moves some outputs away from the scheduler that has most, if it has many more than another."""
        links = [link for link in self._pool.links if link.takes_submits and link.is_group_serving]
        if len(links) < 2:
            return
        states = {link: self._placement.state_of(link) for link in links}
        source = max(links, key=lambda link: states[link].weight)
        most, least = states[source], min(states.values(), key=lambda state: state.weight)
        mean = sum(state.weight for state in states.values()) / len(links)
        if not is_uneven(most, least, mean):
            return
        # Other routers may see the same, and what has moved shows in loads only later: no more than half the way.
        room = max(1, int((most.weight - least.weight) / (most.slowness + least.slowness) / 2))
        groups = [outputs for outputs in _movable(source.outputs()) if _may_move(outputs, now)]
        for outputs in heapq.nsmallest(_MOST_ESTIMATED, groups, key=_num_tokens):
            if room <= 0:
                return
            takers = [link for link in self._takers(outputs, now) if link is not source and link in states]
            if len(outputs) > room or not takers:
                continue
            target = min(takers, key=lambda link: self._placement.state_of(link).weight)
            here, there = self._placement.state_of(source), self._placement.state_of(target)
            if not is_uneven(here, there, mean):
                continue
            if gain_of(self._movable_of(outputs, source, target), here, there) > 0:
                room -= self._move(source, outputs, "overload", target)

    def _movable_of(self, outputs: Sequence[Output], source: SchedulerLink, target: SchedulerLink) -> MovableOutputs:
        first = outputs[0]
        num_prompt, num_ids = first.request.num_prompt, sum(len(output.ids) for output in outputs)
        matched = self._placement.matched_tokens(first, target)
        is_waiting = all(source.is_without_tokens(output) for output in outputs)
        uncached_here = num_prompt - self._placement.matched_tokens(first, source) if is_waiting else 0
        return MovableOutputs(
            num_outputs=len(outputs),
            num_tokens=num_prompt + max(len(output.ids) for output in outputs),
            remaining=sum(map(_remaining, outputs)),
            uncached_here=max(0, uncached_here),
            uncached_there=max(1, num_prompt + num_ids - matched),
        )


def _movable(outputs: Iterable[Output]) -> list[list[Output]]:
    """Outputs that run, by request."""
    groups: dict[Request, list[Output]] = {}
    for output in outputs:
        if output.state is OutputState.RUNNING and output.attempt_no < MAX_ATTEMPT_NO:
            groups.setdefault(output.request, []).append(output)
    return list(groups.values())


def _may_move(outputs: Sequence[Output], now: float) -> bool:
    return all(
        now - output.state_since > _LEAST_STAY_S
        and output.num_moves < _MOST_MOVES
        and (output.num_barren_moves < _MOST_BARREN_MOVES or len(output.ids) > output.num_submitted)
        for output in outputs
    )


def _remaining(output: Output) -> int:
    stop = output.request.resolved.stop
    ends_early = not stop.ignore_eos or bool(stop.stop or stop.stop_ids)
    return remaining_of(len(output.ids), output.request.max_tokens, ends_early=ends_early)


def _num_tokens(outputs: Sequence[Output]) -> int:
    return outputs[0].request.num_prompt + sum(len(output.ids) for output in outputs)
