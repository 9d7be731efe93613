"""The table of scheduler links finds those that looking at every link would find, whatever has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.router_requests import change, new_request

from radixmesh.daemons.router.peers.schedulers.link_health import LinkHealth
from radixmesh.daemons.router.peers.schedulers.link_table import LinkTable
from radixmesh.daemons.router.placement.replicas import Replicas
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.scheduler.v1 import scheduler_pb2

MODELS = ("m", "n")
PREFILL = scheduler_pb2.SCHEDULER_ROLE_PREFILL


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeLink(SimpleNamespace):
    """The part of a link that the table reads."""

    __hash__ = object.__hash__

    def serves(self, model: str, identity: ServedIdentity) -> bool:
        return bool(model == self.model)


def output_of(model: str, max_tokens: int) -> Output:
    request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=max_tokens)
    change(request, model=model, model_identity=ServedIdentity(name=model))
    return request.outputs[0]


def able_by_looking(links: list[Any], output: Output, now: float) -> list[str]:
    request = output.request
    same = [link for link in links if link.serves(request.resolved.model, request.resolved.model_identity)]
    fitting = [link for link in same if link.max_request_len >= request.max_total_len]
    candidates = fitting or [link for link in same if link.max_total_len >= request.max_total_len]
    is_open = [link for link in candidates if link.takes_submits]
    chosen = [link for link in is_open if link.is_group_serving] or is_open
    chosen = [link for link in chosen if output.backoff_until.get(link.address, 0.0) <= now]
    chosen = [link for link in chosen if link.role != PREFILL] or chosen
    sound = [link for link in chosen if not link.health.is_passed_over]
    if len(chosen) > 1 and any(link.health.share < 1.0 for link in sound):
        mean = sum(link.num_running for link in sound) / len(sound)
        sound = [link for link in sound if link.health.share >= 1.0 or link.num_running < 1 + link.health.share * mean]
    return sorted(link.address for link in (sound if len(chosen) > 1 and sound else chosen))


number = st.integers(0, 5)
step = st.one_of(
    st.tuples(st.just("add"), number, st.sampled_from(MODELS)),
    st.tuples(st.just("remove"), number, st.none()),
    st.tuples(st.sampled_from(("takes_submits", "is_group_serving", "is_connected")), number, st.booleans()),
    st.tuples(st.just("role"), number, st.sampled_from((0, PREFILL, 2))),
    st.tuples(st.just("lens"), number, st.tuples(st.integers(0, 40), st.integers(0, 40))),
    st.tuples(st.sampled_from(("fail", "back", "send", "refuse")), number, st.none()),
    st.tuples(st.just("pass"), st.integers(0, 12), st.none()),
)


@given(st.lists(step, max_size=40))
def test_the_table_finds_what_looking_at_every_link_finds(steps: list[tuple[str, int, Any]]) -> None:
    clock, replicas = Clock(), Replicas()
    table = LinkTable(replicas, clock)
    links: dict[int, Any] = {}
    outputs = [output_of(model, size) for model in MODELS for size in (8, 24)]
    for what, which, value in steps:
        link = links.get(which)
        if what == "pass":
            clock.now += which
        elif what == "add" and link is None:
            link = links[which] = FakeLink(
                address=f"s{which}:1", model=value, identity=ServedIdentity(name=value), adapters=(), num_running=0,
                is_connected=True, takes_submits=True, is_group_serving=True, max_request_len=30, max_total_len=30,
                health=LinkHealth(clock), role=0, row=replicas.add(f"s{which}:1"),
            )  # fmt: skip
            table.add(link.row, link)
        elif link is None:
            continue
        elif what == "remove":
            del links[which]
            table.remove(link)
            replicas.remove(link.row)
        elif what == "send":
            link.num_running += 1
            replicas.take_sent(link.row, link.num_running, 0, 0)
        elif what == "refuse":
            outputs[which % len(outputs)].backoff_until[link.address] = clock.now + 1.0
        else:
            if what == "fail":
                link.health.failed()
            elif what == "back":
                link.health.came_back()
            elif what == "lens":
                link.max_request_len, link.max_total_len = value
            elif what != "add":
                setattr(link, what, value)
            table.update(link)
        for output in outputs:
            found = sorted(link.address for link in table.links(table.able(output).tolist()))
            assert found == able_by_looking(list(links.values()), output, clock.now)


def test_a_version_stands_for_what_is_served() -> None:
    table = LinkTable(Replicas(), Clock())
    link: Any = FakeLink(
        address="s:1", model="m", identity=ServedIdentity(name="m"), adapters=(), num_running=0, is_connected=True,
        takes_submits=True, is_group_serving=True, max_request_len=30, max_total_len=30, role=0,
        health=LinkHealth(Clock()),
    )  # fmt: skip
    table.add(0, link)
    before = table.version
    table.update(link)
    assert table.version == before
    link.adapters = ("a",)
    table.update(link)
    assert table.version != before
    table.remove(link)
    assert not len(table.able(output_of("m", 8)))


def test_models_that_clients_make_up_take_bounded_memory() -> None:
    table = LinkTable(Replicas(), Clock())
    for made_up in range(1000):
        assert not len(table.able(output_of(f"made-up-{made_up}", 8)))
    assert len(table.serving) <= 64
