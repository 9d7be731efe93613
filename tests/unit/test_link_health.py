"""Schedulers in trouble are passed over, and come back bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from support.router_requests import change, new_request

from radixmesh.daemons.router.peers.schedulers.link_health import LinkHealth
from radixmesh.daemons.router.peers.schedulers.link_table import LinkTable
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.replicas import Replicas
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.router.served_identity import ServedIdentity


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_three_failures_within_half_a_minute_pass_a_scheduler_over_for_a_while_that_doubles() -> None:
    clock = Clock()
    health = LinkHealth(clock)
    assert health.state == "sound"
    assert [health.failed() for _ in range(3)] == [False, False, True]
    assert health.state == "passed over"
    clock.now += 2.1
    assert health.state == "slow start"
    assert [health.failed() for _ in range(3)] == [False, False, True]
    clock.now += 2.1
    assert health.state == "passed over"
    clock.now += 2.0
    assert health.state == "slow start"
    clock.now += 10.0
    assert health.state == "sound"


def test_failures_that_are_far_apart_trip_nothing() -> None:
    clock = Clock()
    health = LinkHealth(clock)
    for _ in range(20):
        assert not health.failed()
        clock.now += 16.0
    assert health.state == "sound"


def test_after_a_long_time_of_health_the_pause_is_short_again() -> None:
    clock = Clock()
    health = LinkHealth(clock)
    for _ in range(12):
        health.failed()
    clock.now += 1000.0
    for _ in range(3):
        health.failed()
    clock.now += 2.1
    assert not health.is_passed_over


class FakeLink(SimpleNamespace):
    __hash__ = object.__hash__


def links(clock: Clock, *num_running: int) -> list[SchedulerLink]:
    def link(number: int, count: int) -> object:
        return FakeLink(
            address=f"s{number}",
            health=LinkHealth(clock),
            num_running=count,
            is_connected=True,
            role=0,
            takes_submits=True,
            identity=ServedIdentity(name="m"),
            adapters=(),
            is_group_serving=True,
            max_request_len=1000,
            max_total_len=1000,
            serves=lambda model, identity: True,
        )

    return [cast("SchedulerLink", link(number, count)) for number, count in enumerate(num_running)]


def chosen(among: list[SchedulerLink], clock: Clock) -> list[str]:
    request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()))
    change(request, model_identity=ServedIdentity(name="m"))
    replicas = Replicas()
    table = LinkTable(replicas, clock)
    for link in among:
        row = replicas.add(link.address)
        table.add(row, link)
        for sequence in range(link.num_running):
            replicas.take_sent(row, sequence + 1, 0, 0)
    return [link.address for link in table.links(table.able(request.outputs[0]).tolist())]


def test_one_in_trouble_gets_outputs_only_where_there_is_no_other() -> None:
    clock = Clock()
    first, second = links(clock, 0, 5)
    for _ in range(3):
        first.health.failed()
    assert chosen([first, second], clock) == ["s1"]
    assert chosen([first], clock) == ["s0"]
    for _ in range(3):
        second.health.failed()
    assert chosen([first, second], clock) == ["s0", "s1"]


def test_one_that_comes_back_gets_its_share_bit_by_bit() -> None:
    clock = Clock()
    back, other = links(clock, 0, 40)
    back.health.came_back()
    assert chosen([back, other], clock) == ["s0", "s1"], "the first one"
    back.num_running = 3  # type: ignore[misc]
    assert chosen([back, other], clock) == ["s1"]
    clock.now += 5.0
    assert chosen([back, other], clock) == ["s0", "s1"], "half of the mean of 21, and one"
    back.num_running = 15  # type: ignore[misc]
    assert chosen([back, other], clock) == ["s1"]
    clock.now += 5.0
    assert chosen([back, other], clock) == ["s0", "s1"]
