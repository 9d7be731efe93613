"""The router's queue: fair among tenants by weight, by priority within each, and nobody starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.daemons.router.queue.fair_queue import MAX_OVERTAKEN, FairQueue, Ticket, Turn
from radixmesh.daemons.router.queue.tenants import RunningOutputs, TenantShares


@dataclass(eq=False)
class Item:
    tenant: str
    cost: float = 1.0
    priority: int = 0
    is_begun: bool = False
    line: str = "m"
    num_bytes: int = 10

    def ticket(self) -> Ticket:
        return Ticket(
            line=self.line,
            tenant=self.tenant,
            cost=self.cost,
            priority=self.priority,
            is_begun=self.is_begun,
            num_bytes=self.num_bytes,
        )


@dataclass
class Bench:
    """A queue and those it has served. Entries of `blocked` tenants find nobody that takes them; while it is full only
    those of a priority above 0 do."""

    queue: FairQueue[Item]
    served: list[Item] = field(default_factory=list)
    blocked: set[str] = field(default_factory=set)
    is_full: bool = False

    def add(self, item: Item) -> Item:
        self.queue.add(item, item.ticket())
        return item

    def serve(self, count: int = 1, line: str = "m") -> list[Item]:
        before = len(self.served)
        for _ in range(count):
            self.queue.take(line, self._take)
        return self.served[before:]

    def _take(self, item: Item) -> Turn:
        if item.tenant in self.blocked:
            return Turn.PASSED
        if self.is_full and item.priority <= 0:
            return Turn.FULL
        assert self.queue.served(item) is not None
        self.served.append(item)
        return Turn.SERVED


def test_a_tenant_with_a_thousand_entries_holds_up_no_other() -> None:
    bench = Bench(FairQueue())
    for _ in range(1000):
        bench.add(Item("crowd"))
    late = bench.add(Item("one"))
    assert late in bench.serve(2)


@settings(max_examples=25)
@given(
    weights=st.lists(st.floats(0.25, 4.0), min_size=2, max_size=5),
    costs=st.lists(st.floats(1.0, 50.0), min_size=2, max_size=5),
)
def test_tenants_that_always_wait_are_served_by_weight_and_cost(weights: list[float], costs: list[float]) -> None:
    names = [f"t{i}" for i in range(min(len(weights), len(costs)))]
    weight_of = dict(zip(names, weights, strict=False))
    cost_of = dict(zip(names, costs, strict=False))
    bench = Bench(FairQueue(weight_of.__getitem__))
    for name in names:
        for _ in range(4):
            bench.add(Item(name, cost_of[name]))
    work: Counter[str] = Counter()
    for _ in range(600):
        for item in bench.serve():
            work[item.tenant] += item.cost  # type: ignore[assignment]
            bench.add(Item(item.tenant, item.cost))
    # Start-time fair queueing: normalised service differs by at most one entry of each.
    shares = [work[name] / weight_of[name] for name in names]
    assert max(shares) - min(shares) <= 2 * max(cost_of[name] / weight_of[name] for name in names) + 1e-6


def test_a_tenant_that_was_away_has_saved_up_nothing_and_one_that_leaves_owes_what_it_had() -> None:
    bench = Bench(FairQueue())
    for _ in range(200):
        bench.add(Item("steady"))
    bench.serve(100)
    for _ in range(50):
        bench.add(Item("new"))
    assert Counter(item.tenant for item in bench.serve(20)) == {"steady": 10, "new": 10}
    # It leaves after an entry of great cost, and comes back.
    heavy = bench.add(Item("heavy", cost=30.0))
    while heavy not in bench.serve():
        pass
    again = bench.add(Item("heavy"))
    assert again not in bench.serve(30)


def test_within_a_tenant_begun_ones_come_first_then_priorities_then_age() -> None:
    bench = Bench(FairQueue())
    late, high, low, first, begun = (
        bench.add(item)
        for item in (Item("t"), Item("t", priority=5), Item("t", priority=-5), Item("t"), Item("t", is_begun=True))
    )
    assert bench.serve(5) == [begun, high, late, first, low]


def test_what_is_overtaken_often_enough_is_served_nevertheless() -> None:
    bench = Bench(FairQueue())
    low = bench.add(Item("t", priority=-1000))
    for _ in range(MAX_OVERTAKEN + 1):
        bench.add(Item("t", priority=7))
        if low in bench.serve():
            break
    assert low in bench.served


def test_an_entry_that_nobody_takes_is_passed_over_and_has_its_turn_later() -> None:
    bench = Bench(FairQueue())
    stuck = bench.add(Item("big"))
    others = [bench.add(Item("small")) for _ in range(3)]
    bench.blocked.add("big")
    assert bench.serve(4) == others
    bench.blocked.clear()
    assert not bench.serve(), "it is set aside until something changes"
    bench.queue.retry("m")
    assert bench.serve() == [stuck]


def test_tenants_that_found_all_full_keep_their_order_and_those_blocked_otherwise_stay_aside() -> None:
    bench = Bench(FairQueue())
    blocked = bench.add(Item("blocked"))
    crowd = [bench.add(Item("crowd")) for _ in range(20)]
    one, two = bench.add(Item("one")), bench.add(Item("two"))
    urgent = bench.add(Item("urgent", priority=1))
    bench.blocked.add("blocked")
    bench.is_full = True
    assert bench.serve(4) == [urgent], "of the others none is tried that needs no less room than the first"
    bench.is_full = False
    assert not bench.serve()
    bench.queue.retry_lacking_room()
    assert set(bench.serve(3)) == {crowd[0], one, two}
    # A turn that served nobody moves no tag: a newcomer competes with those that have waited.
    late = bench.add(Item("late"))
    assert late in bench.serve(2)
    bench.blocked.clear()
    bench.queue.retry("m", "blocked")
    assert bench.serve() == [blocked]


def test_lines_are_served_apart() -> None:
    bench = Bench(FairQueue())
    here, there = bench.add(Item("t")), bench.add(Item("t", line="other"))
    assert bench.queue.is_contended("m") and bench.queue.is_contended("other")
    assert bench.serve(2) == [here] and bench.serve(line="other") == [there]
    assert not bench.queue.is_contended("m") and not len(bench.queue)


_TENANTS = st.sampled_from("abcd")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _TENANTS, st.integers(-3, 3), st.floats(1.0, 30.0)),
        st.tuples(st.just("serve"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 60)),
        st.tuples(st.just("block"), _TENANTS),
        st.tuples(st.just("fill"), st.booleans()),
        st.tuples(st.just("room")),
        st.tuples(st.just("retry")),
    ),
    max_size=120,
)


@given(_STEPS)
def test_whatever_happens_counts_are_right_and_all_that_stay_are_served(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    bench = Bench(FairQueue())
    inside: list[Item] = []
    for step in steps:
        match step:
            case ("add", tenant, priority, cost):
                inside.append(bench.add(Item(tenant, cost, priority)))
            case ("serve", count):
                for item in bench.serve(count):
                    inside.remove(item)
            case ("cancel", number) if inside:
                item = inside.pop(number % len(inside))
                assert bench.queue.remove(item) is not None
                assert bench.queue.remove(item) is None
            case ("block", tenant):
                bench.blocked ^= {tenant}
            case ("fill", is_full):
                bench.is_full = is_full
            case ("room",):
                bench.queue.retry_lacking_room()
            case _:
                bench.queue.retry("m")
        assert list(bench.queue) == inside and bench.queue.num_bytes == 10 * len(inside)
        of = Counter(item.tenant for item in inside)
        assert all(bench.queue.num_of(tenant) == of[tenant] for tenant in "abcd")
        assert bench.queue.num_tenants == len(of)
    bench.blocked.clear()
    bench.is_full = False
    bench.queue.retry("m")
    assert set(bench.serve(len(inside))) == set(inside) and not len(bench.queue)


@settings(max_examples=20)
@given(st.data())
def test_nobody_starves_whatever_comes_after_it(data: st.DataObject) -> None:
    """An entry is served after a number of turns that depends on what was there before it, not on what comes."""
    bench = Bench(FairQueue())
    names = "abcde"
    before = data.draw(st.lists(st.sampled_from(names), max_size=4))
    for tenant in before:
        bench.add(Item(tenant, cost=10.0))
    patient = bench.add(Item("a", cost=10.0, priority=-9))
    num_before = sum(tenant == "a" for tenant in before)
    # Each turn of its tenant comes after at most one of each other, since all costs and weights are equal; and each of
    # those of its tenant that are older may be overtaken as often as it.
    bound = (num_before + 1) * (MAX_OVERTAKEN + 1) * (len(names) + 1)
    for turn in range(bound):
        bench.add(Item("a", cost=10.0, priority=9))
        bench.add(Item(data.draw(st.sampled_from(names)) if turn < 20 else names[turn % 5], cost=10.0, priority=9))
        if patient in bench.serve():
            return
    pytest.fail(f"not served in {bound} turns")


def test_a_client_that_comes_and_cancels_leaves_nothing_behind() -> None:
    bench = Bench(FairQueue())
    stays = bench.add(Item("stays"))
    for number in range(5000):
        item = bench.add(Item(f"t{number % 7}"))
        bench.queue.remove(item)
    line = bench.queue._lines["m"]
    assert len(line.heap) < 200 and len(line.flows) == 1 and len(line.left) <= 7
    for number in range(600):
        bench.queue.remove(bench.add(Item("t", line=f"model-{number}")))
    assert len(bench.queue.lines) <= 257
    assert bench.serve() == [stays]


def test_shares_and_limits_are_read_and_checked() -> None:
    shares = TenantShares.parse(("ada=4", "x=y=0.5"), ("8", "ada=64"))
    assert [shares.weight_of(tenant) for tenant in ("ada", "x=y", "bob")] == [4.0, 0.5, 1.0]
    assert [shares.limit_of(tenant) for tenant in ("ada", "bob")] == [64, 8]
    for weights, limits in ((("ada",), ()), (("ada=0",), ()), (("ada=x",), ()), (("4",), ()), ((), ("ada=-1",))):
        with pytest.raises(ValueError, match="--tenant"):
            TenantShares.parse(weights, limits)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=60))
def test_running_outputs_are_never_lost_from_the_count(events: list[tuple[str, bool]]) -> None:
    running, there = RunningOutputs(TenantShares(default_limit=3)), Counter[str]()
    for tenant, comes in events:
        if comes:
            running.submitted(tenant)
            there[tenant] += 1
        elif there[tenant]:
            running.left(tenant)
            there[tenant] -= 1
        assert running.num_of(tenant) == there[tenant] and running.is_at_limit(tenant) == (there[tenant] >= 3)
    assert running.num_tenants == sum(1 for count in there.values() if count)
