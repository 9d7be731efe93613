"""Every placement policy's contract, and what each promises beyond that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.placement.policies import POLICIES, Candidates, PlacementPolicy, Session, make_policy
from radixmesh.daemons.runtime.errors import MeshError

LENGTH = 1000


def candidates_of(loads: dict[str, int], **columns: list[int]) -> Candidates:
    given = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    none = np.zeros(len(loads), dtype=np.int64)
    return Candidates(
        names=list(loads),
        rows=np.arange(len(loads)),
        num_outputs=np.array(list(loads.values()), dtype=np.int64),
        matched_tokens=given.get("matched_tokens", none),
        queued_tokens=given.get("queued_tokens", none),
        free_tokens=given.get("free_tokens", none + 100_000),
        cached_tokens=given.get("cached_tokens", none),
    )


def pick(policy: PlacementPolicy, candidates: Candidates, first_key: int = 7) -> int:
    return policy.pick(LENGTH, first_key, candidates)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(rounds=st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9), min_size=1), max_size=20))
def test_a_policy_picks_one_of_those_there_are_and_changes_nothing(name: str, rounds: list[dict[str, int]]) -> None:
    policy = make_policy(name)
    for loads in rounds:
        candidates = candidates_of(loads)
        before = [column.copy() for column in (candidates.num_outputs, candidates.matched_tokens)]
        assert 0 <= pick(policy, candidates) < len(loads)
        after = (candidates.num_outputs, candidates.matched_tokens)
        assert all((one == other).all() for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["cache_aware", "least_load", "round_robin"])
@given(num=st.integers(2, 6), num_requests=st.integers(1, 60))
def test_a_burst_of_unknown_prompts_is_spread_evenly(name: str, num: int, num_requests: int) -> None:
    """Load is counted at selection: no answer comes back during the burst."""
    policy, loads = make_policy(name), {f"s{i}": 0 for i in range(num)}
    for _ in range(num_requests):
        queued = [LENGTH * count for count in loads.values()]
        loads[f"s{pick(policy, candidates_of(loads, queued_tokens=queued))}"] += 1
    assert max(loads.values()) - min(loads.values()) <= 1


def test_round_robin_keeps_turns_when_one_comes_or_goes() -> None:
    policy = make_policy("round_robin")

    def turn(names: str) -> str:
        return names[pick(policy, candidates_of(dict.fromkeys(names, 0)))]

    assert [turn("abc"), turn("abc"), turn("ac"), turn("ac"), turn("abc")] == ["a", "b", "c", "a", "b"]


def test_least_load_picks_the_smallest_and_the_first_of_equals() -> None:
    assert pick(make_policy("least_load"), candidates_of({"a": 3, "b": 1, "c": 1})) == 1


def test_power_of_two_never_picks_the_most_loaded_of_two() -> None:
    policy = make_policy("power_of_two")
    assert {pick(policy, candidates_of({"a": 9, "b": 0})) for _ in range(50)} == {1}


def test_prefix_hash_keeps_a_prefix_at_one_replica_until_that_has_more_than_its_share() -> None:
    policy = make_policy("prefix_hash")
    names = {f"s{i}": 8 for i in range(8)}
    home = pick(policy, candidates_of(names))
    assert {pick(policy, candidates_of(names)) for _ in range(5)} == {home}
    crowded = {name: 40 if index == home else 8 for index, (name, _) in enumerate(names.items())}
    assert pick(policy, candidates_of(crowded)) != home
    # Most prefixes stay where they are when a replica goes.
    keys = np.random.default_rng(0).integers(0, 1 << 64, size=400, dtype=np.uint64).tolist()
    before = [list(names)[pick(policy, candidates_of(names), key)] for key in keys]
    fewer = {name: load for name, load in names.items() if name != "s3"}
    after = [list(fewer)[pick(policy, candidates_of(fewer), key)] for key in keys]
    assert all(one == other for one, other in zip(before, after, strict=True) if one != "s3")


def test_cache_threshold_follows_the_gateway_it_is_named_after() -> None:
    policy = make_policy("cache_threshold")
    assert pick(policy, candidates_of({"a": 3, "b": 9}, matched_tokens=[0, 600])) == 1
    assert pick(policy, candidates_of({"a": 3, "b": 9}, matched_tokens=[0, 400], cached_tokens=[10, 20])) == 0
    assert pick(policy, candidates_of({"a": 3, "b": 60}, matched_tokens=[0, 900])) == 0


def test_cache_aware_goes_where_the_prefix_is_until_its_queue_is_longer_than_the_prefill() -> None:
    policy = make_policy("cache_aware")

    def chosen(queued: int) -> int:
        columns = {"matched_tokens": [900, 0], "queued_tokens": [queued, 0], "free_tokens": [5000, 5000]}
        return pick(policy, candidates_of({"a": 1, "b": 0}, **columns))

    assert [chosen(0), chosen(700), chosen(1000)] == [0, 0, 1]


def test_cache_aware_computes_a_prefix_again_where_that_holds_up_the_fewest() -> None:
    policy = make_policy("cache_aware")

    def chosen(outputs: int) -> int:
        return pick(policy, candidates_of({"a": 8, "b": outputs}, matched_tokens=[900, 0], queued_tokens=[1500, 0]))

    assert [chosen(0), chosen(2), chosen(8)] == [1, 1, 0]
    # With nothing cached, a place with fewer outputs beats one with a somewhat shorter queue.
    assert pick(policy, candidates_of({"a": 8, "b": 4}, queued_tokens=[0, 900])) == 1


def test_a_crowd_at_a_place_makes_a_second_prefill_no_dearer_without_end() -> None:
    # A prefix that many share has to be at more places than one if slots are short.
    loads = {"a": 120, "b": 64}
    columns = {"matched_tokens": [900, 0], "queued_tokens": [3000, 0], "free_tokens": [0, 0]}
    assert pick(make_policy("cache_aware"), candidates_of(loads, **columns)) == 1


def test_cache_aware_keeps_outputs_even_where_all_replicas_have_many() -> None:
    """A prompt that nobody has waits for another one's prefill rather than sit with half as many outputs again."""
    policy = make_policy("cache_aware")
    assert pick(policy, candidates_of({"a": 12, "b": 20}, queued_tokens=[LENGTH, 0])) == 0
    assert pick(policy, candidates_of({"a": 12, "b": 14}, queued_tokens=[LENGTH, 0])) == 1


