"""The estimate by which outputs move for evenness."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.placement.move_gain import (
    MovableOutputs,
    ReplicaState,
    gain_of,
    is_uneven,
    remaining_of,
)

COUNTS = st.integers(0, 200)


def moved(
    *, num_outputs: int = 1, remaining: int = 100, uncached_here: int = 0, uncached_there: int = 100
) -> MovableOutputs:
    return MovableOutputs(
        num_outputs=num_outputs,
        num_tokens=uncached_there,
        remaining=remaining,
        uncached_here=uncached_here,
        uncached_there=uncached_there,
    )


def state(num_outputs: int, queued_tokens: int = 0, slowness: float = 1.0) -> ReplicaState:
    return ReplicaState(num_outputs=num_outputs, queued_tokens=queued_tokens, slowness=slowness)


def uneven(here: int, there: int, mean: float) -> bool:
    return is_uneven(state(here), state(there), mean)


@given(COUNTS, COUNTS, st.integers(1, 5000), st.integers(1, 5000))
def test_a_running_output_gains_nothing_where_there_are_as_many(
    here: int, more: int, remaining: int, uncached: int
) -> None:
    there = state(max(0, here - 1) + more)
    assert gain_of(moved(remaining=remaining, uncached_there=uncached), state(here), there) < 0


@given(COUNTS, COUNTS, st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 5000))
def test_it_falls_with_what_must_be_prefilled_and_rises_with_what_is_still_to_come(
    here: int, there: int, remaining: int, uncached: int, queued: int
) -> None:
    gain = gain_of(moved(remaining=remaining, uncached_there=uncached), state(here), state(there, queued))
    dearer = gain_of(
        replace(moved(remaining=remaining, uncached_there=uncached), uncached_there=uncached + 1),
        state(here),
        state(there, queued),
    )
    later = gain_of(moved(remaining=remaining, uncached_there=uncached), state(here), state(there, queued + 1))
    assert dearer < gain and later < gain
    if here > there + 1:
        longer = gain_of(moved(remaining=remaining + 1, uncached_there=uncached), state(here), state(there, queued))
        assert longer > gain


def test_sixteen_outputs_beside_none_move_unless_their_prompts_are_long() -> None:
    assert gain_of(moved(uncached_there=1000), state(16), state(0)) > 0
    assert gain_of(moved(remaining=10, uncached_there=3000), state(16), state(0)) < 0


def test_an_output_that_waits_leaves_a_queue_for_an_idle_replica() -> None:
    waiting = moved(remaining=1, uncached_here=1000, uncached_there=1000)
    assert gain_of(waiting, state(6, 6000), state(0)) > 0
    assert gain_of(waiting, state(6, 6000), state(6, 6000)) < 0


def test_evenness_is_within_a_share_of_the_mean_and_few_outputs_are_no_overload() -> None:
    assert uneven(16, 0, 12.8) and uneven(4, 0, 2.0)
    assert not uneven(3, 0, 1.5) and not uneven(14, 12, 13.0) and not uneven(108, 92, 100.0)
    assert uneven(109, 92, 100.0)


def test_a_replica_half_as_fast_has_its_share_with_half_the_outputs() -> None:
    fast, slow = state(16), state(8, slowness=2.0)
    assert not is_uneven(fast, slow, 16.0) and not is_uneven(slow, fast, 16.0)
    assert gain_of(moved(uncached_there=10), fast, slow) < 0 and gain_of(moved(uncached_there=10), slow, fast) < 0
    assert is_uneven(state(12, slowness=2.0), fast, 20.0)
    assert gain_of(moved(uncached_there=10), state(12, slowness=2.0), fast) > 0


def test_what_is_still_to_come_is_what_was_asked_for_or_a_guess_below_it() -> None:
    assert remaining_of(10, 500, ends_early=False) == 490
    assert remaining_of(10, 500, ends_early=True) == 64
    assert remaining_of(100, 500, ends_early=True) == 100
    assert remaining_of(490, 500, ends_early=True) == 10
    assert remaining_of(600, 500, ends_early=False) == 0
