"""States of KV pages: the pool against a brute-force model, one owner per transition, pages that transfers pin."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.scheduler.pages import page_states
from radixmesh.daemons.scheduler.pages.integrity import find_deep_violation
from radixmesh.daemons.scheduler.pages.page_pool import PagePool
from radixmesh.daemons.scheduler.pages.page_states import TRANSITIONS, PageState
from radixmesh.daemons.scheduler.transfers.handovers import Handover
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget, digest_of

SCHEDULER = Path(page_states.__file__).parents[1]
NUM_PAGES = 12
# Transitions that take any free pages; all others are told which pages.
TAKING = ("take", "load")
GIVEN = sorted(set(TRANSITIONS) - set(TAKING))
PAGES = st.sets(st.integers(0, NUM_PAGES - 1), max_size=5)


class PageOwnership(RuleBasedStateMachine):
    """Any transitions, right and wrong ones, beside a dictionary that does the same page by page."""

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.states = dict.fromkeys(range(NUM_PAGES), PageState.FREE)
        self.generations = dict.fromkeys(range(NUM_PAGES), 0)
        self.num_wrong = 0

    @rule(name=st.sampled_from(TAKING), num=st.integers(0, 5))
    def takes(self, name: str, num: int) -> None:
        free = self._in(PageState.FREE)
        pages = getattr(self.pool, name)(min(num, len(free))).tolist()
        assert len(pages) == len(set(pages)) == min(num, len(free)) and set(pages) <= free
        for page in pages:
            self.states[page] = PageState(TRANSITIONS[name].target)
            self.generations[page] += 1

    @rule(name=st.sampled_from(GIVEN), pages=PAGES)
    def any_pages(self, name: str, pages: set[int]) -> None:
        self._move(name, pages)

    @rule(name=st.sampled_from(GIVEN), data=st.data())
    def right_pages(self, name: str, data: st.DataObject) -> None:
        right = {page for page, state in self.states.items() if state in TRANSITIONS[name].sources}
        if right and name != "quarantine":
            self._move(name, data.draw(st.sets(st.sampled_from(sorted(right)), max_size=4)))

    def _move(self, name: str, pages: set[int]) -> None:
        getattr(self.pool, name)(as_ints(sorted(pages)))
        transition = TRANSITIONS[name]
        for page in pages:
            if self.states[page] in transition.sources:
                self.states[page] = PageState(transition.target)
            else:
                self.states[page] = PageState.QUARANTINED
                self.num_wrong += 1

    def _in(self, state: PageState) -> set[int]:
        return {page for page, its in self.states.items() if its is state}

    @invariant()
    def states_and_counts_agree(self) -> None:
        pool = self.pool
        counts = {state: len(self._in(state)) for state in PageState}
        assert pool.counts() == pool.recount() == counts and sum(counts.values()) == NUM_PAGES
        for state in PageState:
            assert set(pool.pages_in(state).tolist()) == self._in(state)
        assert pool.is_balanced() and pool.num_misplaced == self.num_wrong
        assert pool.generations.tolist() == list(self.generations.values())

    def teardown(self) -> None:
        """The free list has exactly the free pages."""
        assert set(self.pool.take(self.pool.num_free).tolist()) == self._in(PageState.FREE)


TestPageOwnership = PageOwnership.TestCase
TestPageOwnership.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_every_state_is_reached_and_left() -> None:
    """Only quarantine is final within an epoch."""
    targets = {transition.target for transition in TRANSITIONS.values()} | {PageState.FREE}
    moving = [transition for name, transition in TRANSITIONS.items() if name != "quarantine"]
    assert targets == set(PageState)
    assert {source for transition in moving for source in transition.sources} == set(PageState) - {
        PageState.QUARANTINED
    }


def test_each_transition_is_made_by_its_owner_alone() -> None:
    """Calls of the pool's methods anywhere in the scheduler, against the table."""
    callers: dict[str, set[str]] = {name: set() for name in TRANSITIONS}
    for path in SCHEDULER.rglob("*.py"):
        if path.name != "page_pool.py":
            _find_callers(ast.parse(path.read_text()), "", callers)
    assert callers == {name: {t.owner} if t.owner else set() for name, t in TRANSITIONS.items()}


