"""Violations of the page invariant, injected while requests run: counted, logged, quarantined; serving goes on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.planner_world import Record, World

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.pages.page_pool import PageState
from radixmesh.daemons.scheduler.planning import counters as planner_counters
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState


def _leak(state: EpochState) -> None:
    """Somebody took a page and forgot it."""
    state.pages.pool.take(1)


def _free_an_owned_page(state: EpochState) -> None:
    """A page was freed while a slot still writes to it."""
    state.pages.pool.give_back(_an_owned_page(state))


def _free_a_free_page(state: EpochState) -> None:
    state.pages.pool.give_back(state.pages.pool.pages_in(PageState.FREE)[:1])


def _free_a_cached_page(state: EpochState) -> None:
    state.pages.pool.give_back(state.pages.pool.pages_in(PageState.CACHED)[:1])


def _lose_count(state: EpochState) -> None:
    """A slot is wrong about how much it owns."""
    slot = int(np.flatnonzero(state.table.live)[0])
    state.table.num_owned[slot] += 1


def _give_a_page_twice(state: EpochState) -> None:
    """Two slots hold one page."""
    first, second = np.flatnonzero(state.table.live)[:2].tolist()
    state.table.append_pages(np.array([second], np.int32), np.array([1], np.int32), _an_owned_page(state, first))
    state.table.num_owned[second] += 1


def _an_owned_page(state: EpochState, slot: int | None = None) -> np.ndarray:
    held = state.table.pages_of(int(np.flatnonzero(state.table.live)[0]) if slot is None else slot)
    return held[state.pages.pool.states_of(held) == PageState.OWNED][-1:].copy()


class Log:
    """In place of the module's logger."""

    def __init__(self, logged: list[dict[str, object]]) -> None:
        self._logged = logged

    def error(self, event: str, **fields: object) -> None:
        self._logged.append({"event": event, **fields})


VIOLATIONS = [
    _leak,
    _free_an_owned_page,
    _free_a_free_page,
    _free_a_cached_page,
    _lose_count,
    _give_a_page_twice,
]


@pytest.mark.parametrize("violation", VIOLATIONS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_serving_goes_on_after_a_violation(
    violation: Callable[[EpochState], None], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, object]] = []
    monkeypatch.setattr(planner_counters, "log", Log(logged))
    world = World(page_size=page_size, num_pages=400 // page_size, eos_rate=0.0, check_invariants=False)
    records = [world.submit([2 + i, 3, 4, 5, 6], stop=Stop(max_tokens=40)) for i in range(4)]
    num_epochs = _steps(world, 10)
    state = world.planner.state
    assert state is not None and state.pages.pool.num_cached > 0
    violation(state)
    num_epochs += _steps(world, 2)
    counters = world.planner.counters
    assert counters.num_page_violations >= 1
    assert logged and logged[0]["event"] == "page_invariant_violation"
    assert any("step" in plan for plan in logged[0]["last_plans"])  # type: ignore[attr-defined]
    records += [world.submit([20 + i, 3, 4], stop=Stop(max_tokens=10)) for i in range(6)]
    num_epochs += _steps(world, 400)
    assert counters.num_page_violations <= 3 and num_epochs <= 1
    for record in records:
        assert record.finished is not None
    _check_untouched(world, records, violation)
    state = world.planner.state
    assert state is not None
    pool = state.pages.pool
    assert sum(pool.recount().values()) == pool.num_pages and pool.num_owned == 0
    assert pool.num_quarantined <= 2


def _check_untouched(world: World, records: list[Record], violation: Callable[[EpochState], None]) -> None:
    """Outputs are right, whatever was wrong with the books: what is in doubt is never given out again."""
    for record in records:
        assert record.tokens == world.expected(record.submission), violation.__name__


def _steps(world: World, num: int) -> int:
    """Steps; a refusal, and books beyond repair, begin a new epoch, as the engine does. Returns how many did."""
    num_epochs = 0
    for _ in range(num):
        try:
            world.plan()
            world.execute()
            world.process()
        except MeshError as error:
            assert "beyond repair" in str(error) or "another slot still holds it" in str(error)
            world.plans.clear()
            world.planner.end_epoch(0, error)
            world.collect()
            world.begin_epoch()
            num_epochs += 1
    return num_epochs
