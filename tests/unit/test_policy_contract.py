"""What every routing policy keeps, and what each promises beyond that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.policy import POLICIES, Candidate, RoutingRequest, make_policy
from radixmesh.daemons.runtime.errors import MeshError

REQUEST = RoutingRequest(request_id="r", prompt_ids=b"\1\0\0\0", cache_salt="")


def candidates_of(loads: dict[str, int]) -> list[Candidate]:
    return [Candidate(address=address, num_outstanding=load) for address, load in loads.items()]


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(rounds=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1), max_size=20))
def test_a_policy_picks_one_of_those_there_are_and_changes_nothing(name: str, rounds: list[dict[str, int]]) -> None:
    policy = make_policy(name)
    for loads in rounds:
        candidates = candidates_of(loads)
        before = list(candidates)
        assert 0 <= policy.pick(REQUEST, candidates) < len(candidates)
        assert candidates == before


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(num=st.integers(2, 6), num_requests=st.integers(1, 60))
def test_a_burst_does_not_all_go_to_one_replica(name: str, num: int, num_requests: int) -> None:
    """Load is counted at selection: no answer comes back during the burst."""
    policy, loads = make_policy(name), {f"s{i}": 0 for i in range(num)}
    for _ in range(num_requests):
        loads[f"s{policy.pick(REQUEST, candidates_of(loads))}"] += 1
    assert max(loads.values()) - min(loads.values()) <= 1


def test_round_robin_keeps_turns_when_one_comes_or_goes() -> None:
    policy = make_policy("round_robin")

    def pick(names: str) -> str:
        return names[policy.pick(REQUEST, candidates_of(dict.fromkeys(names, 0)))]

    assert [pick("abc"), pick("abc"), pick("ac"), pick("ac"), pick("abc")] == ["a", "b", "c", "a", "b"]


def test_least_load_picks_the_smallest_and_the_first_of_equals() -> None:
    policy = make_policy("least_load")
    assert policy.pick(REQUEST, candidates_of({"a": 3, "b": 1, "c": 1})) == 1


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(MeshError, match="least_load, round_robin"):
        make_policy("psychic")
