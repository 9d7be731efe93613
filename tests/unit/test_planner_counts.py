"""Counts and estimates of the planner, and everything that ends with an epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_world import EOS_ID, World

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.queue.submissions import AbortOutcome
from radixmesh.daemons.scheduler.sequence import Sequence
from radixmesh.daemons.scheduler.sequence_observer import SequenceObserver

PROMPT = list(range(2, 12))


class _Observed(SequenceObserver):
    def __init__(self) -> None:
        self.finished_reasons: list[FinishReason] = []

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        self.finished_reasons.append(reason)


def test_before_and_between_epochs_nothing_runs_and_nothing_is_planned() -> None:
    planner = Planner(PlannerSettings())
    assert (planner.num_running, planner.num_in_flight, planner.num_waiting) == (0, 0, 0)
    assert planner.plan(0.0) is None and planner.state is None and planner.group is None
    assert planner.cache_feed.revision == 0
    world = World(eos_rate=0.0)
    world.submit(PROMPT, stop=Stop(max_tokens=4))
    world.submit(PROMPT[::-1], stop=Stop(max_tokens=4))
    assert world.plan() and world.planner.num_in_flight == 1
    assert (world.planner.num_running, world.planner.num_waiting, world.planner.num_live) == (2, 0, 2)
    world.planner.end_epoch()
    assert (world.planner.num_running, world.planner.num_waiting, world.planner.num_live) == (0, 2, 2)
    assert world.planner.num_in_flight == 0 and world.planner.plan(0.0) is None
    world.planner.end_epoch()  # Of an epoch that is over already.


def test_a_cache_that_is_none_is_said_at_the_start() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        Planner(PlannerSettings(cache="nonsense"))


def test_an_observer_is_told_of_every_end() -> None:
    observer = _Observed()
    world = World(eos_rate=0.0)
    world.planner = Planner(PlannerSettings(check_invariants=True), observer=observer)
    world.begin_epoch()
    world.submit(PROMPT, stop=Stop(max_tokens=3))
    world.run()
    assert observer.finished_reasons == [FinishReason.LENGTH]
    assert world.planner.counters.finished == {FinishReason.LENGTH: 1}
    world.submit(PROMPT, stop=Stop(max_tokens=3))
    world.run()
    assert world.planner.counters.finished == {FinishReason.LENGTH: 2}


def test_an_abort_says_whether_it_was_there_and_why_it_ended() -> None:
    world = World(eos_rate=0.0)
    planner = world.planner
    record = world.submit(PROMPT, stop=Stop(max_tokens=3))
    request_id = record.submission.key.request_id
    assert planner.abort("nobody") is AbortOutcome.UNKNOWN
    assert planner.abort(request_id) is AbortOutcome.FOUND
    world.collect()
    assert record.finished is not None and record.finished.reason is FinishReason.ABORT
    assert planner.abort(request_id) is AbortOutcome.FINISHED
    # Aborted by its client: a copy of the submit that comes late must not run.
    late = world.submit(PROMPT, stop=Stop(max_tokens=3))
    superseded = world.submit(PROMPT, stop=Stop(max_tokens=3))
    assert planner.abort(superseded.submission.key.request_id, below_attempt=7) is AbortOutcome.FOUND
    world.collect()
    assert superseded.finished is not None and superseded.finished.error is not None
    world.run()
    assert len(late.tokens) == 3


def test_an_owner_that_is_gone_takes_its_requests_with_it() -> None:
    world = World(eos_rate=0.0)
    records = [world.submit(PROMPT, stop=Stop(max_tokens=3)) for _ in range(2)]
    owner = records[0].submission.owner
    assert world.planner.owners() == {owner}
    assert world.planner.abort_owner(owner) == 2 and world.planner.abort_owner(owner) == 0
    world.collect()
    assert all(r.finished is not None and r.finished.reason is FinishReason.ABORT for r in records)
    assert world.planner.num_live == 0 and world.planner.owners() == set()


def test_a_stop_string_ends_an_output_where_it_was_found() -> None:
    world = World(eos_rate=0.0)
    record = world.submit(PROMPT, stop=Stop(max_tokens=30))
    for _ in range(4):
        world.plan()
        world.execute()
        world.process()
    num = len(record.tokens)
    assert num == 4
    world.planner.finish_by_stop(record.submission.owner, record.submission.handle + 1, 1)
    assert world.planner.num_live == 1, "of no output that is known"
    world.planner.finish_by_stop(record.submission.owner, record.submission.handle, 99)
    world.collect()
    assert record.finished is not None and record.finished.reason is FinishReason.STOP
    assert record.finished.num_output == num
    # Between two epochs, likewise.
    waiting = world.submit(PROMPT, stop=Stop(max_tokens=30))
    world.planner.end_epoch()
    world.planner.finish_by_stop(waiting.submission.owner, waiting.submission.handle, 0)
    world.collect()
    assert waiting.finished is not None and world.planner.num_live == 0


def test_results_of_another_epoch_are_counted_and_dropped() -> None:
    world = World(eos_rate=0.0)
    record = world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.plan()
    world.execute()
    stale = world.results.popleft()
    world.begin_epoch()
    world.take(world.planner.process(stale))
    assert world.planner.counters.stale_results == 1 and record.tokens == []
    world.planner.end_epoch()
    world.take(world.planner.process(stale))
    assert world.planner.counters.stale_results == 2
    world.begin_epoch()
    world.run()
    assert record.tokens == world.expected(record.submission)


def test_counts_of_a_run_add_up() -> None:
    world = World(eos_rate=0.0, page_size=4)
    for _ in range(2):
        world.submit(PROMPT, stop=Stop(max_tokens=3))
        world.run(depth=0)
    counters = world.planner.counters
    assert counters.num_submitted == 2 and counters.prompt_tokens == 20
    assert counters.cached_tokens == 8, "two pages of the prompt"
    assert counters.prefilled_tokens == 10 + 2
    assert counters.output_tokens == 6 and counters.num_steps == counters.num_plans == len(world.log)
    pages = world.planner.state.num_evicted  # type: ignore[union-attr]
    assert (pages, counters.evicted_pages, counters.adopted_tokens) == (0, 0, 0)
    adopted = world.begin_epoch()
    assert adopted == counters.adopted_tokens > 0


def test_pages_evicted_in_an_epoch_are_counted_when_it_is_over() -> None:
    world = World(eos_rate=0.0, num_pages=24)
    for start in (2, 20, 40):
        world.submit(list(range(start, start + 12)), stop=Stop(max_tokens=4))
        world.run()
    state = world.planner.state
    assert state is not None and state.num_evicted > 0 and world.planner.counters.evicted_pages == 0
    evicted = state.num_evicted
    world.planner.end_epoch()
    assert world.planner.counters.evicted_pages == evicted


def test_a_step_is_expected_to_take_what_steps_of_its_size_took() -> None:
    world = World(eos_rate=0.0)
    world.submit(PROMPT, stop=Stop(max_tokens=3))
    assert world.planner.estimate.expect_us(10) == 0
    world.plan()
    world.execute()
    result = world.results.popleft()
    world.take(world.planner.process(replace(result, device_start_ns=5_000_000, device_end_ns=7_000_000)))
    assert world.planner.estimate.expect_us(len(PROMPT)) == 2000
    world.plan()
    assert world.plans[-1].expected_us == 2000
    # A clock that stood still says nothing.
    world.execute()
    result = world.results.popleft()
    world.take(world.planner.process(replace(result, device_start_ns=5_000_000, device_end_ns=5_000_000)))
    assert world.planner.estimate.expect_us(1) == 2000


def test_a_flush_waits_for_what_runs_and_starts_over_with_the_epoch() -> None:
    world = World(eos_rate=0.0)
    world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.plan()
    wish = world.planner.flush.wish()
    late = world.submit(PROMPT, stop=Stop(max_tokens=2))
    for _ in range(6):
        world.plan()
        world.execute()
        world.process()
        if wish.is_done:
            break
    assert wish.is_done and wish.flushed_pages > 0 and not late.tokens
    again = world.planner.flush.wish()
    world.planner.abort(late.submission.key.request_id)
    world.collect()
    assert world.plan()
    world.begin_epoch()
    assert not again.is_done and world.planner.flush.is_wanted, "sent in an epoch that is over"
    world.run()
    assert again.is_done and not world.planner.flush.is_wanted


def test_a_heartbeat_is_a_plan_of_nothing() -> None:
    world = World(eos_rate=0.0)
    assert world.planner.plan(0.0) is None
    plan = world.planner.plan(0.0, is_heartbeat=True)
    assert plan is not None and not plan.has_forward and not plan.chunks and not plan.admits
    assert world.planner.num_in_flight == 1
    step = world.planner.state.in_flight.oldest  # type: ignore[union-attr]
    assert step is not None and step.num_tokens == 0


def test_a_deadline_ends_a_request_and_is_forgotten_with_it() -> None:
    world = World(eos_rate=0.0)
    late = world.submit(PROMPT, stop=Stop(max_tokens=30), deadline_s=5.0)
    world.now = 4.9
    assert world.plan()
    world.now = 5.0
    world.plan()
    assert late.finished is not None and late.finished.error is not None
    assert late.finished.error.reason == ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED
    world.run()
    for number in range(200):
        world.submit([2 + number % 50] * 3, stop=Stop(max_tokens=1), deadline_s=1e9)
        world.run()
    assert len(world.planner.deadlines) < 70, "ended ones do not stay until their deadlines"


def test_ids_that_end_outputs_are_watched_again_for_another_vocabulary() -> None:
    world = World(eos_rate=0.4)
    record = world.submit(PROMPT, stop=Stop(max_tokens=60, stop_ids=(63,)))
    world.planner.end_epoch()
    planner = world.planner
    larger = replace(world.group, vocab_size=128)
    planner.begin_epoch(world.epoch + 1, larger, None)
    planner.end_epoch()
    # The stop id is outside of the smallest one: its request cannot run there, and the planner lives on.
    planner.begin_epoch(world.epoch + 2, replace(world.group, vocab_size=63), None)
    world.collect()
    assert record.finished is None or record.finished.error is not None
    planner.end_epoch()
    world.epoch += 2
    world.begin_epoch()
    other = world.submit(PROMPT, stop=Stop(max_tokens=60))
    world.run()
    assert other.tokens == world.expected(other.submission)
    assert EOS_ID in other.tokens or len(other.tokens) == 60


def test_a_group_on_which_a_request_cannot_run_fails_it_alone() -> None:
    world = World(eos_rate=0.0)
    long = world.submit(list(range(2, 42)), stop=Stop(max_tokens=40))
    short = world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.planner.end_epoch()
    world.planner.begin_epoch(world.epoch + 1, replace(world.group, max_total_len=20, num_pages=20), None)
    world.collect()
    assert long.finished is not None and long.finished.error is not None
    assert short.finished is None and world.planner.num_live == 1


def test_a_refused_plan_counts_against_those_admitted_in_it() -> None:
    world = World(eos_rate=0.0)
    record = world.submit(PROMPT, stop=Stop(max_tokens=4))
    error = MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "no such page")
    for _ in range(2):
        assert world.plan()
        plan = world.plans.pop()
        world.planner.end_epoch(plan.step_id, error)
        world.collect()
        world.begin_epoch()
        world.collect()
    assert record.finished is not None and record.finished.error is not None
    # A step that raised is no refusal: it is a death, and one of those fails nobody.
    other = world.submit(PROMPT, stop=Stop(max_tokens=4))
    error = MeshError(ErrorReason.ERROR_REASON_STEP_FAILED, "it raised")
    for _ in range(2):
        assert world.plan()
        plan = world.plans.pop()
        world.planner.end_epoch(plan.step_id, error)
        world.collect()
        world.begin_epoch()
    assert other.finished is None
    world.run()
    assert other.tokens == world.expected(other.submission)


def test_what_a_transfer_no_longer_uses_is_only_taken_back_in_an_epoch() -> None:
    world = World()
    pages = world.planner.state.pages.pool.pages_in(0)[:2]  # type: ignore[union-attr]
    assert world.planner.end_lease(pages) == 0, "they are free"
    world.planner.state.pages.pool.lease_pinned(pages)  # type: ignore[union-attr]
    assert world.planner.end_lease(pages) == 2
    world.planner.end_epoch()
    assert world.planner.end_lease(pages) == 0


def test_watchers_of_the_cache_hear_of_the_end_of_an_epoch() -> None:
    world = World(eos_rate=0.0)
    feed = world.planner.cache_feed
    assert feed.open() is not None
    opened = feed.revision
    world.submit(PROMPT, stop=Stop(max_tokens=2))
    world.run()
    known = feed.revision
    assert known > opened and feed.events_after(opened, 100, 1000)
    world.planner.end_epoch()
    assert feed.open() is None and feed.events_after(known - 1, 100, 1000) is None
    world.begin_epoch()
    assert feed.open() is not None


def test_a_later_attempt_runs_unless_all_attempts_were_aborted() -> None:
    world = World(eos_rate=0.0)
    for below_attempt in (None, 1):
        first = world.submit(PROMPT, stop=Stop(max_tokens=3))
        submission = first.submission
        assert world.planner.abort(submission.key.request_id, below_attempt=below_attempt) is AbortOutcome.FOUND
        world.collect()
        late = world.submission(PROMPT, stop=Stop(max_tokens=3), attempt=1)
        late = world.send(replace(late, key=submission.key, sampling=submission.sampling))
        world.run()
        if below_attempt is None:
            assert late.finished is not None and late.tokens == [], "of a router that has not heard of the abort"
        else:
            assert late.tokens == world.expected(late.submission) and len(late.tokens) == 3
