"""The radix cache against the brute-force oracle: any sequence of operations, every policy, several page sizes."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.cache_driver import NAMESPACES, CacheDriver, run_random
from support.cache_oracle import SCORES, TreeMirror

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.scheduler.cache.eviction import EVICTION_POLICIES, make_eviction_policy
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.radix_cache import RadixCache

_NUM_PAGES = 40

NAMES = st.sampled_from(NAMESPACES)
# A page is one of three; the first two differ in their last token only, the third in its first.
PAGES = st.lists(st.integers(0, 2), max_size=9)


def make_driver(page_size: int, policy: str) -> CacheDriver:
    mirror = TreeMirror(page_size)
    cache = RadixCache(page_size=page_size, num_pages=_NUM_PAGES, policy=make_eviction_policy(policy))
    cache.watch(mirror)
    return CacheDriver(cache, policy, mirror)


class RadixMachine(RuleBasedStateMachine):
    """Subclasses say of which page size and policy."""

    page_size = 1
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.driver = make_driver(self.page_size, self.policy)

    @rule(namespace=NAMES, pages=PAGES, locks=st.integers(0, 2), priority=st.integers(-2, 2))
    def insert(self, namespace: Namespace, pages: list[int], locks: int, priority: int) -> None:
        self.driver.insert(namespace, self._ids(pages), locks=locks, priority=priority)

    @rule(namespace=NAMES, pages=PAGES, num_more=st.integers(0, 15), locks=st.integers(0, 2))
    def match(self, namespace: Namespace, pages: list[int], num_more: int, locks: int) -> None:
        tail = np.full(num_more % self.page_size, 1, np.int32)
        self.driver.match(namespace, np.concatenate([self._ids(pages), tail]), locks=locks)

    @precondition(lambda self: self.driver.locked)
    @rule(choice=st.integers(0, 1000))
    def unlock(self, choice: int) -> None:
        self.driver.unlock(choice % len(self.driver.locked))

    @precondition(lambda self: self.driver.locked)
    @rule(choice=st.integers(0, 1000), pages=PAGES, priority=st.integers(-2, 2))
    def extend(self, choice: int, pages: list[int], priority: int) -> None:
        self.driver.extend(choice % len(self.driver.locked), self._ids(pages), priority=priority)

    @rule(num=st.integers(0, 12))
    def evict(self, num: int) -> None:
        self.driver.evict(num)

    @precondition(lambda self: self.driver.cache.num_cached > 20)
    @rule()
    def reset(self) -> None:
        self.driver.reset()

    @invariant()
    def agrees(self) -> None:
        self.driver.check()

    def _ids(self, pages: list[int]) -> IntArray:
        tokens = np.full((len(pages), self.page_size), 5, np.int32)
        kinds = np.array(pages, np.int32)
        tokens[:, -1] = kinds % 2
        tokens[:, 0] += kinds // 2
        return tokens.reshape(-1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_any_sequence_agrees_with_the_oracle(page_size: int, policy: str) -> None:
    class Machine(RadixMachine):
        pass

    Machine.page_size, Machine.policy = page_size, policy
    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.full)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_long_random_lives_agree_with_the_oracle(page_size: int, policy: str, seeds: range) -> None:
    for seed in seeds:
        driver = make_driver(page_size, policy)
        run_random(driver, np.random.default_rng(seed), 600, max_priority=3)
        assert driver.mirror is not None and driver.mirror.num_events > 300


def test_the_oracle_knows_every_policy() -> None:
    assert sorted(SCORES) == sorted(EVICTION_POLICIES)
