"""The planner against a simulated worker: single situations."""

from __future__ import annotations

import numpy as np
import pytest
from support.planner_world import World

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.queue.submissions import AbortOutcome


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_output_is_the_oracles_at_every_depth_page_size_and_chunk(
    depth: int, page_size: int, chunk_tokens: int
) -> None:
    world = World(page_size=page_size, num_pages=512 // page_size, chunk_tokens=chunk_tokens)
    records = [
        world.submit(
            [2 + (i + j) % 40 for j in range(5 + 3 * i)],
            sampling=Sampling(temperature=float(i % 2), seed=i),
            stop=Stop(max_tokens=1 + 4 * i, min_tokens=i % 3),
        )
        for i in range(12)
    ]
    world.run(depth)
    for record in records:
        assert record.tokens == world.expected(record.submission)
        assert record.finished is not None and record.finished.num_output == len(record.tokens)
        is_stop = record.tokens[-1] == 1
        assert record.finished.reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        assert record.finished.stop_id == (1 if is_stop else None)
    world.check_clean()


def test_decode_plans_are_nearly_empty() -> None:
    world = World(num_slots=8, num_pages=4096, eos_rate=0.0, ahead=16)
    for i in range(8):
        world.submit([2 + i] * 4, stop=Stop(max_tokens=64))
    world.run(2)
    plain = [p for p in world.log if not (p.admits or p.grants or p.chunks or p.releases or p.decode_set is not None)]
    assert len(plain) > 40, "most plans of a steady batch carry nothing but their ids"


def test_same_prompt_is_found_in_the_cache_but_for_its_last_token() -> None:
    world = World(page_size=4)
    prompt = list(range(2, 26))
    first = world.submit(prompt)
    world.run()
    second = world.submit(prompt)
    world.run()
    assert first.finished is not None and second.finished is not None
    assert first.finished.cached_tokens == 0
    assert second.finished.cached_tokens == 20, "24 tokens fill 6 pages; the last token is computed, so 5 can be shared"
    assert second.tokens == first.tokens
    world.check_clean()


def test_cache_is_shared_only_within_a_salt() -> None:
    world = World()
    prompt = list(range(2, 26))
    world.submit(prompt, cache_salt="a")
    world.run()
    other = world.submit(prompt, cache_salt="b")
    same = world.submit(prompt, cache_salt="a")
    world.run()
    assert other.finished is not None and other.finished.cached_tokens == 0
    assert same.finished is not None and same.finished.cached_tokens == 23


def test_undelivered_prompt_logprobs_cap_the_cached_length() -> None:
    world = World()
    prompt = list(range(2, 26))
    world.submit(prompt)
    world.run()
    sampling = Sampling(temperature=0.0, num_top_logprobs=0, prompt_logprobs=True)
    fresh = world.submit(prompt, sampling=sampling)
    half = world.submit(prompt, sampling=sampling, logprobs_start=12)
    world.run()
    assert fresh.finished is not None and fresh.finished.cached_tokens == 0
    assert half.finished is not None and half.finished.cached_tokens == 11


def test_retraction_keeps_output_and_gives_way_to_the_oldest() -> None:
    world = World(num_pages=48, eos_rate=0.0, num_slots=8, decode_reserve_tokens=1)
    records = [world.submit([2 + i] * 4, stop=Stop(max_tokens=24)) for i in range(6)]
    world.run(2)
    assert world.planner.counters.num_retracted > 0
    for record in records:
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_abort_at_every_step_of_a_life_leaves_nothing() -> None:
    outcomes = set()
    for moment in range(30):
        world = World(num_pages=64, num_slots=1, chunk_tokens=4, eos_rate=0.0)
        record = world.submit(list(range(2, 14)), stop=Stop(max_tokens=6))
        next_one = world.submit(list(range(30, 40)), stop=Stop(max_tokens=6))
        for step in range(moment):
            (world.plan, world.execute, world.process)[step % 3]()
            if step % 2:
                world.plan()
        outcomes.add(world.planner.abort("r1"))
        world.collect()
        again = world.planner.abort("r1")
        assert again is AbortOutcome.FINISHED
        world.run(2)
        assert record.tokens == world.expected(record.submission)[: len(record.tokens)]
        assert next_one.tokens == world.expected(next_one.submission)
        world.check_clean()
    assert outcomes == {AbortOutcome.FOUND, AbortOutcome.FINISHED}
    assert World().planner.abort("nobody") is AbortOutcome.UNKNOWN


def test_stop_string_cuts_the_output_where_the_router_says() -> None:
    world = World(eos_rate=0.0)
    record = world.submit([2, 3, 4], stop=Stop(max_tokens=50))
    for _ in range(10):
        world.plan()
        world.plan()
        world.execute()
        world.process()
    assert len(record.tokens) > 5
    world.planner.finish_by_stop(1, 1, 5)
    world.planner.finish_by_stop(1, 99, 5)
    world.run(2)
    assert record.finished is not None
    assert (record.finished.reason, record.finished.num_output) == (FinishReason.STOP, 5)
    world.check_clean()


def test_higher_attempt_supersedes_and_hits_the_pages_of_the_lower() -> None:
    world = World(eos_rate=0.0)
    old = world.submit(list(range(2, 30)), stop=Stop(max_tokens=30))
    for _ in range(8):
        world.plan()
        world.execute()
        world.process()
    known = np.array(old.tokens[:4], np.int32)
    new = world.submit(
        list(range(2, 30)),
        key=old.submission.key,
        attempt=3,
        resumed_output_ids=known,
        stop=Stop(max_tokens=30),
        owner=2,
    )
    lower = world.submit(list(range(2, 30)), key=old.submission.key, attempt=2)
    world.run(1)
    assert old.finished is not None and old.finished.error is not None
    assert old.finished.error.reason == common_pb2.ERROR_REASON_SUPERSEDED
    assert lower.rejected is not None and lower.rejected.error.reason == common_pb2.ERROR_REASON_STALE_ATTEMPT
    assert new.tokens == world.expected(new.submission)
    assert new.finished is not None and new.finished.cached_tokens == 28
    assert new.finished.num_output == 30


def test_equal_attempt_on_another_stream_attaches_where_that_stream_stands() -> None:
    world = World(eos_rate=0.0)
    old = world.submit([2, 3, 4], stop=Stop(max_tokens=20))
    for _ in range(9):
        world.plan()
        world.execute()
        world.process()
    world.send(old.submission)  # The very same: nothing happens.
    known = np.array(old.tokens[:2], np.int32)
    new = world.submit([2, 3, 4], key=old.submission.key, owner=2, resumed_output_ids=known, stop=Stop(max_tokens=20))
    num_old = len(old.tokens)
    world.run(2)
    assert len(old.tokens) == num_old
    assert new.tokens == world.expected(new.submission)
    assert old.finished is not None and old.finished.error is not None and new.finished is not None
    assert old.finished.error.reason == common_pb2.ERROR_REASON_SUPERSEDED, "its stream may be open still"
    other = world.submit([9, 9], key=old.submission.key, attempt=0)
    assert other.rejected is None, "an ended attempt on a new handle runs again"


def test_resume_of_a_complete_output_finishes_at_once() -> None:
    world = World(eos_rate=0.0)
    record = world.submit([2, 3], resumed_output_ids=np.array([5, 6, 7], np.int32), stop=Stop(max_tokens=3))
    assert record.finished is not None and record.finished.reason is FinishReason.LENGTH
    stopped = world.submit([2, 3], resumed_output_ids=np.array([5, 1], np.int32), stop=Stop(max_tokens=30))
    assert stopped.finished is not None and stopped.finished.stop_id == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_ids": np.empty(0, np.int32)}, common_pb2.ERROR_REASON_EMPTY_PROMPT),
        ({"prompt_ids": np.array([2, 64], np.int32)}, common_pb2.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"prompt_ids": np.array([-1], np.int32)}, common_pb2.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"resumed_output_ids": np.array([64], np.int32)}, common_pb2.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"sampling": Sampling(seed=1, logit_bias=((99, 1.0),))}, common_pb2.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY),
        ({"prompt_ids": np.full(200, 2, np.int32)}, common_pb2.ERROR_REASON_PROMPT_TOO_LONG),
        ({"prompt_ids": np.full(80, 2, np.int32)}, common_pb2.ERROR_REASON_NEVER_FITS),
        ({"stop": Stop(max_tokens=100)}, common_pb2.ERROR_REASON_NEVER_FITS),
        ({"model": "other"}, common_pb2.ERROR_REASON_UNKNOWN_MODEL),
        ({"unsupported": "grammar"}, common_pb2.ERROR_REASON_UNSUPPORTED),
        ({"sampling": Sampling(temperature=1.0)}, common_pb2.ERROR_REASON_MISSING_FIELD),
    ],
)
def test_what_can_never_run_is_rejected_with_a_reason(changes: dict[str, object], reason: int) -> None:
    world = World(num_pages=64)
    record = world.submit([2, 3, 4], **changes)
    assert record.rejected is not None and record.rejected.error.reason == reason
    assert world.planner.num_live == 0


