"""The length of drafts follows what they yield and cost: a made-up device, whose time is counted."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from radixmesh.daemons.worker.speculation.adaptive import DraftLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND

PLAIN_NS = 4_000_000
K = 4
_BEGINS = itertools.count(0, 10**15)
"""Times at which runs begin, one behind the other."""


def _run(
    lengths: DraftLengths,
    num_rows: int,
    cost: float,
    acceptance: float,
    num_tokens: int,
    *,
    lag: int = 3,
    has_chunks: Callable[[int], bool] = lambda number: False,
) -> float:
    """Time for so many tokens a row, over that without drafts. Each draft is right with the probability `acceptance`
    if those before it are. has_chunks: of a step, by its number: its time is not told."""
    rng = np.random.default_rng(num_rows)
    slots = np.arange(num_rows, dtype=np.int32)
    flying: deque[tuple[np.ndarray, int, tuple[int, int] | None, np.ndarray]] = deque()
    began_ns = total_ns = next(_BEGINS)
    yielded = 0
    numbers = itertools.count()
    while yielded < num_tokens * num_rows:
        is_alone = not has_chunks(next(numbers))
        most = lengths.choose(slots, is_alone=is_alone)
        is_right = rng.random((num_rows, K)) < acceptance
        counts = (1 + np.cumprod(is_right, axis=1).sum(axis=1) * (most > 0)).astype(np.int32)
        duration = int(PLAIN_NS * (cost if most else 1.0) * rng.uniform(0.98, 1.02))
        times = (total_ns, total_ns + duration) if is_alone else None
        flying.append((counts, most, times, np.full(num_rows, most, np.int32)))
        total_ns, yielded = total_ns + duration, yielded + int(counts.sum())
        if len(flying) > lag:
            lengths.observe(slots, *flying.popleft())
    return (total_ns - began_ns) / (yielded / num_rows * PLAIN_NS)


class _Network:
    """A device whose drafts are a network's: it lacks tokens of steps that did not draft, computes so many of them in
    one that does, at `per_token` of a plain step each, and drafts for rows that it has caught up with."""

    def __init__(self, num_rows: int, cost: float, *, per_token: float, lag: int = 3) -> None:
        self._slots, self._cost, self._per_token = np.arange(num_rows, dtype=np.int32), cost, per_token
        self._behind = np.zeros(num_rows, np.int64)
        self._random = np.random.default_rng(num_rows)
        self._flying: deque[tuple[np.ndarray, np.ndarray, int, tuple[int, int]]] = deque()
        self._lag = lag

    def admitted(self) -> None:
        """Other requests took all slots."""
        self._behind[:] = 0
        self._flying.clear()

    def run(self, lengths: DraftLengths, acceptance: float, num_tokens: int) -> float:
        """As _run()."""
        began_ns = total_ns = next(_BEGINS)
        yielded, num_rows = 0, len(self._slots)
        while yielded < num_tokens * num_rows:
            most = lengths.choose(self._slots, is_alone=True)
            counts, drafted, scale = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32), 1.0
            if most:
                computed = np.minimum(self._behind, MOST_BEHIND)
                self._behind -= computed
                drafted = np.where(self._behind == 0, K, 0).astype(np.int32)
                is_right = self._random.random((num_rows, K)) < acceptance
                counts += (np.cumprod(is_right, axis=1).sum(axis=1) * (drafted > 0)).astype(np.int32)
                scale = self._cost + self._per_token * float(computed.mean())
            # Tokens that a row with drafts yields are computed with its next drafts.
            self._behind = np.where(drafted > 0, 0, self._behind + counts)
            duration = int(PLAIN_NS * scale * self._random.uniform(0.98, 1.02))
            self._flying.append((counts, drafted, most, (total_ns, total_ns + duration)))
            total_ns, yielded = total_ns + duration, yielded + int(counts.sum())
            if len(self._flying) > self._lag:
                counts, drafted, most, times = self._flying.popleft()
                lengths.observe(self._slots, counts, most, times, drafted)
        return (total_ns - began_ns) / (yielded / num_rows * PLAIN_NS)


def _of_network(num_slots: int) -> DraftLengths:
    return DraftLengths(num_slots, K, catch_up=MOST_BEHIND)


@pytest.mark.parametrize("num_rows", [1, 16, 256])
@pytest.mark.parametrize(("cost", "per_token"), [(1.1, 0.002), (1.4, 0.02), (3.0, 0.05)])
def test_a_network_that_is_wrong_costs_less_than_a_fiftieth(num_rows: int, cost: float, per_token: float) -> None:
    """Its trials cost more: what lapsed is computed first."""
    assert _Network(num_rows, cost, per_token=per_token).run(_of_network(256), 0.0, 1500) < 1.02


@pytest.mark.parametrize(("cost", "per_token"), [(1.1, 0.001), (1.4, 0.004), (1.5, 0.005)])
def test_a_network_that_lapsed_for_long_drafts_again_when_that_pays(cost: float, per_token: float) -> None:
    """A trial goes on until the network has caught up, and the steps in which it does are not taken for its cost."""
    device, lengths = _Network(1, cost, per_token=per_token), _of_network(4)
    device.run(lengths, 0.0, 2000)
    # The next trial may be a while away: all of them together cost a hundredth of the time.
    device.run(lengths, 0.8, 3000)
    per_step = 1 + sum(0.8**n for n in range(1, K + 1))
    assert 1 / device.run(lengths, 0.8, 1000) > 0.9 * per_step / (cost + per_token * per_step)


def test_a_network_that_would_cost_too_much_to_catch_up_waits_for_a_request_that_it_knows() -> None:
    device, lengths = _Network(1, 1.4, per_token=0.1), _of_network(4)
    device.run(lengths, 0.0, 2000)
    assert 0.99 < device.run(lengths, 0.8, 1000) < 1.01
    lengths.admitted(0)
    device.admitted()
    assert 1 / device.run(lengths, 0.8, 1000) > 1.5


@pytest.mark.parametrize("seed", range(12))
def test_loads_that_change_never_lose_more_than_a_fiftieth(seed: int) -> None:
    """Any number of rows, cost and acceptance, one after the other, of a network or without KV of its own."""
    rng = random.Random(seed)
    plain_ns = drafting_ns = 0.0
    lengths = _of_network(256) if seed % 2 else DraftLengths(256, K)
    for _ in range(6):
        num_rows, cost = rng.choice((1, 3, 17, 64, 200)), rng.uniform(1.02, 4.0)
        acceptance, num_tokens = rng.choice((0.0, 0.1, 0.5, 0.9)), 1500
        if seed % 2:
            taken = _Network(num_rows, cost, per_token=0.02).run(lengths, acceptance, num_tokens)
        else:
            taken = _run(lengths, num_rows, cost, acceptance, num_tokens)
        plain_ns, drafting_ns = plain_ns + 1.0, drafting_ns + taken
    assert drafting_ns / plain_ns < 1.02


@pytest.mark.parametrize(("num_rows", "cost"), [(1, 1.1), (1, 1.3), (8, 1.2), (64, 1.9), (256, 3.6)])
def test_drafts_that_are_wrong_cost_less_than_a_fiftieth(num_rows: int, cost: float) -> None:
    lengths = DraftLengths(256, K)
    assert _run(lengths, num_rows, cost, 0.0, 600) < 1.02
    # Requests that begin later know what was usual.
    for slot in range(num_rows):
        lengths.admitted(slot)
    assert _run(lengths, num_rows, cost, 0.0, 600) < 1.02


@pytest.mark.parametrize(("num_rows", "cost", "speed_up"), [(1, 1.12, 2.3), (8, 1.2, 2.1), (64, 1.9, 1.35)])
def test_drafts_that_are_right_are_made(num_rows: int, cost: float, speed_up: float) -> None:
    """2.77 tokens a step at an acceptance of 0.7."""
    assert 1 / _run(DraftLengths(64, K), num_rows, cost, 0.7, 600) > speed_up


def test_drafts_are_off_where_the_batch_makes_them_dear_and_on_again_where_it_does_not() -> None:
    lengths = DraftLengths(256, K)
    assert _run(lengths, 1, 1.12, 0.7, 300) < 0.5
    assert _run(lengths, 256, 3.6, 0.7, 300) < 1.02
    assert _run(lengths, 1, 1.12, 0.7, 300) < 0.5


def test_a_text_that_begins_to_repeat_itself_is_drafted_soon() -> None:
    lengths = DraftLengths(4, K)
    _run(lengths, 1, 1.12, 0.0, 300)
    assert 1 / _run(lengths, 1, 1.12, 0.9, 200) > 2.5


def test_steps_with_chunks_lose_no_trial() -> None:
    """Their time tells nothing of drafts: a trial in one of them would be waited for ever after."""
    lengths = DraftLengths(4, K)
    assert 1 / _run(lengths, 1, 1.12, 0.7, 600, has_chunks=lambda number: number % 3 != 0) > 2
    # Their tokens still say what drafts yield.
    assert _run(lengths, 1, 1.12, 0.0, 600, has_chunks=lambda number: True) < 1.02


def test_a_new_request_begins_with_what_drafts_yielded_of_late() -> None:
    """Its first step drafts where drafts pay for all others, and does not where they are never right."""
    for acceptance, is_drafted in ((0.9, True), (0.0, False)):
        lengths = DraftLengths(64, K)
        _run(lengths, 8, 1.4, acceptance, 600)
        if is_drafted:  # A single step tells little.
            drafted = np.full(8, K, np.int32)
            lengths.observe(np.arange(8, dtype=np.int32), np.ones(8, np.int32), K, None, drafted)
        fresh = np.arange(8, 16, dtype=np.int32)
        for slot in fresh:
            lengths.admitted(int(slot))
        chosen = [lengths.choose(fresh, is_alone=False) for _ in range(8)]
        assert chosen == [K * is_drafted] * 8, acceptance


_OF_A_SMALL_MODEL = 2.17
"""Cost measured on an H200 for a Llama of 150 million parameters and its EAGLE-3 head: 0.93 and 0.43 ms a step."""
_SAMPLED, _GREEDY = (0.374, 0.132, 0.071, 0.039), (0.748, 0.526, 0.430, 0.289)
"""Drafts of each position that were accepted there, with those before it."""


def _serve(
    lengths: DraftLengths,
    by_position: tuple[float, ...],
    cost: float,
    *,
    num_requests: int,
    is_sampled: bool,
    seed: int,
) -> float:
    """Speed over that without drafts, of requests for 256 tokens one after the other, whose network drafts. Catching up
    behind more than a few plain steps takes as long as three and a half of them: it is launched kernel by kernel. One
    step of 400 waits for something else, and tells a time that is long beyond all others."""
    rng = np.random.default_rng(seed)
    slots, now = np.zeros(1, np.int32), next(_BEGINS)
    taken_ns = yielded = 0
    for _ in range(num_requests):
        lengths.admitted(0, is_sampled=is_sampled)
        flying: deque[tuple[np.ndarray, int, tuple[int, int], np.ndarray]] = deque()
        behind, left = 0, 256
        # The worker waited for the request.
        now += 50 * PLAIN_NS
        while left > 0:
            most = lengths.choose(slots, is_alone=True)
            count, drafted, scale = 1, 0, 1.0
            if most:
                scale = cost + (3.5 if behind > K + 1 else 0.0)
                behind = max(0, behind - MOST_BEHIND)
                drafted = K if behind == 0 else 0
                count += sum(rng.random() < part for part in by_position) if drafted else 0
            behind = 0 if drafted else behind + count
            duration = int(PLAIN_NS * scale * rng.uniform(0.95, 1.05))
            is_held_up = rng.random() < 1 / 400
            told = duration + (500 * PLAIN_NS if is_held_up else 0)
            flying.append((np.array([count], np.int32), most, (now, now + told), np.array([drafted], np.int32)))
            now, taken_ns = now + told, taken_ns + duration
            left, yielded = left - count, yielded + count
            if len(flying) > 2:
                lengths.observe(slots, *flying.popleft())
        for step in flying:
            lengths.observe(slots, *step)
    return yielded * PLAIN_NS / taken_ns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("by_position", [_SAMPLED, _GREEDY])
@pytest.mark.parametrize("cost", [1.1, _OF_A_SMALL_MODEL, 3.0])
def test_requests_one_after_the_other_are_nearly_as_fast_as_the_better_way(
    cost: float, by_position: tuple[float, ...], seed: int
) -> None:
    """Some thousand steps tell enough, which is kept across the requests of a worker."""
    lengths = _of_network(8)
    sizes = {"is_sampled": by_position is _SAMPLED, "seed": seed}
    assert _serve(lengths, by_position, cost, num_requests=12, **sizes) > 0.98
    better = max(1.0, (1 + sum(by_position)) / cost)
    assert _serve(lengths, by_position, cost, num_requests=30, **sizes) > 0.98 * better


def test_the_time_of_a_step_is_that_since_the_end_of_the_one_before() -> None:
    """A device that waits for the host is done with a step of drafts nearly as soon as with a plain one."""
    lengths, slots = DraftLengths(4, K), np.zeros(1, np.int32)
    rng, now, yielded = np.random.default_rng(0), 0, 0
    while yielded < 4000:
        most = lengths.choose(slots, is_alone=True)
        count = 1 + (sum(rng.random() < part for part in _SAMPLED) if most else 0)
        # The device runs at the end of the time that a step takes the host.
        now, on_device = now + (900 if most else 400), 250 if most else 200
        lengths.observe(slots, np.array([count], np.int32), most, (now - on_device, now), np.array([most], np.int32))
        yielded += count
    assert yielded * 400 / now > 0.98


def test_a_step_that_waited_for_a_compiler_ends_no_drafting() -> None:
    lengths, slots = DraftLengths(4, K), np.zeros(1, np.int32)
    chosen: list[int] = []
    now = 0
    for number in range(400):
        chosen.append(lengths.choose(slots, is_alone=True))
        most = chosen[-1]
        took = PLAIN_NS * (1.2 if most else 1.0) + (10**9 if number in (20, 120) else 0)
        counts, drafted = np.array([4 if most else 1], np.int32), np.array([most], np.int32)
        lengths.observe(slots, counts, most, (now, now + int(took)), drafted)
        now += int(took)
    assert sum(most > 0 for most in chosen[10:]) > 370


def test_greedy_and_sampled_requests_have_usual_yields_of_their_own() -> None:
    lengths = _of_network(8)
    for seed in range(6):
        _serve(lengths, _GREEDY, _OF_A_SMALL_MODEL, num_requests=4, is_sampled=False, seed=seed)
        _serve(lengths, _SAMPLED, _OF_A_SMALL_MODEL, num_requests=4, is_sampled=True, seed=seed)
    for is_sampled in (False, True):
        lengths.admitted(0, is_sampled=is_sampled)
        assert (lengths.choose(np.zeros(1, np.int32), is_alone=False) == 0) is is_sampled
