"""Placement of experts over ranks by their load: copies of those in demand, and about as much work on each rank.

A pure function; nothing is moved by it. Source: DeepSeek's expert-parallel load balancer (EPLB, 2025): groups of
experts go to nodes, so that a row that picks from few groups reaches few nodes; within a node experts in demand are
copied, and the copies are packed onto ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSites:
    """Slots for experts. num_slots: of all ranks together, redundant copies among them; each rank has as many.

    num_groups: of a layer's experts, as the model's router knows them; 1: none. Raises ValueError for sizes that do
    not divide.
    """

    num_ranks: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.num_ranks, self.num_slots, self.num_nodes, self.num_groups) < 1:
            raise ValueError(f"{self}: all sizes are at least 1")
        if self.num_ranks % self.num_nodes:
            raise ValueError(f"{self.num_nodes} nodes do not divide {self.num_ranks} ranks")
        if self.num_slots % self.num_ranks:
            raise ValueError(f"{self.num_ranks} ranks do not divide {self.num_slots} slots of experts")


def place_by_load(loads: Sequence[float], sites: ExpertSites) -> list[list[int]]:
    """Experts of each rank, from the load of each expert of a layer. Equal inputs give equal results, on any machine.

    Raises ValueError where there are fewer slots than experts, or groups do not divide the experts.
    """
    num_experts = len(loads)
    if sites.num_slots < num_experts:
        raise ValueError(f"{sites.num_slots} slots do not hold {num_experts} experts")
    if num_experts % sites.num_groups:
        raise ValueError(f"{sites.num_groups} groups do not divide {num_experts} experts")
    num_nodes, num_groups = sites.num_nodes, sites.num_groups
    if num_groups % num_nodes:
        # Groups that cannot stay whole on nodes mean nothing to them.
        num_nodes = num_groups = 1
    size = num_experts // num_groups
    group_loads = [sum(loads[first : first + size]) for first in range(0, num_experts, size)]
    ranks_a_node, slots_a_node = sites.num_ranks // num_nodes, sites.num_slots // num_nodes
    by_rank: list[list[int]] = []
    for groups in pack(group_loads, num_nodes):
        experts = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        copies = _copies([loads[expert] for expert in experts], slots_a_node)
        # Of each slot its expert, and its share of that expert's load.
        slots = [index for index, number in enumerate(copies) for _ in range(number)]
        slot_loads = [loads[experts[index]] / copies[index] for index in slots]
        by_rank += [[experts[slots[slot]] for slot in packed] for packed in pack(slot_loads, ranks_a_node)]
    return by_rank


def pack(loads: Sequence[float], num_bins: int) -> list[list[int]]:
    """Numbers of the items in each bin, as many in each: the heaviest first, always into the lightest bin with room."""
    most = len(loads) // num_bins
    assert most * num_bins == len(loads), (len(loads), num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    lightest = [(0.0, number) for number in range(num_bins)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        load, number = heapq.heappop(lightest)
        bins[number].append(item)
        if len(bins[number]) < most:
            heapq.heappush(lightest, (load + loads[item], number))
    return bins


def balancedness(loads: Sequence[float]) -> float:
    """Mean over most of the ranks' loads, in (0, 1]: the part of their time that they compute, of a step's longest."""
    most = max(loads, default=0.0)
    return sum(loads) / len(loads) / most if most > 0 else 1.0


def _copies(loads: Sequence[float], num_slots: int) -> list[int]:
    """Copies of each expert, num_slots in all: each further one is of the expert whose copies have most to do."""
    copies = [1] * len(loads)
    busiest = [(-load, index) for index, load in enumerate(loads)]
    heapq.heapify(busiest)
    for _ in range(num_slots - len(loads)):
        _, index = heapq.heappop(busiest)
        copies[index] += 1
        heapq.heappush(busiest, (-loads[index] / copies[index], index))
    return copies
