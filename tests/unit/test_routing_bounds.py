"""Bounds that bench/router_policies.py prints: no schedule of a small case is better, by brute force."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bench_modules import bench_imports

from radixmesh.daemons.router.placement.prompt_keys import BLOCK

with bench_imports():
    from routing.bounds import best_hit_rate, first_burst_s
    from routing.replica_model import StepCost

Prompts = list[tuple[int, list[bytes]]]
COST = StepCost(base=0.0, row=0.0, token=1.0)


def prompts_of(names: list[str]) -> Prompts:
    """A letter is a block; each prompt has a token of its own behind them."""
    return [(BLOCK * len(name) + 1, [name[: i + 1].encode() for i in range(len(name))]) for name in names]


def least_quantile(prompts: Prompts, replicas: int, left_out: int) -> float:
    """The least time in which all but left_out prompts can be computed, of all assignments."""
    least = float("inf")
    for replicas_of in itertools.product(range(replicas + 1), repeat=len(prompts)):
        if replicas_of.count(replicas) > left_out:
            continue
        times = []
        for replica in range(replicas):
            mine = [prompt for replica_of, prompt in zip(replicas_of, prompts, strict=True) if replica_of == replica]
            blocks = {key for _, keys in mine for key in keys}
            times.append(BLOCK * len(blocks) + sum(tokens - BLOCK * len(keys) for tokens, keys in mine))
        least = min(least, max(times))
    return least


def most_hits(prompts: Prompts, room: int) -> int:
    """The most tokens that a cache of so many blocks finds, of all choices what to keep after each prompt."""
    states: dict[frozenset[bytes], int] = {frozenset(): 0}
    for _, keys in prompts:
        reached: dict[frozenset[bytes], int] = {}
        for cached, hits in states.items():
            known = next((i for i, key in enumerate(keys) if key not in cached), len(keys))
            everything = cached | set(keys)
            for kept in itertools.combinations(sorted(everything), min(room, len(everything))):
                reached[frozenset(kept)] = max(reached.get(frozenset(kept), 0), hits + BLOCK * known)
        states = reached
    return max(states.values())


NAMES = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(names=NAMES, replicas=st.integers(1, 2), left_out=st.integers(0, 2))
def test_no_assignment_of_a_burst_is_faster_than_its_bound(names: list[str], replicas: int, left_out: int) -> None:
    prompts = prompts_of(names)
    # Of so many requests a share of 1 - left_out / (n - 1) leaves out just those.
    num_requests = 101
    share = (num_requests - 1 - left_out) / (num_requests - 1)
    bound = first_burst_s(prompts, replicas=replicas, num_requests=num_requests, cost=COST, share=share)
    assert bound <= least_quantile(prompts, replicas, left_out) + 1e-6


@settings(max_examples=60, deadline=None)
@given(names=NAMES, room=st.integers(1, 3))
def test_no_eviction_finds_more_than_the_bound(names: list[str], room: int) -> None:
    prompts = prompts_of(names)
    total = sum(tokens for tokens, _ in prompts)
    assert best_hit_rate(prompts, 1, room * BLOCK) == pytest.approx(most_hits(prompts, room) / total)


def test_prefixes_are_not_divided_among_replicas() -> None:
    """Three on two replicas: one of them computes two, whatever the mean is."""
    prompts = prompts_of(["aaa", "bbb", "ccc"])
    bound = first_burst_s(prompts, replicas=2, num_requests=101, cost=COST, share=1.0)
    assert bound == least_quantile(prompts, 2, 0) == 2 * (3 * BLOCK + 1)
