"""Moves for evenness: how often one output may be moved, and how a client's wait is bounded by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from support.router_requests import new_request

from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.output_moves import OutputMoves
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.placement.move_costs import MoveWay
from radixmesh.daemons.router.placement.move_gain import ReplicaState
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output, OutputState
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer


class Link:
    is_group_serving = takes_submits = is_connected = True
    is_left = False
    num_running = 0

    def __init__(self, address: str) -> None:
        self.address = address
        self.here: list[Output] = []

    def outputs(self) -> list[Output]:
        return list(self.here)

    def is_without_tokens(self, output: Output) -> bool:
        return len(output.ids) == output.num_submitted


class Replicas:
    """Pool, table and placement of three schedulers. Where the output is, everyone is: it always pays to leave."""

    def __init__(self, output: Output) -> None:
        self.links = tuple(Link(address) for address in "abc")
        self.output = output
        self.now = 0.0
        self.num_placed = 0
        output.request.clock = lambda: self.now
        self.place(output, self.links)

    def able(self, output: Output) -> np.ndarray:
        return np.arange(len(self.links))

    def links_of(self, rows: Sequence[int]) -> list[Link]:
        return [self.links[row] for row in rows]

    def state_of(self, link: Link) -> ReplicaState:
        is_here = self.output in link.here
        return ReplicaState(num_outputs=40 if is_here else 4, queued_tokens=20_000 if is_here else 0)

    def matched_tokens(self, output: Output, link: Link) -> int:
        return 0

    def take_from(self, link: Link, output: Output) -> None:
        link.here.remove(output)

    def place(self, output: Output, among: Sequence[Link], *, source: Link | None = None) -> MoveWay:
        self.num_placed += 1
        among[0].here.append(output)
        output.num_submitted = len(output.ids)
        output.scheduler = cast("SchedulerLink", among[0])
        output.move_to(OutputState.RUNNING)
        return MoveWay.PREFILL


class Table:
    def __init__(self, replicas: Replicas) -> None:
        self.able, self.links = replicas.able, replicas.links_of


class Pool:
    def __init__(self, replicas: Replicas) -> None:
        self.links, self.table = replicas.links, Table(replicas)
        self.take_from, self.place = replicas.take_from, replicas.place


def test_an_output_that_got_no_token_is_moved_for_evenness_twice_and_then_waits_where_it_is() -> None:
    (output,) = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=1000).outputs
    replicas = Replicas(output)
    moves = OutputMoves(
        cast("SchedulerPool", Pool(replicas)),
        cast("LinkPlacement", replicas),
        leave_after_s=1.0,
        clock=lambda: replicas.now,
    )

    def pass_time(seconds: float) -> int:
        before = output.num_moves
        for _ in range(int(10 * seconds)):
            replicas.now += 0.1
            moves.tick(replicas.now)
        return output.num_moves - before

    assert pass_time(60) == 2, "each move puts it at the end of a queue"
    output.ids.extend([7, 8])
    assert pass_time(60) == 2, "it has gone on: it may move as any other"
    for _ in range(20):
        output.ids.append(9)
        pass_time(2)
    assert output.num_moves == 8
