"""Ways of moves by their measured cost: what was measured decides, and is measured again."""

from __future__ import annotations

import pytest

from radixmesh.daemons.router.placement.move_costs import Line, MoveCosts, MoveWay

KV, PREFILL = MoveWay.KV, MoveWay.PREFILL


def test_a_line_is_found_again_and_what_is_old_fades() -> None:
    line = Line()
    assert line.at(10) is None
    for num in (100, 400, 200, 800):
        line.add(num, 0.5 + 0.001 * num)
    assert line.at(1000) == pytest.approx(1.5) and line.at(0) == pytest.approx(0.5)
    for num in (100, 400, 200, 800) * 50:
        line.add(num, 0.1 + 0.002 * num)
    assert line.at(1000) == pytest.approx(2.1, rel=1e-3)


def test_one_size_tells_no_slope_and_nothing_is_cheaper_than_nothing() -> None:
    line = Line()
    line.add(100, 0.3)
    line.add(101, 0.1)
    assert line.at(1000) == pytest.approx(2.0, rel=0.1)
    line = Line()
    for num in (100, 1000):
        line.add(num, 0.001 * (num - 100))
    assert line.at(0) == 0.0


class World:
    """Moves whose cost is known."""

    def __init__(self) -> None:
        self.now, self.number = 0.0, 0
        self.costs = MoveCosts(lambda: self.now)

    def move(self, num_tokens: int, seconds: dict[MoveWay, float]) -> MoveWay:
        way = self.costs.choose(num_tokens)
        self.number += 1
        self.costs.begin("link", self.number, way, num_tokens)
        self.now += seconds[way]
        self.costs.first_token("link", self.number)
        return way


def test_both_ways_are_tried_and_the_cheaper_one_is_taken() -> None:
    world = World()
    assert [world.move(500, {KV: 0.01, PREFILL: 0.1}) for _ in range(2)] == [KV, PREFILL]
    ways = [world.move(500, {KV: 0.01, PREFILL: 0.1}) for _ in range(64)]
    assert ways.count(PREFILL) == 4, "now and then, so that its figure is of today"
    ways = [world.move(500, {KV: 0.5, PREFILL: 0.1}) for _ in range(64)]
    assert ways[-15:].count(KV) <= 1, "the network is slow now"


def test_short_ones_are_computed_and_long_ones_sent() -> None:
    world = World()
    seconds = lambda num: {KV: 0.05 + 1e-6 * num, PREFILL: 1e-4 * num}  # noqa: E731
    for num in (100, 4000) * 40:
        world.move(num, seconds(num))
    world.costs.num_chosen = 0
    assert [world.costs.choose(num) for num in (100, 4000)] == [PREFILL, KV]
    assert world.costs.seconds(KV, 4000) == pytest.approx(0.054, rel=0.05)


def test_an_output_that_leaves_is_not_measured_and_one_that_is_submitted_again_goes_on() -> None:
    world = World()
    world.costs.begin("link", 1, KV, 100)
    world.costs.left("link", 1)
    world.costs.first_token("link", 1)
    assert world.costs.seconds(KV, 100) is None
    world.costs.begin("link", 2, KV, 100)
    world.now += 1.0
    world.costs.again("link", 2, 3)
    world.costs.first_token("link", 2)
    world.now += 1.0
    world.costs.first_token("link", 3)
    assert world.costs.seconds(KV, 100) == pytest.approx(2.0)
