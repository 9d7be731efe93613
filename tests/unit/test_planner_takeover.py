"""Requests that come again: by a router that took over, by a client that sends once more, after an abort."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.planner_world import VOCAB_SIZE, Record, World

from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.rpc.frames import MAX_PLAN_BYTES
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step_codec import encode_plan
from radixmesh.daemons.scheduler.queue.submissions import AbortOutcome
from radixmesh.daemons.scheduler.sequence import Submission

PROMPT = [5, 6, 7]


def running(world: World, **changes: object) -> Record:
    """A request with some output, and more to come."""
    record = world.submit(PROMPT, **{"stop": Stop(max_tokens=20), **changes})
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    assert 0 < len(record.tokens) < 20
    return record


def again(world: World, first: Record, **changes: object) -> Submission:
    """The same request by another stream."""
    wanted = world.submission(PROMPT, stop=first.submission.stop, sampling=first.submission.sampling, owner=2)
    return replace(wanted, key=first.submission.key, **changes)  # type: ignore[arg-type]


def test_the_same_attempt_on_another_stream_gets_the_tokens_that_are_there() -> None:
    world = World(eos_rate=0.0)
    first = running(world, sampling=Sampling(temperature=1.0, seed=1))
    second = world.send(again(world, first))
    world.run()
    assert second.tokens == world.expected(second.submission)
    assert first.finished is not None and first.finished.reason is FinishReason.ABORT, "nobody waits for ever"
    assert first.finished.error is not None and first.finished.error.reason_name == "SUPERSEDED"
    assert first.finished.num_output == len(first.tokens) < len(second.tokens)
    world.check_clean()


def test_a_higher_attempt_with_another_prompt_is_another_request() -> None:
    world = World(eos_rate=0.0)
    first = running(world)
    other = world.send(replace(world.submission([9, 9]), key=first.submission.key, attempt=1 << 16, owner=2))
    assert other.rejected is not None and other.rejected.error.reason_name == "DUPLICATE_REQUEST"
    world.run()
    assert first.tokens == world.expected(first.submission)


def test_an_id_whose_resumed_request_has_ended_can_be_used_again() -> None:
    world = World(eos_rate=0.0)
    first = world.submit(PROMPT, stop=Stop(max_tokens=4), attempt=3 << 16)
    world.run()
    assert first.finished is not None and first.finished.reason is FinishReason.LENGTH
    for wanted in (again(world, first, attempt=0), again(world, first, attempt=0, prompt_ids=np.array([8], np.int32))):
        record = world.send(wanted)
        world.run()
        assert record.rejected is None
        assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_a_stale_attempt_of_an_aborted_request_stays_aborted() -> None:
    """The resumed stream was aborted; the first router, which has not heard of either, submits again."""
    world = World(eos_rate=0.0)
    first = running(world, attempt=1 << 16)
    world.planner.abort(first.submission.key.request_id)
    world.collect()
    stale = world.send(again(world, first, attempt=1, resumed_output_ids=np.array(first.tokens[:2], np.int32)))
    assert stale.finished is not None and stale.finished.reason is FinishReason.ABORT
    world.run()
    world.check_clean()


def test_a_request_sent_once_more_with_another_seed_gets_tokens_of_that_seed() -> None:
    world = World(eos_rate=0.0)
    first = running(world, sampling=Sampling(temperature=1.0, seed=1))
    second = world.send(again(world, first, sampling=Sampling(temperature=1.0, seed=2), stop=Stop(max_tokens=12)))
    world.run()
    assert second.tokens == world.expected(second.submission)
    assert len(second.tokens) == 12
    assert first.finished is not None and first.finished.reason is FinishReason.ABORT
    world.check_clean()


def test_logprobs_are_computed_again_rather_than_left_out() -> None:
    world = World(eos_rate=0.0)
    sampling = Sampling(temperature=0.0, num_top_logprobs=1)
    first = running(world, sampling=sampling)
    second = world.send(again(world, first))
    assert second.tokens == [], "ids that are kept here have no logprobs with them"
    world.run()
    assert second.tokens == world.expected(second.submission)
    world.check_clean()


def test_a_router_that_missed_an_abort_does_not_bring_the_request_back() -> None:
    world = World(eos_rate=0.0)
    first = running(world)
    assert world.planner.abort(first.submission.key.request_id) is AbortOutcome.FOUND
    world.collect()
    second = world.send(again(world, first, attempt=1, resumed_output_ids=np.array(first.tokens, np.int32)))
    assert second.finished is not None and second.finished.reason is FinishReason.ABORT
    assert second.finished.error is not None and second.finished.error.reason_name == "ABORTED"
    assert second.finished.num_output == len(first.tokens)
    world.run()
    world.check_clean()


def test_the_id_of_an_aborted_request_can_be_used_for_another() -> None:
    world = World(eos_rate=0.0)
    first = running(world)
    world.planner.abort(first.submission.key.request_id)
    world.collect()
    fresh = world.send(again(world, first))
    assert fresh.finished is None
    # Its router loses this scheduler, and comes back.
    resumed = world.send(again(world, first, owner=3, attempt=1))
    world.run()
    assert resumed.tokens == world.expected(resumed.submission)
    world.check_clean()


def test_an_abort_of_older_attempts_says_nothing_about_later_ones() -> None:
    world = World(eos_rate=0.0)
    first = running(world)
    world.planner.abort(first.submission.key.request_id, below_attempt=1)
    world.collect()
    second = world.send(again(world, first, attempt=1, resumed_output_ids=np.array(first.tokens, np.int32)))
    world.run()
    assert second.tokens == world.expected(second.submission)


def test_ids_are_names_within_a_tenant() -> None:
    """A submit, resume or abort of another tenant under the same id changes nothing, and tells nothing."""
    world = World(eos_rate=0.0)
    hers = running(world, tenant="alice")
    key = hers.submission.key
    assert key.tenant == "alice"
    his = world.send(
        replace(world.submission([9, 9]), key=replace(key, tenant="bob"), tenant="bob", attempt=9 << 16, owner=2)
    )
    assert world.planner.abort(key.request_id, tenant="carol") is AbortOutcome.UNKNOWN
    assert world.planner.abort(key.request_id, below_attempt=1 << 30, tenant="bob") is AbortOutcome.FOUND
    world.run()
    assert his.finished is not None and his.finished.reason is FinishReason.ABORT
    assert hers.tokens == world.expected(hers.submission)
    assert world.planner.abort(key.request_id, tenant="carol") is AbortOutcome.UNKNOWN
    assert world.planner.abort(key.request_id, tenant="alice") is AbortOutcome.FINISHED
    assert world.planner.abort(key.request_id) is AbortOutcome.FINISHED
    world.check_clean()


def test_plans_stay_messages_that_a_worker_takes() -> None:
    """Many long prompts that are all cached cost a token each to compute, and megabytes to admit."""
    world = World(
        num_pages=40_000, num_slots=256, max_tokens_per_step=8192, chunk_tokens=8192, max_total_len=32_768, eos_rate=0.0
    )
    prompt = (np.arange(30_000) % 60 + 2).tolist()
    world.submit(prompt, stop=Stop(max_tokens=2))
    world.run()
    records = [world.submit(prompt, stop=Stop(max_tokens=3)) for _ in range(256)]
    num_planned = len(world.log)
    while world.planner.num_waiting:
        assert world.plan()
        world.execute()
        world.process()
    plans = world.log[num_planned:]
    assert sum(len(plan.admits) for plan in plans) == len(records)
    assert max(len(encode_plan(plan)) for plan in plans) < MAX_PLAN_BYTES


def test_a_group_with_a_larger_vocabulary_is_watched_for_all_of_its_ids() -> None:
    world = World()
    world.run()
    world.group = replace(world.group, vocab_size=2 * VOCAB_SIZE)
    world.begin_epoch()
    record = world.submit([1, 2, 3], stop=Stop(max_tokens=4, stop_ids=(VOCAB_SIZE + 5,), ignore_eos=True))
    world.run()
    assert record.tokens == world.expected(record.submission) and len(record.tokens) == 4


def test_a_step_without_a_device_time_teaches_nothing_about_later_ones() -> None:
    world = World()
    world.submit([1, 2, 3], stop=Stop(max_tokens=4, ignore_eos=True))
    assert world.plan() and world.execute()
    result = world.results.popleft()
    world.take(world.planner.process(replace(result, device_start_ns=5, device_end_ns=5)))
    assert world.planner.estimate.expect_us(1) == 0
    assert world.plan() and world.execute()
    result = world.results.popleft()
    world.take(world.planner.process(replace(result, device_start_ns=5, device_end_ns=7_005)))
    assert world.planner.estimate.expect_us(1) == 7