def test_cache_aware_counts_what_a_prompt_would_evict() -> None:
    loads = {"full": 1, "free": 1}
    candidates = candidates_of(loads, queued_tokens=[0, 300], free_tokens=[0, 5000])
    assert pick(make_policy("cache_aware"), candidates) == 1


def test_a_second_copy_of_a_prefix_costs_its_prefill_twice_where_it_takes_another_prefixs_place() -> None:
    def chosen(free: int) -> int:
        columns = {"matched_tokens": [900, 0], "queued_tokens": [3200, 0], "free_tokens": [free, free]}
        return pick(make_policy("cache_aware"), candidates_of({"a": 8, "b": 8}, **columns))

    assert [chosen(0), chosen(5000)] == [0, 1]


def test_cache_aware_gives_a_slower_replica_less_but_not_nothing() -> None:
    policy, slowness, num = make_policy("cache_aware"), np.array([1.0, 2.0]), [0, 0]
    for _ in range(30):
        columns = {"queued_tokens": [LENGTH * count for count in num]}
        candidates = replace(candidates_of({"fast": num[0], "slow": num[1]}, **columns), slowness=slowness)
        num[pick(policy, candidates)] += 1
    assert num[0] > 1.5 * num[1] > 0


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(MeshError, match="least_load, power_of_two"):
        make_policy("psychic")


def test_a_session_stays_at_its_replica_until_that_is_gone_and_then_goes_on_where_it_was_sent() -> None:
    policy = make_policy("session")

    def chosen(loads: dict[str, int], session: int, **columns: list[int]) -> str:
        return list(loads)[policy.pick(LENGTH, 7, candidates_of(loads, **columns), session)]

    loads = {"a": 0, "b": 0, "c": 0}
    home = chosen(loads, 5)
    busy = {name: 50 if name == home else 0 for name in loads}
    matched = [0 if name == home else 900 for name in loads]
    assert chosen(busy, 5, matched_tokens=matched) == home, "neither load nor a longer prefix elsewhere counts"
    assert chosen(busy, 6) != home, "another session goes by cost"
    assert chosen(busy, 0) != home, "as one without a session"
    # A replica that is gone, full or in trouble is no candidate.
    fewer = {name: 0 for name in loads if name != home}
    second = chosen(fewer, 5)
    assert second != home and chosen(loads, 5) == second, "its KV is there by now"


def test_the_sessions_that_were_least_recently_seen_are_forgotten() -> None:
    policy = Session()
    policy.MAX_SESSIONS = 100  # type: ignore[misc]
    candidates = candidates_of({"a": 0, "b": 0})
    for session in range(1, 1000):
        policy.pick(LENGTH, 7, candidates, session)
        policy.pick(LENGTH, 7, candidates, 1)
    assert len(policy) == 100
    assert policy.pick(LENGTH, 7, candidates_of({"b": 0, "a": 9}), 1) == 1, "this one was always recent"
