"""Placement of experts by load: complete, even in number, groups whole on nodes, balanced where loads are skewed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.scheduler.planning.experts.expert_placement import ExpertSites, balancedness, place_by_load
from radixmesh.daemons.scheduler.results.expert_load import ExpertLoad


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], ExpertSites]:
    num_nodes, ranks_a_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_ranks = num_nodes * ranks_a_node
    num_groups = draw(st.sampled_from([1, num_nodes, 2 * num_nodes, 5]))
    num_experts = num_groups * draw(st.integers(1, 6))
    num_slots = num_ranks * (-(-num_experts // num_ranks) + draw(st.integers(0, 3)))
    loads = draw(st.lists(st.floats(0, 1e6), min_size=num_experts, max_size=num_experts))
    return loads, ExpertSites(num_ranks=num_ranks, num_slots=num_slots, num_nodes=num_nodes, num_groups=num_groups)


@given(cases())
def test_every_expert_has_a_place_and_every_rank_as_many(case: tuple[list[float], ExpertSites]) -> None:
    loads, sites = case
    by_rank = place_by_load(loads, sites)
    assert [len(experts) for experts in by_rank] == [sites.num_slots // sites.num_ranks] * sites.num_ranks
    assert {expert for experts in by_rank for expert in experts} == set(range(len(loads)))
    assert place_by_load(loads, sites) == by_rank
    if sites.num_groups % sites.num_nodes == 0:
        size, ranks_a_node = len(loads) // sites.num_groups, sites.num_ranks // sites.num_nodes
        nodes: dict[int, set[int]] = {}
        for rank, experts in enumerate(by_rank):
            for expert in experts:
                nodes.setdefault(expert // size, set()).add(rank // ranks_a_node)
        assert all(len(of_group) == 1 for of_group in nodes.values())


def rank_loads(loads: list[float], by_rank: list[list[int]]) -> list[float]:
    """Load of each rank, where copies of an expert share its load."""
    copies = [sum(experts.count(expert) for experts in by_rank) for expert in range(len(loads))]
    return [sum(loads[expert] / copies[expert] for expert in experts) for experts in by_rank]


def test_a_skewed_load_is_balanced() -> None:
    """64 experts with loads of Zipf on 8 ranks: contiguous shares, sorted by load, and with 16 redundant slots."""
    loads = [1000.0 / (1 + rank) for rank in range(64)]
    random.Random(1).shuffle(loads)
    contiguous = [list(range(8 * rank, 8 * rank + 8)) for rank in range(8)]
    packed = place_by_load(loads, ExpertSites(num_ranks=8, num_slots=64))
    redundant = place_by_load(loads, ExpertSites(num_ranks=8, num_slots=80))
    values = [balancedness(rank_loads(loads, by_rank)) for by_rank in (contiguous, packed, redundant)]
    # The busiest expert alone is 1.7 times a rank's part: no placement without copies does better than 0.59.
    assert values[0] < values[1] < 0.6 and values[2] > 0.95, values


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"num_ranks": 3, "num_slots": 9, "num_nodes": 2}, "nodes do not divide"),
        ({"num_ranks": 3, "num_slots": 8}, "ranks do not divide"),
        ({"num_ranks": 0, "num_slots": 8}, "at least 1"),
        ({"num_ranks": 2, "num_slots": 6}, "do not hold 8 experts"),
        ({"num_ranks": 2, "num_slots": 8, "num_groups": 3}, "groups do not divide 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        place_by_load([1.0] * 8, ExpertSites(**sizes))


def test_load_is_that_of_recent_steps() -> None:
    load = ExpertLoad()
    assert load.balancedness == 0.0
    for rows in ((30, 10), (), (0, 0)):
        load.add(rows)
        assert load.balancedness == pytest.approx(2 / 3), "steps without rows change nothing"
    for _ in range(1000):
        load.add((10, 10))
    assert load.balancedness > 0.99
    load.add((5, 1, 1))
    assert load.rows == [5, 1, 1], "another number of ranks begins anew"


def test_balancedness_of_idle_ranks_is_one() -> None:
    assert balancedness([]) == balancedness([0.0, 0.0]) == 1.0 and balancedness([4.0, 2.0, 0.0]) == 0.5
