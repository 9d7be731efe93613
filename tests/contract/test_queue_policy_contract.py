"""Contract of every queue policy, and the purpose of each of them."""

from __future__ import annotations

import numpy as np
import pytest
from support.planner_world import submission

from radixmesh.daemons.scheduler.cache.prefix_cache import NOTHING_KNOWN, Probe
from radixmesh.daemons.scheduler.queue.policies import QUEUE_POLICIES, QueueSettings
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue, sub_queue_key
from radixmesh.daemons.scheduler.sequence import Sequence

ALL = sorted(QUEUE_POLICIES)
ENDLESS = 1e9


class Probes:
    """Stands for the cache: what it knows of each request, and how often it was asked."""

    def __init__(self) -> None:
        self.known: dict[Sequence, Probe] = {}
        self.num_asked = 0

    def __call__(self, request: Sequence) -> Probe:
        self.num_asked += 1
        return self.known.get(request, NOTHING_KNOWN)


def make(number: int, *, max_tokens: int = 8, **changes: object) -> Sequence:
    wanted = submission(number, [2, 3], **changes)
    return Sequence(
        submission=wanted,
        arrival=number,
        owner=1,
        handle=number,
        adapter="",
        max_total_len=2 + max_tokens,
        end_ids=frozenset(),
        logprobs_start=0,
    )


def drain(queue: WaitingQueue, probes: Probes, *, per_plan: int = 4) -> list[int]:
    """Arrival numbers in the order of admission, a few a plan."""
    order = []
    while len(queue):
        queue.begin_plan(probes)
        for _ in range(per_plan):
            request = queue.head()
            if request is None:
                break
            assert queue.head() is request, "the head stays until it is removed"
            queue.admitted(request)
            order.append(request.arrival)
    return order


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("max_overtake_factor", [0.0, 2.0, ENDLESS])
@pytest.mark.parametrize("is_first", [False, True])
def test_everyone_comes_out_once_whatever_happens(policy: str, max_overtake_factor: float, is_first: bool) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        settings = QueueSettings(
            policy=policy, max_overtake_factor=max_overtake_factor, priority_across_tenants=is_first
        )
        queue = WaitingQueue(settings)
        probes, waiting, held = Probes(), set[Sequence](), set[Sequence]()
        for number in range(1, 400):
            action = int(rng.integers(0, 10))
            if action < 5:
                request = make(
                    number,
                    router=str(rng.integers(2)),
                    tenant=str(rng.integers(3)),
                    priority=int(rng.integers(-1, 2)),
                    max_tokens=int(rng.integers(1, 50)),
                )
                probes.known[request] = _probe(rng)
                queue.push(request)
                waiting.add(request)
            elif action < 6 and waiting:
                request = sorted(waiting, key=lambda r: r.arrival)[int(rng.integers(len(waiting)))]
                queue.park(request)
                waiting.discard(request)
                held.add(request)
            elif action < 7 and held:
                request = held.pop()
                queue.unpark(request)
                queue.unpark(request)
                waiting.add(request)
            elif action < 8 and waiting | held:
                request = sorted(waiting | held, key=lambda r: r.arrival)[0]
                queue.remove(request)
                waiting.discard(request)
                held.discard(request)
            else:
                for changed in list(waiting)[:5]:
                    probes.known[changed] = _probe(rng)
                queue.begin_plan(probes)
                for _ in range(int(rng.integers(0, 3))):
                    head = queue.head()
                    assert (head is None) == (not waiting)
                    if head is None:
                        break
                    assert head in waiting
                    rivals = [r for r in waiting if is_first or sub_queue_key(r) == sub_queue_key(head)]
                    assert head.submission.priority == max(r.submission.priority for r in rivals)
                    queue.admitted(head)
                    waiting.discard(head)
            assert len(queue) == len(waiting) + len(held) == len(list(queue))
            assert set(queue) == waiting | held
            assert queue.waiting_tokens == 2 * len(queue) and queue.num_waiting_for_prefix == len(held)
        queue.unpark_all()
        order = drain(queue, probes)
        assert sorted(order) == sorted(r.arrival for r in waiting | held)
        assert queue.head() is None and queue.waiting_tokens == 0


