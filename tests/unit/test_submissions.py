"""Aborted requests are remembered for a while, and a bounded number of them."""

from __future__ import annotations

from dataclasses import replace

from support.planner_world import submission

from radixmesh.daemons.scheduler.queue.submissions import Submissions
from radixmesh.daemons.scheduler.sequence import Sequence, Submission


def request_of(one: Submission) -> Sequence:
    return Sequence(
        submission=one,
        arrival=0,
        owner=one.owner,
        handle=one.handle,
        adapter="",
        max_total_len=64,
        end_ids=frozenset(),
        logprobs_start=0,
    )


def test_an_abort_is_remembered_for_ten_minutes_and_by_so_many() -> None:
    now = [0.0]
    known = Submissions(max_ended=3, clock=lambda: now[0])
    submits = [submission(handle, [1, 2]) for handle in range(4)]
    for one in submits[:3]:
        now[0] += 100.0
        request = request_of(one)
        known.add(request)
        known.end(request)
        known.aborted(request)
    late = [replace(one, attempt=1) for one in submits]
    assert [known.was_aborted(one) for one in late] == [True, True, True, False]
    assert not known.was_aborted(submits[0]), "attempt 0 is another request"
    now[0] = 701.0
    assert [known.was_aborted(one) for one in late] == [False, True, True, False]
    for handle in range(10, 13):
        request = request_of(submission(handle, [1]))
        known.add(request)
        known.end(request)
        known.aborted(request)
    assert not any(known.was_aborted(one) for one in late), "newer ones have taken their places"
