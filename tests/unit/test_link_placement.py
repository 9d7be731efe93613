"""Placement's rows belong to links: an address that goes and comes back is another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from radixmesh.daemons.router.peers.schedulers.link_health import LinkHealth
from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.cache_view import CacheChange, Insert, Tier
from radixmesh.daemons.router.placement.placement import PlacedRequest, Placement
from radixmesh.daemons.router.placement.policies import make_policy
from radixmesh.daemons.router.placement.replicas import ReplicaLoad
from radixmesh.daemons.runtime.cache_namespace import cache_name
from radixmesh.scheduler.v1 import scheduler_pb2


class Link:
    """The part of a scheduler's link that placement reads."""

    def __init__(self, address: str) -> None:
        self.address, self.identity = address, SimpleNamespace(name="model")
        self.num_connects, self.kv_tokens, self.last_sequence = 1, 100_000, 0
        self.is_connected = self.takes_submits = self.is_group_serving = True
        self.max_request_len = self.max_total_len = 100_000
        self.adapters, self.health = (), LinkHealth()
        self.load, self.role = scheduler_pb2.Load(), 0

    def replica_load(self) -> ReplicaLoad:
        return ReplicaLoad(
            submit_sequence=0, num_running=0, num_waiting=0, waiting_tokens=0, free_tokens=1000, cached_tokens=0
        )


def output_of(ids: bytes) -> Any:
    resolved = SimpleNamespace(model="model", prompt_ids=ids, cache_salt="", tenant="", session="", priority=0)
    return SimpleNamespace(request=SimpleNamespace(resolved=resolved), ids=SimpleNamespace(tobytes=lambda: b""))


async def test_a_link_that_goes_leaves_the_row_of_its_successor_alone() -> None:
    is_open = asyncio.Event()

    async def watch(address: str, after_revision: int | None, takes_store: bool) -> AsyncIterator[CacheChange]:
        is_open.set()
        await asyncio.Event().wait()
        yield CacheChange(revision=0)

    placed = LinkPlacement(Placement(make_policy("cache_aware")), open_watch=watch)
    first, second = Link("10.0.0.1:50051"), Link("10.0.0.1:50051")
    placed.add(first)  # type: ignore[arg-type]
    await is_open.wait()
    leaving = asyncio.create_task(placed.remove(first))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    placed.add(second)  # type: ignore[arg-type]
    await leaving
    placed.on_load(first)  # type: ignore[arg-type]
    placed.on_load(second)  # type: ignore[arg-type]
    output = output_of(bytes(400))
    for sequence in (1, 2, 3):
        second.last_sequence = sequence
        placed.take_sent(second, placed.choose(output, placed.table.rows([second])))  # type: ignore[arg-type,list-item]
    placed.on_left(first, 1)  # type: ignore[arg-type]
    decision = placed.choose(output, placed.table.rows([second]))  # type: ignore[list-item]
    assert decision is not None and decision.matched_tokens == 96
    placed.on_left(second, 1)  # type: ignore[arg-type]
    await placed.close()


async def test_outputs_of_one_request_count_where_their_prompt_is() -> None:
    decisions: list[str] = []
    placement = Placement(make_policy("cache_aware"))
    placed = LinkPlacement(placement, on_decision=lambda decision: decisions.append(decision.reason))
    link = Link("a:1")
    placed.add(link)  # type: ignore[arg-type]
    placed.on_load(link)  # type: ignore[arg-type]
    link.last_sequence = 1
    placed.take_sent(link, placed.choose(output_of(bytes(400)), placed.table.rows([link])))  # type: ignore[arg-type,list-item]
    link.last_sequence = 2
    placed.take_sent(link, None)  # type: ignore[arg-type]
    assert placement.replicas.num_outputs[0] == 2 and placement.replicas.queued_tokens[0] == 100
    assert decisions == ["new"]


