"""Plans held while a long step runs: requests that come meanwhile are in them, and the device does not wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import empty_ints
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import StepPlan, StepResult
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop

_STEP_S = 0.04
_ROUND_TRIP_S = 0.001


class Device:
    """A worker in virtual time: steps take `step_s(plan)`, and messages half a round trip each way."""

    def __init__(self, world: World, loop: SchedulerLoop, step_s: Callable[[StepPlan], float]) -> None:
        self._world, self._loop, self._step_s = world, loop, step_s
        self._plans: list[StepPlan] = []
        self._times: list[tuple[float, float]] = []
        self.sent: list[StepPlan] = []
        self._end_s = 0.0
        self.idle_s = 0.0
        self.wake_s: float | None = None

    async def send(self, *plans: StepPlan) -> None:
        self.sent += plans
        for plan in plans:
            start_s = max(self._end_s, self._world.now + _ROUND_TRIP_S / 2)
            if self._end_s and plan.has_forward:
                self.idle_s += start_s - self._end_s
            self._end_s = start_s + (self._step_s(plan) if plan.has_forward else 0.0)
            self._plans.append(plan)
            self._times.append((start_s, self._end_s))

    async def plan(self) -> None:
        """The loop's turn."""
        held_s = await self._loop.sender.send_plans(self)
        self.wake_s = self._world.now + held_s if held_s else None

    async def turn(self) -> None:
        """Time goes on to the next event: a hold that ends, or a result."""
        answer_s = self._times[0][1] + _ROUND_TRIP_S / 2 if self._times else float("inf")
        if self.wake_s is not None and self.wake_s < answer_s:
            self._world.now = self.wake_s
        else:
            self._world.now = answer_s
            start_s, end_s = self._times.pop(0)
            result = self._world.executor.run(self._plans.pop(0))
            times = {"device_start_ns": int(start_s * 1e9), "device_end_ns": int(end_s * 1e9)}
            self._loop.take([replace(result, **times)])
            self._loop.settle()
        await self.plan()


def make(
    step_s: Callable[[StepPlan], float] = lambda plan: _STEP_S, **choices: object
) -> tuple[SchedulerLoop, World, Device]:
    world = World(eos_rate=0.0, num_pages=4096, chunk_tokens=16, max_tokens_per_step=64, num_slots=16)
    group = SimpleNamespace(addresses=("nowhere:1",))
    settings = SchedulerSettings(workers=group.addresses, **choices)  # type: ignore[arg-type]
    loop = SchedulerLoop(settings, group, Progress(), clock=lambda: world.now)  # type: ignore[arg-type]
    loop.planner.begin_epoch(1, replace(world.group, max_plans_in_flight=8), None)
    world.executor.begin_epoch(1)
    loop.sender.begin_epoch(8)
    loop.sender.lookahead.gap_us = 1e6 * _ROUND_TRIP_S
    return loop, world, Device(world, loop, step_s)


async def run_for(device: Device, num_turns: int) -> None:
    for _ in range(num_turns):
        await device.turn()


async def test_a_request_that_comes_while_a_step_runs_is_in_the_next_one() -> None:
    loop, world, device = make()
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=100)))
    await device.plan()
    await run_for(device, 40)
    while device.wake_s is None:
        await device.turn()
    before = device.sent[-1].step_id
    assert loop.planner.num_in_flight == 1
    loop.planner.submit(world.submission([5, 6, 7], stop=Stop(max_tokens=2)))
    await device.plan()  # The loop wakes by the submit: the plan is held nevertheless.
    assert device.sent[-1].step_id == before and device.wake_s is not None
    await device.turn()
    assert device.sent[-1].step_id == before + 1 and device.sent[-1].admits
    assert loop.planner.num_in_flight == 2, "it left before the running step's result came"


async def test_the_device_does_not_stand_still_for_held_plans() -> None:
    loop, world, device = make()
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=150)))
    await device.plan()
    await run_for(device, 30)
    device.idle_s, first = 0.0, device.sent[-1].step_id
    await run_for(device, 150)
    assert device.sent[-1].step_id - first > 50 and device.idle_s == 0.0


async def test_a_device_that_stood_still_gets_its_plans_earlier() -> None:
    """Steps that get shorter all at once end before the hold does: that is seen, and not repeated."""
    lengths = {"s": _STEP_S}
    loop, world, device = make(lambda plan: lengths["s"])
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=190)))
    await device.plan()
    await run_for(device, 60)
    slack_us = loop.sender.hold.slack_us
    lengths["s"], device.idle_s = 0.02, 0.0
    await run_for(device, 8)
    assert loop.sender.hold.slack_us > slack_us
    assert 0 < device.idle_s <= 3 * _ROUND_TRIP_S
    device.idle_s = 0.0
    await run_for(device, 60)
    assert device.idle_s == 0.0


