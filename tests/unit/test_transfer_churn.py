"""24 hours of KV transfers in virtual time: whatever dies, stalls or comes late, no staging, page or lock is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import numpy as np
import pytest
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.pages.integrity import find_deep_violation
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.transfers.arrival import Arrival, ArrivalState
from radixmesh.daemons.scheduler.transfers.arrivals import KvArrivals
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure
from radixmesh.daemons.worker.kv_transfer.receiver import Region, TransferReceiver
from radixmesh.daemons.worker.kv_transfer.staging import RegionKey, StagingPool
from radixmesh.daemons.worker.kv_transfer.transport import RegionMemory

HOURS = [1, pytest.param(24, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
TICK_S = 0.5
LEASE_S = 10.0


class Mapped(RegionMemory):
    """Memory that writers map: they hold it until they are gone."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.is_held = self.is_closed = False

    @property
    def writes_are_seen(self) -> bool:
        return False

    def is_writer_gone(self) -> bool:
        return not self.is_held

    def close(self) -> None:
        assert not self.is_held, "a writer may still write there"
        self.is_closed = True


@dataclass(eq=False)
class Writer:
    """gone_at: when a process that has stopped, or was killed, is noticed to be gone."""

    region: Region
    memory: RegionMemory
    gone_at: float | None = None
    num_written: int = 0


@pytest.mark.parametrize("hours", HOURS)
@pytest.mark.parametrize("kind", [RegionMemory, Mapped])
async def test_a_day_of_writers_leaves_no_staging(kind: type[RegionMemory], hours: int) -> None:
    rng, now, epoch, number = random.Random(22), 0.0, 1, 0
    pool, over = StagingPool(64 << 10), [0, 0]

    def ended(region: Region) -> None:
        over[region.reception.failure is not Failure.NONE] += 1

    receiver = TransferReceiver("w", pool, new_memory=kind, clock=lambda: now, on_over=ended)
    writers: list[Writer] = []
    most_quarantined = 0
    while now < hours * 3600:
        now += TICK_S
        receiver.tick()
        if rng.random() < 0.3:
            number += 1
            try:
                size = rng.randrange(1, 300)
                receiver.prepare(f"t{number}", epoch, first_token=0, num_tokens=size, token_bytes=16, lease_s=LEASE_S)
            except MeshError:
                assert pool.num_bytes > 0, "there was room"
        regions = list(receiver.regions.values())
        if rng.random() < 0.8:  # A scheduler that lives renews what it waits for; now and then it is stopped.
            receiver.renew([r.key.transfer_id for r in regions if rng.random() < 0.9], epoch, LEASE_S)
        for region in regions:
            if rng.random() < 0.2:
                stranger = rng.random() < 0.1
                key = RegionKey(transfer_id=region.key.transfer_id, incarnation=1, instance_id="w", epoch=epoch)
                try:
                    receiver.open(key if stranger else region.key, region.num_bytes, f"p{number}")
                    assert not stranger and region.held is not None
                    writers.append(Writer(region, region.held))
                    if isinstance(region.held, Mapped):
                        region.held.is_held = True
                except MeshError:
                    continue
            elif rng.random() < 0.01:
                receiver.abort(region.key.transfer_id)
        for writer in tuple(writers):
            region, name = writer.region, writer.region.reception.writer
            if writer.gone_at is not None:
                if now >= writer.gone_at:
                    if isinstance(writer.memory, Mapped):
                        writer.memory.is_held = False
                    receiver.stream_over(region, name)
                    writers.remove(writer)
                continue
            if rng.random() < 0.03:
                writer.gone_at = now + rng.choice((0.0, 5.0, 60.0))  # Killed, or stopped for some time.
                continue
            try:
                num = min(region.num_bytes - writer.num_written, rng.randrange(1, 3000))
                if num:
                    receiver.wrote(region, name, num)
                    writer.num_written += num
                else:
                    if isinstance(writer.memory, Mapped):
                        writer.memory.is_held = False
                    writers.remove(writer)
                    is_sound = rng.random() < 0.98
                    receiver.last_word(region, name, is_done=rng.random() < 0.97, is_sound=is_sound)
                    if region.reception.begin_scatter():
                        receiver.scattered(region, Failure.NONE if rng.random() < 0.98 else Failure.STAMP)
            except MeshError:
                if writer in writers:  # It is told that the transfer is over, and leaves.
                    writer.gone_at = now
        if rng.random() < 0.001:
            epoch += 1
            receiver.begin_epoch(epoch)
        most_quarantined = max(most_quarantined, receiver.num_quarantined_bytes)
        assert pool.num_bytes == sum(r.num_bytes for r in receiver.regions.values()) <= pool.max_bytes
    assert over[0] > 100 * hours and over[1] > 10 * hours, over
    assert most_quarantined, "stopped writers keep their regions"
    for writer in writers:
        if isinstance(writer.memory, Mapped):
            writer.memory.is_held = False
        receiver.stream_over(writer.region, writer.region.reception.writer)
    now += LEASE_S
    receiver.tick()
    assert not pool.num_bytes and not len(receiver) and not receiver.num_quarantined_bytes
    await asyncio.sleep(0)


@pytest.mark.parametrize("hours", HOURS)
def test_a_day_of_arrivals_leaves_no_page_and_no_lock(hours: int) -> None:
    rng, now, number = random.Random(22), 0.0, 0
    world = World(page_size=4, num_pages=256)
    state = world.planner.state
    assert state is not None
    arrivals = KvArrivals(world.planner.queue, world.planner.arrivals.room, patience_s=3.0)
    live: list[Arrival] = []
    while now < hours * 3600:
        now += TICK_S
        arrivals.pass_time(state, now)
        if rng.random() < 0.3:
            number += 1
            prompt = as_ints([3 + rng.randrange(60), *range(10, 10 + rng.randrange(4, 80))])
            try:
                found = arrivals.reserve(state, f"t{number}", prompt, "", rng.choice((2.0, 15.0)), 1, now)
            except MeshError:
                found = None  # No room: others are on their way.
            if found is not None:
                live.append(found)
        for arrival in tuple(live):
            dice = rng.random()
            if arrival.is_over:
                live.remove(arrival)
            elif arrival.state is ArrivalState.RESERVING:
                if dice < 0.7:
                    arrivals.prepared(arrival)
            elif arrival.state is ArrivalState.COMMITTING:
                if dice < 0.5:
                    arrivals.committed(state, arrival, is_valid=rng.random() < 0.9)
            elif dice < 0.3:
                arrivals.written(state, arrival)
            elif dice < 0.5:
                arrivals.progressed(arrival, now)
            elif dice < 0.6:
                arrivals.renew(arrival.transfer_id, 15.0, now)
            elif dice < 0.63:
                arrivals.cancel(state, arrival.transfer_id)
        if rng.random() < 0.002:
            arrivals.give_up(state)
        if number % 50 == 0:
            assert not find_deep_violation(state.pages.pool, state.pages.cache, state.table), number
        arrivals.take_wanted(state)
        arrivals.take_failed()
    assert arrivals.num_arrived > 50 * hours and arrivals.num_failed > 10 * hours
    for arrival in live:
        if arrival.state is ArrivalState.COMMITTING:
            arrivals.committed(state, arrival, is_valid=False)
    arrivals.pass_time(state, now + 100.0)
    assert not len(arrivals) and not state.page_counts()[PageState.LOADING]
    assert state.pages.cache.num_evictable == state.pages.pool.num_cached, "a lock was left"
    loading = state.pages.pool.pages_in(PageState.LOADING)
    assert not np.isin(loading, state.pages.pool.pages_in(PageState.CACHED)).any()