def test_full_queue_is_overloaded_with_a_hint() -> None:
    world = World(max_queue=2)
    records = [world.submit([2, 3]) for _ in range(3)]
    assert records[2].rejected is not None
    assert records[2].rejected.error.reason == common_pb2.ERROR_REASON_OVERLOADED
    assert int(records[2].rejected.error.metadata["retry_after_ms"]) > 0


def test_passed_deadline_ends_waiting_and_running_requests() -> None:
    world = World(num_slots=1, eos_rate=0.0)
    running = world.submit([2, 3], deadline_s=5.0, stop=Stop(max_tokens=100))
    waiting = world.submit([2, 3], deadline_s=5.0)
    for _ in range(6):
        world.plan()
        world.execute()
        world.process()
    world.now = 6.0
    world.run()
    for record in (running, waiting):
        assert record.finished is not None and record.finished.error is not None
        assert record.finished.error.reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    world.check_clean()


def test_routers_and_tenants_take_turns() -> None:
    world = World(num_slots=1, eos_rate=0.0)
    flood = [world.submit([2, 3, i], router="a", stop=Stop(max_tokens=1)) for i in range(2, 40)]
    polite = world.submit([4, 5], router="b", stop=Stop(max_tokens=1))
    order: list[str] = []
    for _ in range(12):
        world.plan()
        order += [a.request_id for a in world.log[-1].admits] if world.plans else []
        world.execute()
        world.process()
    assert polite.finished is not None, "one of another router does not wait for the whole flood"
    assert flood[-1].finished is None


