"""Small promises of the scheduler's parts, each of which a changed line broke unnoticed (tests/mutation.py)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from support.planner_world import World

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.scheduler.cache.prefix_cache import Namespace
from radixmesh.daemons.scheduler.cache.trie_cache import TrieCache
from radixmesh.daemons.scheduler.group.suspects import PoisonIsolation
from radixmesh.daemons.scheduler.planning.flush import CacheFlush
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs
from radixmesh.daemons.scheduler.routers.load_push import LoadPush
from radixmesh.daemons.scheduler.routers.outbox import RouterOutbox
from radixmesh.daemons.scheduler.routers.router_streams import RouterStreams
from radixmesh.daemons.scheduler.sequence import Lifecycle
from radixmesh.scheduler.v1 import scheduler_pb2

NAMESPACE = Namespace("", 1)


class _Identical(SimpleNamespace):
    """Hashed by identity, as sequences are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _suspects(isolation: PoisonIsolation, *requests: object) -> None:
    """Three losses while all of them run, without a token in between."""
    state = SimpleNamespace(in_flight=[1], table=SimpleNamespace(running=lambda: list(requests)))
    for _ in range(3):
        isolation.lost(state, None)  # type: ignore[arg-type]
        assert isolation.regained(from_outside=False) == []


@pytest.mark.timeout(30)
def test_suspects_are_probed_the_oldest_first_and_cleared_by_their_tokens() -> None:
    isolation = PoisonIsolation()
    first, second = (_Identical(lifecycle=Lifecycle.WAITING, output=[], slot=-1) for _ in range(2))
    _suspects(isolation, first, second)
    state = SimpleNamespace(table=None)
    assert isolation.probing(state) is first  # type: ignore[comparison-overlap]
    first.output = [7] * 8
    assert isolation.probing(state) is second, "eight tokens clear a suspect"  # type: ignore[comparison-overlap]
    isolation.ended(second)  # type: ignore[arg-type]
    assert isolation.probing(state) is None


def test_a_probe_names_pages_at_doubling_depths_and_the_last() -> None:
    cache = TrieCache(num_pages=32, page_size=1)
    pages = as_ints(range(10, 19))
    cache.insert(NAMESPACE, as_ints(range(9)), pages)
    probe = cache.probe(NAMESPACE, as_ints([*range(9), 99]))
    assert (probe.num_pages, probe.branch) == (9, (10, 11, 13, 17, 18))


class _Colliding(TrieCache):
    """Every page has the same key, as a bad hash would give."""

    def _keys_of(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return np.zeros(len(tokens), np.int64)


def test_a_hash_collision_ends_the_match_at_the_first_page_that_differs() -> None:
    cache = _Colliding(num_pages=16, page_size=2)
    cache.insert(NAMESPACE, as_ints([1, 2, 3, 4, 5, 6]), as_ints([7, 8, 9]))
    for num, ids in (
        (3, [1, 2, 3, 4, 5, 6]),
        (2, [1, 2, 3, 4, 9, 9]),
        (1, [1, 2, 9, 9, 5, 6]),
        (0, [9, 9, 9, 9, 5, 6]),
    ):
        assert cache.match(NAMESPACE, as_ints(ids)).pages.tolist() == [7, 8, 9][:num], ids


def test_counters_and_the_estimate_of_steps_follow_results() -> None:
    world = World()
    estimated: list[tuple[int, float]] = []
    observe = world.planner.estimate.observe
    world.planner.estimate.observe = lambda *seen: estimated.append(seen) or observe(*seen)  # type: ignore[method-assign, func-returns-value]
    record = world.submit([2, 3, 4], stop=Stop(max_tokens=9, ignore_eos=True))
    world.run()
    assert world.planner.counters.output_tokens == len(record.tokens) == 9
    assert estimated and all(num_tokens > 0 and device_us > 0 for num_tokens, device_us in estimated)


def test_only_so_many_callers_wait_for_a_flush() -> None:
    flush = CacheFlush()
    wishes = [flush.wish() for _ in range(64)]
    with pytest.raises(MeshError) as refused:
        flush.wish()
    assert refused.value.reason == ErrorReason.ERROR_REASON_OVERLOADED
    flush.withdraw(wishes[0])
    flush.wish()


@pytest.mark.parametrize("ours", [FinishReason, Task])
def test_enums_have_the_numbers_of_the_protos(ours: type[FinishReason] | type[Task]) -> None:
    prefix, theirs = ("FINISH_REASON_", common_pb2.FinishReason) if ours is FinishReason else ("TASK_", common_pb2.Task)
    assert {f"{prefix}{value.name}": value.value for value in ours} == {
        name: number for name, number in theirs.items() if number
    }


async def _is_ready(outbox: RouterOutbox) -> bool:
    waiting = asyncio.ensure_future(outbox.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    is_ready = waiting.done()
    waiting.cancel()
    return is_ready


async def test_an_outbox_is_ready_exactly_while_it_has_something_to_write() -> None:
    outbox = RouterOutbox(7)
    assert not await _is_ready(outbox)
    ended = Finished(owner=7, handle=1, attempt=0, reason=FinishReason.ABORT, num_output=0)
    for add in (
        lambda: outbox.add(Outputs(finished=[ended])),
        lambda: outbox.add_frame(scheduler_pb2.ServeResponse(abort_results=[scheduler_pb2.AbortResult()])),
    ):
        add()
        assert await _is_ready(outbox)
        assert outbox.take(1).ByteSize() > 0
        assert not await _is_ready(outbox), "all of it is taken"
    outbox.add(Outputs(finished=[]))
    assert not await _is_ready(outbox), "nothing of it is for this stream"
    outbox.push_load()
    assert await _is_ready(outbox)


@pytest.mark.parametrize("num_running", [0, 3])
async def test_a_changed_load_goes_with_the_tokens_that_are_due(num_running: int) -> None:
    planner = SimpleNamespace(state=None, num_running=num_running, num_waiting=1)
    streams = RouterStreams()
    outbox = streams.open("router").outbox
    outbox.wants_load = False
    loads = LoadPush(cast(Planner, planner), streams, now=0.0)
    loads.if_changed(1.0)
    assert outbox.wants_load
    assert await _is_ready(outbox) is not bool(num_running), "a frame of its own only where no tokens are due"
    loads.if_due(2.0)
    assert await _is_ready(outbox), "the regular load waits for nothing"


async def test_a_load_that_keeps_changing_reaches_a_router_without_tokens_too() -> None:
    planner = SimpleNamespace(state=None, num_running=1, num_waiting=0)
    streams = RouterStreams()
    idle, busy = (streams.open(name).outbox for name in ("idle", "busy"))
    idle.wants_load = busy.wants_load = False
    loads, num_frames = LoadPush(cast(Planner, planner), streams, now=0.0), 0
    for tick in range(1, 11):
        planner.num_waiting = tick
        loads.if_changed(0.1 * tick)
        loads.if_due(0.1 * tick)
        # A frame of tokens takes the load along, in time.
        assert not await _is_ready(busy)
        busy.wants_load = False
        if await _is_ready(idle):
            num_frames += 1
            idle.take(0)
            idle.wants_load = False
    assert num_frames == 5, "or that router takes this scheduler for dead"