@pytest.mark.parametrize("seed", range(6))
async def test_a_wrong_guess_costs_one_round_trip_however_steps_vary(seed: int) -> None:
    """Steps take from half to twice what the last ones did, and requests come and are aborted while plans are held."""
    rng = np.random.default_rng(seed)
    lengths = {"s": _STEP_S}
    loop, world, device = make(lambda plan: lengths["s"] + 0.001 * sum(chunk.length for chunk in plan.chunks))
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=190)))
    await device.plan()
    most_idle_s, num_held = 0.0, 0
    for turn in range(300):
        if turn % 40 == 0:
            lengths["s"] = float(np.clip(lengths["s"] * rng.choice([0.5, 0.7, 1.4, 2.0]), 0.004, 0.08))
        if rng.random() < 0.1:
            new = world.submission([2 + turn % 60] * int(rng.integers(1, 60)), stop=Stop(max_tokens=4))
            loop.planner.submit(new)
            if rng.random() < 0.3:
                loop.planner.abort(new.key.request_id)
        if not loop.planner.num_live:
            break
        before_s = device.idle_s
        await device.plan()  # The loop wakes by what came.
        assert loop.planner.num_in_flight or not loop.planner.num_live, "nothing is held while nothing runs"
        num_held += device.wake_s is not None
        await device.turn()
        most_idle_s = max(most_idle_s, device.idle_s - before_s)
    assert num_held > 30 and most_idle_s <= _ROUND_TRIP_S + 1e-9


@pytest.mark.parametrize("choices", [{"hold_plans": False}, {"pipeline_depth": "1"}])
async def test_nothing_is_held_where_that_is_not_wanted(choices: dict[str, object]) -> None:
    loop, world, device = make(**choices)
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=60)))
    await device.plan()
    for _ in range(50):
        await device.turn()
        assert device.wake_s is None
    assert loop.planner.num_in_flight == 2


async def test_short_steps_are_not_held() -> None:
    loop, world, device = make(lambda plan: 0.002)
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=60)))
    await device.plan()
    for _ in range(40):
        await device.turn()
        assert device.wake_s is None


async def test_followers_are_in_the_step_behind_the_one_that_completes_their_prefix() -> None:
    loop, world, device = make(lambda plan: 0.01 + 0.0002 * sum(chunk.length for chunk in plan.chunks))
    for seed in range(24):  # Steps with prompts are known.
        loop.planner.submit(world.submission([2 + seed] * (12 + 36 * (seed % 2)), stop=Stop(max_tokens=1)))
        await device.plan()
        while loop.planner.num_in_flight:
            await device.turn()
    system = [2 + (7 * i) % 61 for i in range(40)]
    for own in range(4):
        loop.planner.submit(world.submission([*system, own + 2, 9, 9], stop=Stop(max_tokens=4)))
    await device.plan()
    first = device.sent[-1].step_id
    while loop.planner.queue.num_waiting_for_prefix:
        await device.turn()
    followed = next(plan for plan in device.sent if plan.step_id == first + 1)
    assert len(followed.admits) == 3


async def test_what_a_barrier_took_tells_nothing_of_decodes() -> None:
    """It ends at once, or after seconds: decodes as short as one would never be waited for."""
    loop, world, device = make(lambda plan: 0.001 if plan.barrier_ops else 0.02 + 0.0005 * len(plan.admits))
    for seed in range(24):  # A line through steps of several sizes is known.
        loop.planner.submit(world.submission([2 + seed] * (2 + 40 * (seed % 2)), stop=Stop(max_tokens=1)))
        await device.plan()
        while loop.planner.num_in_flight:
            await device.turn()
    loop.planner.submit(world.submission([2, 3, 4], stop=Stop(max_tokens=100)))
    await device.plan()
    await run_for(device, 30)
    hold = loop.sender.hold
    state = loop.planner.state
    assert state is not None
    decode = next(step for step in state.in_flight.last_steps() if step.plan.has_forward)
    least_us = hold.least_us(decode)
    assert least_us > 0
    barrier = replace(decode, plan=replace(decode.plan, has_forward=False, decode_set=None), num_tokens=0, chunks=())
    result = StepResult(epoch=1, step_id=1, counts=empty_ints(), ids=empty_ints(), device_end_ns=1_000_000)
    slack_us = hold.slack_us
    hold.observe(barrier, result, followed=True)
    assert hold.least_us(decode) == least_us and hold.least_us(barrier) == 0.0
    start_ns = int(1e9 * (world.now + 1))  # The barrier took a second.
    hold.observe(decode, replace(result, device_start_ns=start_ns, device_end_ns=start_ns + 20_000_000), followed=True)
    assert hold.slack_us <= slack_us, "no plan was late"