def test_flush_empties_both_caches_once_idle() -> None:
    world = World()
    world.submit(list(range(2, 30)), stop=Stop(max_tokens=4))
    world.planner.flush.wish()
    late = world.submit(list(range(2, 30)))
    world.run()
    assert world.planner.flush.num_done == 1
    assert late.tokens == world.expected(late.submission)
    again = world.submit(list(range(2, 30)))
    world.run()
    assert again.tokens == late.tokens
    world.check_clean()


def test_wishes_for_a_flush_are_apart() -> None:
    world = World()
    flush = world.planner.flush
    first, second = flush.wish(), flush.wish()
    flush.withdraw(first)
    late = world.submit(list(range(2, 30)), stop=Stop(max_tokens=4))
    assert flush.is_wanted
    world.plan()
    assert not flush.is_wanted, "it is on its way"
    third = flush.wish()  # Pages computed from here on may be cached: that flush does not do for them.
    world.run()
    assert second.is_done and third.is_done and not first.is_done and flush.num_done == 2
    assert late.tokens == world.expected(late.submission)
    withdrawn = flush.wish()
    flush.withdraw(withdrawn)
    assert not flush.is_wanted
    world.check_clean()


def test_a_lost_epoch_repeats_a_flush_for_those_who_still_wait() -> None:
    world = World()
    flush = world.planner.flush
    waits, gave_up = flush.wish(), flush.wish()
    world.plan()
    flush.withdraw(gave_up)
    world.planner.end_epoch()
    assert flush.is_wanted and not waits.is_done
    flush.withdraw(waits)
    assert not flush.is_wanted


def test_waiting_flushes_are_bounded_in_number() -> None:
    flush = World().planner.flush
    wishes = [flush.wish() for _ in range(64)]
    with pytest.raises(MeshError, match="64 callers"):
        flush.wish()
    flush.withdraw(wishes[0])
    flush.wish()


def test_new_epoch_readopts_and_continues_where_results_ended() -> None:
    world = World(eos_rate=0.0)
    records = [world.submit(list(range(2, 20 + i)), stop=Stop(max_tokens=20)) for i in range(5)]
    for _ in range(12):
        world.plan()
        world.plan()
        world.execute()
        world.process()
    stale = list(world.results)
    adopted = world.begin_epoch()
    assert adopted >= 5 * 18
    for result in stale:
        world.take(world.planner.process(result))
    world.run(2)
    for record in records:
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_request_whose_admission_is_refused_twice_fails_alone() -> None:
    world = World(eos_rate=0.0)
    poison = world.submit([2, 3])
    error = MeshError(common_pb2.ERROR_REASON_INVALID_ARGUMENT, "refused")
    for _ in range(2):
        assert world.plan()
        refused = world.plans[0]
        world.plans.clear()
        world.planner.end_epoch(refused.step_id, error)
        world.begin_epoch()
    world.collect()
    assert poison.finished is not None and poison.finished.error is error
    healthy = world.submit([4, 5])
    world.run()
    assert healthy.tokens == world.expected(healthy.submission)
