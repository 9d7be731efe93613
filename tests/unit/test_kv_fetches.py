"""Requests that wait for KV from the workers' store: who asks, and for how long."""

from __future__ import annotations

from dataclasses import replace

from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Stop

PROMPT = [2 + i % 60 for i in range(80)]


def make_world() -> World:
    """A store is there, of which the test tells what it has. A step takes one prompt."""
    world = World(eos_rate=0.0, num_pages=2400, num_host_pages=400, num_slots=12, max_tokens_per_step=256,
                  chunk_tokens=256)  # fmt: skip
    world.group = replace(world.group, has_kv_store=True)
    world.begin_epoch()
    return world


def answer(world: World, num_pages: int = 0) -> int:
    """Answers all fetches that are wanted; how many there were."""
    state, wanted = world.planner.state, world.planner.fetches.take_wanted()
    assert state is not None
    for fetch in wanted:
        world.planner.fetches.fetched(state, fetch, num_pages)
    return len(wanted)


def test_those_who_wait_for_one_fetch_do_not_ask_again_for_what_the_store_lacks() -> None:
    world = make_world()
    records = [world.submit([*PROMPT, 2 + i], stop=Stop(max_tokens=2)) for i in range(6)]
    assert not world.plan(), "all wait for the first one's fetch"
    assert answer(world) == 1
    world.run()
    assert not world.planner.fetches.take_wanted()
    assert all(record.tokens == world.expected(record.submission) for record in records)
    world.check_clean()


def test_who_shares_no_more_than_came_asks_for_its_own_rest() -> None:
    world = make_world()
    world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.submit([*PROMPT[:40], *([7, 9] * 40)], stop=Stop(max_tokens=2))
    assert not world.plan()
    (first,) = world.planner.fetches.take_wanted()
    assert len(first.sequences) == 2 and world.planner.state is not None
    # Its 40 tokens are there, and what the store lacks is the other's.
    world.planner.fetches.fetched(world.planner.state, first, 50)
    world.plan()
    (second,) = world.planner.fetches.take_wanted()
    assert len(second.held.pages) == 40 and len(second.ids) == 119
