"""Progress: the states of a daemon on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress, State


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _serving(stall_s: float = 10.0) -> tuple[Progress, Clock]:
    clock = Clock()
    progress = Progress(stall_s=stall_s, clock=clock)
    progress.loaded()
    return progress, clock


def test_a_daemon_loads_serves_and_drains() -> None:
    progress = Progress()
    assert progress.state is State.LOADING
    progress.loaded()
    assert progress.state is State.SERVING
    progress.drain()
    progress.loaded()
    assert progress.state is State.DRAINING


def test_an_idle_daemon_never_stalls() -> None:
    progress, clock = _serving()
    clock.now += 1e6
    assert progress.state is State.SERVING


def test_pending_work_without_completion_stalls_and_a_completion_recovers() -> None:
    progress, clock = _serving()
    clock.now += 50
    progress.work_pending(3)
    clock.now += 9.9
    progress.work_pending(4)  # More work is no progress.
    assert progress.state is State.SERVING
    clock.now += 0.1
    assert progress.state is State.STALLED
    progress.completed()
    assert progress.state is State.SERVING
    clock.now += 10
    assert progress.state is State.STALLED
    progress.work_pending(0)
    assert progress.state is State.SERVING


def test_an_item_that_is_expected_to_take_longer_is_no_stall() -> None:
    progress, clock = _serving(stall_s=10.0)
    changes: list[State] = []
    progress.subscribe(lambda: changes.append(progress.state))
    progress.work_pending(1, patience_s=30.0)
    clock.now += 29.9
    assert progress.state is State.SERVING
    clock.now += 0.1
    assert progress.state is State.STALLED
    progress.work_pending(1, patience_s=60.0)
    assert changes == [State.SERVING]
    # Patience is that of the item under way, and never less than stall_s.
    progress.completed()
    progress.work_pending(1, patience_s=0.001)
    clock.now += 9.9
    assert progress.state is State.SERVING
    clock.now += 0.1
    assert progress.state is State.STALLED


def test_work_that_waits_while_loading_counts_from_the_end_of_loading() -> None:
    clock = Clock()
    progress = Progress(stall_s=10, clock=clock)
    progress.work_pending(1)
    clock.now += 60
    assert progress.state is State.LOADING
    progress.loaded()
    assert progress.state is State.SERVING
    clock.now += 10
    assert progress.state is State.STALLED


def test_listeners_hear_of_changes_and_not_of_every_step() -> None:
    progress, clock = _serving()
    heard: list[State] = []
    unsubscribe = progress.subscribe(lambda: heard.append(progress.state))
    for _ in range(100):
        progress.work_pending(1)
        progress.completed()
    assert heard == []
    clock.now += 10
    progress.completed()
    progress.drain()
    unsubscribe()
    progress.drain()
    assert heard == [State.SERVING, State.DRAINING]


def test_new_work_is_refused_while_loading_and_draining_but_not_while_stalled() -> None:
    progress = Progress()
    with pytest.raises(MeshError, match="loading") as refusal:
        progress.require_serving()
    assert refusal.value.reason_name == "NOT_SERVING"
    progress, clock = _serving()
    progress.work_pending(1)
    clock.now += 11
    assert progress.state is State.STALLED
    progress.require_serving()
    progress.drain()
    with pytest.raises(MeshError, match="draining"):
        progress.require_serving()


def test_a_stall_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="stall_s"):
        Progress(stall_s=0)


@given(st.lists(st.tuples(st.sampled_from(("pending", "completed", "tick")), st.integers(0, 5)), max_size=60))
def test_stalled_means_pending_and_no_completion_for_stall_s(events: list[tuple[str, int]]) -> None:
    progress, clock = _serving(stall_s=4)
    pending, since = 0, clock.now
    for kind, num in events:
        if kind == "pending":
            since = clock.now if pending == 0 else since
            pending = num
            progress.work_pending(num)
        elif kind == "completed":
            since = clock.now
            progress.completed(num)
        else:
            clock.now += num
        is_stalled = pending > 0 and clock.now - since >= 4
        assert progress.state is (State.STALLED if is_stalled else State.SERVING)