def test_namespaces_of_adapters_and_salts_are_apart() -> None:
    names = [cache_name(adapter, salt) for adapter, salt in (("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""))]
    assert len(set(names)) == len(names)


async def test_a_new_stream_to_a_replica_is_another_cache_and_a_new_load_is_not() -> None:
    placement = Placement(make_policy("cache_aware"))
    placed = LinkPlacement(placement)
    link = Link("a:1")
    placed.add(link)  # type: ignore[arg-type]
    placed.on_load(link)  # type: ignore[arg-type]
    link.last_sequence = 1
    output = output_of(bytes(400))
    placed.take_sent(link, placed.choose(output, placed.table.rows([link])))  # type: ignore[arg-type,list-item]
    placed.on_load(link)  # type: ignore[arg-type]
    assert placement.replicas.num_outputs[0] == 1 and placed.matched_tokens(output, link) == 96  # type: ignore[arg-type]
    link.num_connects = 2
    placed.on_load(link)  # type: ignore[arg-type]
    assert placement.replicas.num_outputs[0] == 0, "it left with the stream"
    await placed.close()


def replica_with(placement: Placement, address: str, ids: bytes, *, tier: Tier, cost: float, store_id: str = "") -> int:
    row = placement.add(address)
    placement.restart(row, 100_000)
    load = ReplicaLoad(
        submit_sequence=0,
        num_running=0,
        num_waiting=0,
        waiting_tokens=0,
        free_tokens=100_000,
        cached_tokens=0,
        host_load_cost=cost,
        store_load_cost=cost,
    )
    placement.take_load(row, load)
    insert = Insert(node=1, parent=0, ids=ids, namespace="", weights_version=0, tier=tier)
    placement.apply(row, CacheChange(revision=1, inserts=[insert], store_id=store_id))
    return row


def test_a_prefix_in_host_memory_costs_its_load() -> None:
    """At a fraction of what computing it costs: less than a prefix that nobody has, more than one on the device."""
    ids = np.arange(640, dtype="<i4")
    request = PlacedRequest(prompt_ids=ids.tobytes())
    placement = Placement(make_policy("cache_aware"))
    dear = replica_with(placement, "dear", ids[:608].tobytes(), tier=Tier.HOST, cost=0.9)
    cheap = replica_with(placement, "cheap", ids[:608].tobytes(), tier=Tier.HOST, cost=0.1)
    half = replica_with(placement, "half", ids[:320].tobytes(), tier=Tier.DEVICE, cost=0.1)
    near = replica_with(placement, "near", ids[:608].tobytes(), tier=Tier.DEVICE, cost=0.1)

    def chosen(*rows: int) -> int:
        decision = placement.choose(request, rows)
        assert decision is not None and decision.best_tokens == 608
        return decision.row

    assert chosen(dear, cheap, half, near) == near
    assert chosen(dear, cheap, half) == cheap
    assert chosen(dear, half) == half, "computing half is faster than loading all"
    assert placement.matched_tokens(request, cheap) == 608
    for row in (dear, cheap, half, near):
        placement.remove(row)
    assert not len(placement.index) and not len(placement.host_index)


def test_a_prefix_in_a_store_costs_its_fetch() -> None:
    """The store of one replica has it if that is a disk, and of all that share it otherwise."""
    ids = np.arange(640, dtype="<i4")
    request, prefix = PlacedRequest(prompt_ids=ids.tobytes()), ids[:608].tobytes()
    other = (ids[:608] + 1).astype("<i4").tobytes()
    placement = Placement(make_policy("cache_aware"))
    disk = replica_with(placement, "disk", prefix, tier=Tier.STORE, cost=0.3)
    empty = replica_with(placement, "empty", other, tier=Tier.STORE, cost=0.3)

    def chosen(*rows: int) -> int:
        decision = placement.choose(request, rows)
        assert decision is not None
        return decision.row

    assert placement.replicas.shared_by is None
    assert chosen(empty, disk) == disk and chosen(empty) == empty
    assert placement.matched_tokens(request, disk) == 608 and placement.matched_tokens(request, empty) == 0
    # Of those that share a store one has saved it, to its host memory and the store; all can fetch it.
    saved = replica_with(placement, "saved", prefix, tier=Tier.HOST, cost=0.2, store_id="s1")
    beside = replica_with(placement, "beside", other, tier=Tier.STORE, cost=0.1, store_id="s1")
    apart = replica_with(placement, "apart", other, tier=Tier.STORE, cost=0.1, store_id="s2")
    assert placement.matched_tokens(request, beside) == 608 and placement.matched_tokens(request, apart) == 0
    assert chosen(apart, empty, beside) == beside
    # Loads go by the costs: a shared store spreads its prefixes.
    assert [chosen(saved, beside), chosen(disk, saved)] == [beside, saved]
    near = replica_with(placement, "near", prefix, tier=Tier.DEVICE, cost=0.1, store_id="s1")
    assert chosen(saved, beside, near) == near
    for _ in placement.lose_view(saved):
        pass
    assert placement.matched_tokens(request, beside) == 0, "nobody is known to have saved it"
    for row in (disk, empty, saved, beside, apart, near):
        placement.remove(row)
    assert placement.replicas.shared_by is None
    assert not len(placement.index) and not len(placement.host_index) and not len(placement.store_index)


def test_replicas_that_share_a_store_share_the_load() -> None:
    """Prompts that the store has, one after the other: no replica is the only one to get them, whatever the policy."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 1000, 640).astype("<i4") for _ in range(16)]
    for policy in ("cache_aware", "cache_threshold"):
        placement = Placement(make_policy(policy))
        rows = [placement.add(f"replica-{number}") for number in range(4)]
        for row in rows:
            inserts = [
                Insert(node=n, parent=0, ids=ids[:608].tobytes(), namespace="", weights_version=0, tier=Tier.STORE)
                for n, ids in enumerate(prompts, 1)
                if row == rows[0]
            ]
            placement.apply(row, CacheChange(revision=1, inserts=inserts, store_id="shared"))
        counts = dict.fromkeys(rows, 0)
        for number, ids in enumerate(prompts, 1):
            decision = placement.choose(PlacedRequest(prompt_ids=ids.tobytes()), rows)
            assert decision is not None and decision.matched_tokens == 608
            placement.take_sent(decision, number)
            counts[decision.row] += 1
        assert set(counts.values()) == {4}, policy


def test_a_cost_that_is_none_is_not_believed() -> None:
    link = SchedulerLink.__new__(SchedulerLink)
    for told, taken in ((0.5, 0.5), (float("nan"), 1.0), (-3.0, 1.0), (1e30, 1.0)):
        link.load, link._page_size = scheduler_pb2.Load(host_load_cost=told, store_load_cost=told), 1
        load = link.replica_load()
        assert load.host_load_cost == load.store_load_cost == taken


def test_stock_is_taken_of_what_waits_and_of_what_no_load_includes() -> None:
    placed = LinkPlacement(Placement(make_policy("least_load")))
    links = [Link("a:1"), Link("b:1")]
    placed.tick(10.0)
    assert (placed.imbalance, placed.num_credits) == (0.0, 0), "of no scheduler at all"
    for link in links:
        placed.add(link)  # type: ignore[arg-type]
        placed.on_load(link)  # type: ignore[arg-type]
    output = output_of(bytes(400))
    for sequence in (1, 2, 3):
        links[0].last_sequence = sequence
        placed.take_sent(links[0], placed.choose(output, placed.table.rows(links[:1])))  # type: ignore[arg-type]
    placed.tick(20.0)
    assert (placed.imbalance, placed.num_credits) == (2.0, 3)
    for sequence in (1, 2, 3):
        placed.on_left(links[0], sequence)  # type: ignore[arg-type]
    placed.tick(20.5)
    assert placed.num_credits == 3, "a second has not passed"
    placed.tick(30.0)
    assert (placed.imbalance, placed.num_credits) == (0.0, 0)