def _find_callers(node: ast.AST, caller: str, callers: dict[str, set[str]]) -> None:
    for child in ast.iter_child_nodes(node):
        inside = caller
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = f"{caller}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in callers:
            of = child.func.value
            if (of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")) == "pool":
                callers[child.func.attr].add(caller)
        _find_callers(child, inside, callers)


@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_pinned_pages_are_neither_granted_nor_found_nor_evicted_until_their_release(page_size: int, seed: int) -> None:
    """Any pages of a worker whose scheduler restarts, cached ones among them, then work that needs evictions."""
    random = np.random.default_rng(seed)
    world = World(page_size=page_size, num_pages=96 // page_size, eos_rate=0.0, decode_reserve_tokens=1)
    prompts = [random.integers(2, 40, 9).tolist() for _ in range(6)]
    for prompt in prompts:
        world.submit(prompt, stop=Stop(max_tokens=6))
    world.run()
    pinned = random.choice(world.group.num_pages, size=6, replace=False).astype(np.int32)
    snapshot = replace(world.snapshot(), pinned_pages=tuple(pinned.tolist()))
    world.epoch += 1
    world.executor.begin_epoch(world.epoch)
    world.planner.begin_epoch(world.epoch, world.group, snapshot)
    world.log.clear()
    _work(world, prompts)
    state = world.planner.state
    assert state is not None and state.pages.num_evicted, "the work was too little to evict anything"
    assert not _used(world) & set(pinned.tolist())
    assert set(state.pages.pool.pages_in(PageState.LEASED).tolist()) == set(pinned.tolist())

    assert world.planner.end_lease(np.append(pinned, np.int32(10_000))) == len(pinned)
    assert world.planner.end_lease(pinned) == 0, "a second event changes nothing"
    assert state.pages.pool.num_leased == 0 and state.pages.pool.is_balanced()
    _work(world, prompts)
    assert _used(world) & set(pinned.tolist())


def _work(world: World, prompts: list[list[int]]) -> None:
    records = [world.submit(prompt, stop=Stop(max_tokens=6)) for prompt in prompts]
    records += [world.submit([2 + i, 3, 4, 5, 6, 7], stop=Stop(max_tokens=12)) for i in range(20)]
    world.run()
    for record in records:
        assert record.tokens == world.expected(record.submission)


def _used(world: World) -> set[int]:
    """Pages that plans granted, or admitted as cached."""
    granted = {page for plan in world.log for grant in plan.grants for page in grant.pages.tolist()}
    return granted | {page for plan in world.log for admit in plan.admits for page in admit.cached_pages.tolist()}


def test_a_request_that_needs_leased_pages_waits_for_their_release_and_spins_not() -> None:
    """Alone, and 16 of 24 pages are a transfer's: it gives way once, and goes on where it was when they come back."""
    world = World(num_pages=24, eos_rate=0.0, max_total_len=24, decode_reserve_tokens=1, ahead=1)
    pinned = as_ints(range(16))
    _restart(world, pinned)
    record = world.submit([2, 3, 4, 5], stop=Stop(max_tokens=12))
    world.run()
    num_plans, state = len(world.log), world.planner.state
    assert record.finished is None and 0 < len(record.tokens) < 12 and state is not None
    assert world.planner.counters.num_retracted == 1, "it was admitted again without the pages that it lacked"
    for _ in range(5):
        world.run()
    assert len(world.log) == num_plans, "plans are made although nothing can be computed"
    world.planner.end_lease(pinned)
    world.run()
    assert record.tokens == world.expected(record.submission)


def test_a_request_that_has_all_pages_but_the_quarantined_ones_fails_once_the_leases_end() -> None:
    world = World(num_pages=24, eos_rate=0.0, max_total_len=24, decode_reserve_tokens=1, ahead=1)
    pinned = as_ints(range(8))
    _restart(world, pinned)
    state = world.planner.state
    assert state is not None
    state.pages.pool.quarantine(as_ints(range(20, 24)))
    record = world.submit([2, 3, 4, 5], stop=Stop(max_tokens=20))
    world.run()
    assert record.finished is None
    world.planner.end_lease(pinned)
    world.run()
    assert record.finished is not None and record.finished.error is not None
    assert record.finished.error.reason_name == "NEVER_FITS"


def _restart(world: World, pinned: np.ndarray) -> None:
    """A new scheduler on a worker whose transfers use these pages."""
    world.epoch += 1
    world.executor.begin_epoch(world.epoch)
    snapshot = replace(world.snapshot(), pinned_pages=tuple(pinned.tolist()))
    world.planner.begin_epoch(world.epoch, world.group, snapshot)


@pytest.mark.parametrize("is_gathered_first", [False, True])
def test_pages_of_a_prompt_that_is_handed_over_are_nobody_elses_until_they_are_gathered(
    is_gathered_first: bool,
) -> None:
    """Two requests compute one prompt at the same time: the cache has the pages of one, and those of the other are sent
    as well."""
    world = World(num_pages=64, inflight_prefix_min_tokens=1000, transfer_chunk_tokens=0)
    world.group = replace(world.group, has_transfers=True)
    world.begin_epoch()
    planner, prompt = world.planner, list(range(3, 33))
    state = planner.state
    assert state is not None
    target = KvTarget(
        transfer_id="t",
        regions=(b"r",),
        addresses=("a",),
        first_token=0,
        num_tokens=len(prompt),
        tokens_digest=digest_of("", as_ints(prompt)),
    )
    other = world.submit(prompt, stop=Stop(max_tokens=1, ignore_eos=True))
    sent = world.submit(prompt, send_kv_to=target)
    wanted: list[Handover] = []
    for _ in range(20):
        world.plan()
        wanted += (taken := planner.handovers.take_wanted())
        if taken and is_gathered_first:
            planner.handovers.released(taken[-1], state)
        world.execute()
        world.process()
    assert sent.finished and other.finished
    (handover,) = wanted
    assert handover.after_step == max(plan.step_id for plan in world.log if plan.chunks)
    assert not any(len(plan.decode_set) for plan in world.log if plan.decode_set is not None), "none decodes here"
    assert sent.finished.reason is FinishReason.HANDED_OVER and len(sent.tokens) == 1
    states = state.pages.pool.states_of(handover.pages)
    if is_gathered_first:
        assert not state.pages.pool.num_leased
        return
    assert {*states.tolist()} <= {PageState.LEASED, PageState.CACHED}
    assert PageState.LEASED in states.tolist(), "the cache has those of the other request"
    # Neither can be had by others, whatever they want.
    world.submit([40] * 20, stop=Stop(max_tokens=10, ignore_eos=True))
    world.run()
    assert (state.pages.pool.generations[handover.pages] == handover.generations).all()
    planner.handovers.released(handover, state)
    assert not state.pages.pool.num_leased and state.pages.pool.is_balanced()
    assert not find_deep_violation(state.pages.pool, state.pages.cache, state.table)