@pytest.mark.parametrize("policy", ALL)
def test_sub_queues_of_one_priority_take_turns(policy: str) -> None:
    queue, probes = WaitingQueue(QueueSettings(policy=policy, max_overtake_factor=ENDLESS)), Probes()
    for number in range(1, 61):
        request = make(number, router="flood", max_tokens=40)
        probes.known[request] = Probe(30, (1,))
        queue.push(request)
    for number in range(61, 71):
        queue.push(make(number, router="polite", tenant="a"))
    order = drain(queue, probes)
    assert sum(number > 60 for number in order[:20]) == 10, "every second turn is the polite one's"


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("max_overtake_factor", [0.0, 1.0, 2.0])
def test_nobody_is_passed_by_more_than_some_multiple_of_the_line(policy: str, max_overtake_factor: float) -> None:
    """The unlucky one has nothing cached and a short output, and ever new ones would go before it."""
    queue, probes = WaitingQueue(QueueSettings(policy=policy, max_overtake_factor=max_overtake_factor)), Probes()
    num_before, number, position = 50, 100, -1
    for before in range(1, num_before + 1):
        request = make(before, max_tokens=30)
        probes.known[request] = Probe(10, (1,))
        queue.push(request)
    unlucky = make(number, max_tokens=1)
    queue.push(unlucky)
    num_admitted = 0
    while unlucky in set(queue):
        for _ in range(2):  # As many come as go.
            number += 1
            request = make(number, max_tokens=30)
            probes.known[request] = Probe(50, (1, 2))
            queue.push(request)
        queue.begin_plan(probes)
        for _ in range(2):
            head = queue.head()
            assert head is not None
            queue.admitted(head)
            num_admitted += 1
            if head is unlucky:
                position = num_admitted
        assert num_admitted < 2000, "starved"
    # Those that are due already, at most as many as were there before it, go before it.
    assert position <= num_before + max_overtake_factor * (num_before + 2) + 2


@pytest.mark.parametrize("policy", ALL)
def test_ten_thousand_waiting_cost_a_plan_no_more_than_a_few_probes(policy: str) -> None:
    queue, probes = WaitingQueue(QueueSettings(policy=policy)), Probes()
    for number in range(1, 10_001):
        queue.push(make(number))
    for step in range(5):
        queue.begin_plan(probes)
        for _ in range(8):
            head = queue.head()
            assert head is not None
            queue.admitted(head)
        assert probes.num_asked <= 16 * (step + 1)


def test_passing_grows_with_the_longest_line_lately_and_who_comes_back_is_due_soon() -> None:
    """Bursts of 100 and of 10: who comes when the line is short may be passed as often as a long line lately allows."""
    queue, probes = WaitingQueue(QueueSettings(policy="lcfs", max_overtake_factor=1.0)), Probes()
    back = make(0)
    for number in range(1, 101):
        queue.push(make(number))
    while len(queue) > 1:  # Last come, first served, until the first are due.
        head = queue.head()
        assert head is not None
        queue.admitted(head)
    first = make(101)
    queue.push(first)
    queue.push(back)
    order = []
    for number in range(200, 400):
        queue.begin_plan(probes)
        queue.push(make(number))
        head = queue.head()
        assert head is not None
        queue.admitted(head)
        order.append(head.arrival)
    assert order.index(0) == 8
    assert 99 * 0.998**100 < order.index(101) <= 100


def test_longest_prefix_goes_first_as_the_cache_is_now() -> None:
    queue, probes = WaitingQueue(QueueSettings(policy="lpm", max_overtake_factor=ENDLESS)), Probes()
    requests = [make(number) for number in range(1, 7)]
    for request, num_pages in zip(requests, (0, 5, 90, 5, 40, 0), strict=True):
        probes.known[request] = Probe(num_pages, (1,))
        queue.push(request)
    queue.begin_plan(probes)
    assert queue.head() is requests[2]
    probes.known[requests[2]] = NOTHING_KNOWN  # Evicted meanwhile.
    probes.known[requests[5]] = Probe(70, (1,))
    assert drain(queue, probes) == [6, 5, 2, 4, 1, 3]


def test_depth_first_finishes_the_part_that_most_belong_to() -> None:
    queue, probes = WaitingQueue(QueueSettings(policy="dfs-weight", max_overtake_factor=ENDLESS)), Probes()
    branches = {1: (7,), 2: (8, 81), 3: (8, 82), 4: (8, 82), 5: (7, 71), 6: (8, 82), 7: (), 8: (8,)}
    for number, branch in branches.items():
        request = make(number)
        probes.known[request] = Probe(len(branch), branch)
        queue.push(request)
    # 8 weighs 5, in it 82 weighs 3; who ends at a place comes after what lies below it.
    assert drain(queue, probes) == [3, 4, 6, 2, 8, 5, 1, 7]


def test_longest_output_first_random_by_seed_and_last_come() -> None:
    def order(**settings: object) -> list[int]:
        queue = WaitingQueue(QueueSettings(max_overtake_factor=ENDLESS, **settings))  # type: ignore[arg-type]
        for number in range(1, 33):
            queue.push(make(number, max_tokens=(number * 7) % 32 + 1))
        return drain(queue, Probes())

    assert order(policy="lof") == sorted(range(1, 33), key=lambda number: -((number * 7) % 32))
    assert order(policy="lcfs") == list(range(32, 0, -1))
    first = order(policy="random", seed=1)
    assert first == order(policy="random", seed=1) != order(policy="random", seed=2)
    assert (
        sorted(first) == list(range(1, 33)) and sum(abs(a - b) for a, b in zip(first, range(1, 33), strict=True)) > 100
    )


def test_unknown_policy_names_the_choices() -> None:
    with pytest.raises(ValueError, match="dfs-weight"):
        WaitingQueue(QueueSettings(policy="fastest"))


def _probe(rng: np.random.Generator) -> Probe:
    branch = tuple(rng.integers(1, 4, int(rng.integers(0, 4))).tolist())
    return Probe(len(branch), branch)
