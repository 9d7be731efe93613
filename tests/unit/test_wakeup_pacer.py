"""The pacer of wake-ups: in order, 32 at once, and room for other work between two rounds."""

from __future__ import annotations

import asyncio

from radixmesh.daemons.router.requests import wakeup_pacer
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer


async def rounds_of(num: int, pacer: WakeupPacer | None = None) -> list[list[int]]:
    """Calls of one iteration of the event loop each."""
    pacer = pacer or WakeupPacer()
    rounds: list[list[int]] = []
    order: list[int] = []
    for number in range(num):
        pacer.enter(lambda number=number: order.append(number))
    assert order == [], "nobody is called before the loop runs"
    async with asyncio.timeout(60):
        while sum(map(len, rounds)) < num:
            await asyncio.sleep(0)
            if order:
                rounds.append(order.copy())
                order.clear()
    return rounds


async def test_a_round_takes_so_many_and_the_others_follow_in_order() -> None:
    most = wakeup_pacer.PER_TURN
    assert await rounds_of(1) == [[0]]
    assert await rounds_of(most) == [list(range(most))], "up to a round, nobody is delayed"
    rounds = await rounds_of(2 * most + 1)
    assert [len(one) for one in rounds] == [most, most, 1]
    assert [number for one in rounds for number in one] == list(range(2 * most + 1))


async def test_it_begins_again_after_it_was_empty() -> None:
    pacer = WakeupPacer()
    for _ in range(3):
        assert await rounds_of(2, pacer) == [[0, 1]]


async def test_who_enters_within_a_call_waits_for_the_next_round() -> None:
    pacer, order = WakeupPacer(), []

    def first() -> None:
        order.append("first")
        pacer.enter(lambda: order.append("behind it"))

    pacer.enter(first)
    pacer.enter(lambda: order.append("second"))
    async with asyncio.timeout(60):
        while len(order) < 3:
            await asyncio.sleep(0)
    assert order == ["first", "second", "behind it"]
