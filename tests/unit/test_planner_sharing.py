"""Sharing while running: who needs a prefix that another just computes waits for it."""

from __future__ import annotations

import numpy as np
import pytest
from support.planner_world import Record, World

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.sequence import Lifecycle

SYSTEM = [2 + (7 * i) % 61 for i in range(48)]


def check(world: World, records: list[Record]) -> None:
    for record in records:
        assert record.tokens == world.expected(record.submission)
    assert world.planner.queue.num_waiting_for_prefix == 0
    world.check_clean()


@pytest.mark.parametrize("cache", ["radix", "trie"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 64])
@pytest.mark.parametrize("depth", [0, 2])
def test_n_outputs_of_a_prompt_compute_it_once(cache: str, page_size: int, chunk_tokens: int, depth: int) -> None:
    world = World(cache=cache, page_size=page_size, num_pages=512 // page_size, chunk_tokens=chunk_tokens)
    records = [world.submit(SYSTEM, sampling=Sampling(temperature=1.0, seed=i)) for i in range(4)]
    world.run(depth)
    check(world, records)
    counters = world.planner.counters
    # The last token of each is computed; with larger pages, what the last whole page before it leaves.
    rest = len(SYSTEM) - (len(SYSTEM) - 1) // page_size * page_size
    assert counters.prefilled_tokens == len(SYSTEM) + 3 * rest
    assert counters.num_prefix_deduplications == 3


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_a_burst_behind_one_system_prompt_waits_for_no_more_than_that(chunk_tokens: int) -> None:
    world = World(num_pages=1024, chunk_tokens=chunk_tokens, max_tokens_per_step=64, num_slots=12)
    own = [[2 + (5 * i + 3 * j) % 59 for j in range(40)] for i in range(8)]
    records = [world.submit(SYSTEM + own[i]) for i in range(8)]
    first_shared = None
    for step in range(200):
        world.plan()
        world.execute()
        world.process()
        state = world.planner.state
        assert state is not None
        if first_shared is None and world.planner.queue.num_waiting_for_prefix == 0 and step > 0:
            first_shared = step
            leader = state.table.sequences[0]
            if chunk_tokens == 8:
                assert leader is not None and leader.lifecycle is Lifecycle.RUNNING
                assert state.table.computed_len[0] < len(SYSTEM) + 40, "held only for what they have in common"
    world.run()
    check(world, records)
    assert world.planner.counters.prefilled_tokens <= len(SYSTEM) + 8 * 40 + 16


@pytest.mark.parametrize("way", ["goes on", "aborted", "stopped", "epoch"])
def test_a_prompt_whose_first_token_was_taken_is_found_once_the_result_is_settled(way: str) -> None:
    """Whatever happens between the two."""
    world = World(chunk_tokens=64, max_tokens_per_step=64, num_pages=512, eos_rate=0.0)
    record = world.submit(SYSTEM, stop=Stop(max_tokens=6))
    world.plan()
    world.execute()
    world.planner.take_result(world.results.popleft())
    world.collect()
    assert len(record.tokens) == 1
    match way:
        case "aborted":
            world.planner.abort("r1")
        case "stopped":
            world.planner.finish_by_stop(record.submission.owner, record.submission.handle, 1)
        case "epoch":
            world.planner.end_epoch()
            world.begin_epoch()
    world.planner.settle_results()
    world.collect()
    state = world.planner.state
    assert state is not None and state.page_counts()[PageState.CACHED] == len(SYSTEM)
    later = world.submit(SYSTEM)
    world.run()
    if way in ("goes on", "epoch"):
        check(world, [record, later])
    else:
        check(world, [later])
    # All of the prompt was found but its last token, by the request of the new epoch too.
    assert world.planner.counters.prefilled_tokens == len(SYSTEM) + (2 if way == "epoch" else 1)


def test_leader_that_is_aborted_lets_go_and_the_next_one_leads() -> None:
    world = World(chunk_tokens=4, max_tokens_per_step=8, inflight_prefix_min_tokens=8)
    records = [world.submit(SYSTEM) for _ in range(4)]
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    assert world.planner.queue.num_waiting_for_prefix == 3
    world.planner.abort("r1")
    world.collect()
    world.run(2)
    check(world, records[1:])
    assert world.planner.counters.prefilled_tokens <= len(SYSTEM) + 2 + 4


def test_leader_that_is_retracted_lets_go() -> None:
    world = World(num_pages=72, chunk_tokens=4, max_tokens_per_step=7, decode_reserve_tokens=1, eos_rate=0.0)
    old = [world.submit([50 + i, 51, 52], stop=Stop(max_tokens=24)) for i in range(2)]
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    leader, *followers = [world.submit(SYSTEM, stop=Stop(max_tokens=4)) for _ in range(3)]
    counters = world.planner.counters
    while not counters.num_retracted:
        assert world.plan(), "memory sufficed"
        world.execute()
        world.process()
    # The old ones decode on; the leader, which came last, has given way in the middle of its prefill.
    assert world.planner.state is not None and world.planner.queue.num_waiting_for_prefix == len(followers) == 2
    assert [request.key.request_id for request in world.planner.state.table.running()] == ["r1", "r2"]
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 0, "nobody waits for a leader that waits itself"
    world.run(2)
    assert counters.num_retracted == 1
    check(world, [*old, leader, *followers])


def test_held_requests_can_be_aborted_expire_and_survive_an_epoch() -> None:
    world = World(chunk_tokens=4, max_tokens_per_step=8)
    leader, aborted, kept = (world.submit(SYSTEM) for _ in range(3))
    late = world.submit(SYSTEM, deadline_s=1.0)
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 3
    world.planner.abort("r2")
    world.now = 2.0
    world.run()
    assert aborted.finished is not None and not aborted.tokens
    assert late.finished is not None and late.finished.error is not None and not late.tokens
    check(world, [leader, kept])
    fresh = [world.submit([3, *SYSTEM]) for _ in range(3)]
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 2
    world.begin_epoch()
    assert world.planner.queue.num_waiting_for_prefix == 0
    world.run()
    check(world, fresh)


def test_other_prefixes_salts_and_short_prompts_wait_for_nobody() -> None:
    world = World(num_pages=1024, max_tokens_per_step=512, chunk_tokens=128)
    world.submit(SYSTEM, cache_salt="a")
    world.submit(SYSTEM, cache_salt="b")
    world.submit(SYSTEM[5:])
    world.submit(SYSTEM[5:25])
    world.submit(SYSTEM[5:25])
    world.submit(SYSTEM, sampling=Sampling(temperature=0.0, num_top_logprobs=0, prompt_logprobs=True))
    world.plan()
    assert world.planner.num_running == 6 and world.planner.counters.num_prefix_deduplications == 0


def test_many_held_are_bounded_and_cost_a_plan_little() -> None:
    world = World(num_pages=4096, num_slots=8, max_queue=4000, chunk_tokens=16, max_tokens_per_step=64)
    records = [world.submit(SYSTEM, stop=Stop(max_tokens=1)) for _ in range(300)]
    most = 0
    for _ in range(6):
        before = world.planner.counters.num_prefix_deduplications
        world.plan()
        assert world.planner.counters.num_prefix_deduplications - before <= 32
        most = max(most, world.planner.queue.num_waiting_for_prefix)
        world.execute()
        world.process()
    assert 0 < most <= 8, "no more than could run"
    world.run()
    check(world, records)
    assert world.planner.counters.prefilled_tokens <= len(SYSTEM) + 2 * 300


def test_a_resumed_output_is_found_by_one_that_continues_it() -> None:
    world = World(chunk_tokens=64, max_tokens_per_step=256)
    resumed = np.array(SYSTEM[:8], np.int32)
    records = [
        world.submit(SYSTEM, resumed_output_ids=resumed, stop=Stop(max_tokens=12), cache_salt="x") for _ in range(2)
    ]
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 1
    world.run()
    assert records[0].tokens == records[1].tokens
    assert world.planner.counters.prefilled_tokens == len(SYSTEM) + 8 + 1


def test_leader_that_is_gone_before_a_page_is_full_is_followed_by_another() -> None:
    world = World(page_size=16, num_pages=32, chunk_tokens=4, max_tokens_per_step=8)
    world.submit(SYSTEM)
    world.plan()
    world.planner.abort("r1")
    world.collect()
    world.execute()
    world.process()
    # Nothing of it is cached: the next one begins where it began.
    records = [world.submit(SYSTEM) for _ in range(3)]
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 2
    world.run()
    check(world, records)


def step(world: World) -> None:
    world.plan()
    world.execute()
    world.process()


def test_a_follower_that_finds_more_cached_than_its_leader_did_still_follows() -> None:
    """Prompts that begin alike are cached meanwhile, be it by one token: that hid the leaders of a burst."""
    world = World(num_pages=1024, chunk_tokens=8, max_tokens_per_step=24, inflight_prefix_min_tokens=8)
    leader = world.submit([*SYSTEM, 9, 9])
    world.plan()
    other = world.submit([*SYSTEM[:3], 40, 41, 42], stop=Stop(max_tokens=1))
    while other.finished is None:
        world.execute()
        world.process()
        world.plan()
    state = world.planner.state
    assert state is not None and 3 <= state.table.computed_len[0] < len(SYSTEM)
    follower = world.submit([*SYSTEM, 8, 8])
    world.plan()
    assert world.planner.queue.num_waiting_for_prefix == 1
    world.run()
    check(world, [leader, other, follower])
    assert world.planner.counters.prefilled_tokens == len(SYSTEM) + 2 + 6 + 2


def test_equal_tokens_behind_another_prefix_are_waited_for_by_nobody() -> None:
    world = World(num_pages=1024, chunk_tokens=8, max_tokens_per_step=32, inflight_prefix_min_tokens=8)
    seen = [world.submit([start] * 12, stop=Stop(max_tokens=1)) for start in (50, 51)]
    world.run()
    records = [world.submit([start] * 12 + SYSTEM) for start in (50, 51)]
    world.plan()
    assert world.planner.num_running == 2 and world.planner.queue.num_waiting_for_prefix == 0
    world.run()
    check(world, [*seen, *records])


def test_a_prompt_is_compared_with_others_for_a_few_times_its_length_at_most() -> None:
    """However many go on as it does, each of them behind a beginning of its own."""
    world = World(num_pages=65_536, chunk_tokens=8, max_tokens_per_step=128, max_total_len=8192, num_slots=12)
    text = [2 + (7 * i + i // 50) % 43 for i in range(3000)]
    beginnings = {start: [start] * (start - 38) for start in range(50, 59)}
    beginnings[49] = [49, *text[1:30]]
    seen = [world.submit(beginning, stop=Stop(max_tokens=1)) for beginning in beginnings.values()]
    world.run()
    own = beginnings.pop(49)
    records = [world.submit(start + text[len(start) :], stop=Stop(max_tokens=1)) for start in beginnings.values()]
    world.plan()
    counters = world.planner.counters
    assert world.planner.num_running == len(beginnings), "all of them lead"
    before = counters.num_compared_tokens
    last = world.submit(own + text[len(own) :], stop=Stop(max_tokens=1))
    world.execute()
    world.process()
    world.plan()
    assert world.planner.num_running == len(beginnings) + 1 and world.planner.queue.num_waiting_for_prefix == 0
    assert 2 * len(text) < counters.num_compared_tokens - before <= 4 * len(text)
    world.run()
    check(world, [*seen, *records, last])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("rest", [-4, 0])
def test_a_leader_gets_what_its_followers_leave_of_a_step(page_size: int, rest: int) -> None:
    """Beyond its chunk, as they would have filled the step: what they wait for, and a short rest of its own."""
    world = World(
        num_pages=1024 // page_size, page_size=page_size, chunk_tokens=8, max_tokens_per_step=40, num_slots=12
    )
    records = [world.submit([*SYSTEM, *range(2, 22), 30 + i, *range(2, 12 + rest)]) for i in range(4)]
    lengths = []
    while world.planner.queue.num_waiting_for_prefix or not lengths:
        world.plan()
        lengths.append([chunk.length for chunk in world.log[-1].chunks])
        world.execute()
        world.process()
    shared = len(SYSTEM) + 20
    assert lengths[0] == [40] and sum(map(sum, lengths[:2])) == shared + (7 if rest < 0 else 0)
    world.run()
    check(world, records)


def chunks_of_slots(world: World, num_plans: int) -> list[dict[int, int]]:
    """Plans, each computed before the next one: tokens of a chunk by slot."""
    plans = []
    for _ in range(num_plans):
        world.plan()
        plans.append({chunk.slot: chunk.length for chunk in world.log[-1].chunks})
        world.execute()
        world.process()
    return plans


def test_long_prompts_in_slots_end_one_after_the_other_in_steps_as_long_as_side_by_side() -> None:
    """One that ends with its chunk comes first; of the others the oldest gets the chunks of all."""
    world = World(num_pages=1024, chunk_tokens=8, max_tokens_per_step=32, num_slots=12, eos_rate=0.0)
    records = [world.submit([first, 9, *range(10, 10 + rest)]) for first, rest in ((3, 46), (4, 46), (5, 12))]
    first, second, short = range(3)
    assert chunks_of_slots(world, 4) == [
        {first: 8, second: 8, short: 8},
        {short: 6, first: 16},
        {first: 16},
        {first: 8, second: 8},
    ]
    world.run()
    check(world, records)


def test_a_prompt_that_more_wait_for_comes_first_and_passes_over_the_oldest_twice_in_a_row_at_most() -> None:
    world = World(num_pages=1024, chunk_tokens=4, max_tokens_per_step=32, num_slots=12, eos_rate=0.0)
    oldest = world.submit([60, 61] * 20)
    world.plan()
    world.execute()
    world.process()
    leaders = [world.submit([first, *SYSTEM]) for first in range(40, 47) for _ in range(2)]
    assert [chunks.get(0, 0) for chunks in chunks_of_slots(world, 5)] == [4, 0, 0, 28, 4]
    world.run()
    check(world, [oldest, *leaders])


def test_rows_of_a_step_are_in_the_order_of_its_chunks_when_a_leader_is_extended_to_its_end() -> None:
    world = World(num_pages=1024, chunk_tokens=16, max_tokens_per_step=64, inflight_prefix_min_tokens=4, eos_rate=0.0)
    leader = world.submit([*SYSTEM[:16], 5, 6, 7], sampling=Sampling(temperature=1.0, seed=1))
    other = world.submit([60, 61, 62], sampling=Sampling(temperature=1.0, seed=2))
    follower = world.submit([*SYSTEM[:16], 8, 9], sampling=Sampling(temperature=1.0, seed=3))
    world.plan()
    assert [chunk.length for chunk in world.log[-1].chunks] == [19, 3]
    world.run()
    check(world, [leader, other, follower])


def test_a_follower_that_is_aborted_is_waited_for_by_nobody() -> None:
    """Its leader gets a chunk as any other, and the device stands still for no follower that is gone."""
    world = World(num_pages=1024, chunk_tokens=8, max_tokens_per_step=40)
    leader, follower = (world.submit([*SYSTEM, own]) for own in (3, 4))
    world.plan()
    assert [chunk.length for chunk in world.log[-1].chunks] == [40]
    world.planner.abort(follower.submission.key.request_id)
    world.collect()
    world.plan()
    assert [chunk.length for chunk in world.log[-1].chunks] == [8]
    state, prefill = world.planner.state, world.planner.prefill
    assert state is not None and prefill is not None and prefill.num_due_followers(state) == 0
    world.run()
    assert leader.tokens == world.expected(leader.submission)
    world.check_clean()


def test_followers_are_due_while_their_prefix_is_in_flight_and_no_longer() -> None:
    """Once it is computed they are in the next plan: nothing is gained by waiting for another result."""
    world = World(num_pages=1024, chunk_tokens=8, max_tokens_per_step=16, num_slots=3, inflight_prefix_min_tokens=8)
    records = [world.submit([*SYSTEM[:16], *own]) for own in ([3] * 24, [4] * 3, [5] * 3, [6] * 3)]
    state, prefill = world.planner.state, world.planner.prefill
    assert state is not None and prefill is not None
    world.plan()
    assert prefill.num_due_followers(state) == 2, "as many as there are slots for"
    world.plan()
    world.execute()
    world.process()
    assert world.planner.queue.num_waiting_for_prefix == 3 and world.planner.num_in_flight == 1
    assert prefill.num_due_followers(state) == 0
    world.run()
    check(world, records)


@pytest.mark.parametrize("seed", range(12))
def test_bursts_of_any_shape_keep_to_the_bounds_of_a_step_and_give_everyone_its_own_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size, max_step = int(rng.choice([1, 4])), int(rng.choice([24, 64]))
    world = World(
        page_size=page_size,
        num_pages=int(rng.choice([160, 1024])) // page_size,
        chunk_tokens=int(rng.choice([3, 8, 16])),
        max_tokens_per_step=max_step,
        num_slots=int(rng.choice([3, 8])),
        inflight_prefix_min_tokens=4,
        max_tokens_per_row=int(rng.choice([1, 4])),
        decode_reserve_tokens=int(rng.choice([1, 32])),
        queue_policy=str(rng.choice(["fcfs", "priority"])),
        row_seed=seed,
        eos_rate=0.02,
    )
    records: list[Record] = []
    for _ in range(120):
        for _ in range(int(rng.choice([0, 0, 0, 3]))):
            start, cut = int(rng.integers(0, 3)), int(rng.integers(1, len(SYSTEM)))
            own = rng.integers(2, 62, int(rng.integers(1, 30))).tolist()
            records.append(
                world.submit(
                    [*SYSTEM[start:cut], *own] if cut > start else own,
                    priority=int(rng.choice([0, 0, 3])),
                    sampling=Sampling(temperature=1.0, seed=len(records)),
                )
            )
        if records and rng.random() < 0.1:
            world.planner.abort(records[int(rng.integers(len(records)))].submission.key.request_id)
            world.collect()
        if world.planner.num_in_flight < 3:
            world.plan()
        if rng.random() < 0.6:
            world.execute()
        if rng.random() < 0.6:
            world.process()
    world.run()
    assert world.planner.counters.num_prefix_deduplications > 0
    for plan in world.log:
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(slots) == len(set(slots)) and sum(chunk.length for chunk in plan.chunks) <= max_step
    for record in records:
        assert record.finished is not None and record.tokens == world.expected(record.submission)[: len(record.tokens)]
    assert world.planner.queue.num_waiting_for_prefix == 0
    world.check_clean()
