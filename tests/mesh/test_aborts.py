"""Abort at every point of a request's life, on a worker with one slot and few pages: the next request, which gets them
at once, is answered exactly right, and nothing leaks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from support.invariants import known_job, observed_mesh, settled
from support.jobs import Job, recitations, simulated_alphabet
from support.mesh import Mesh
from support.wire import refusal_from

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.worker.simulated.token_source import simulated_continuation
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = [10, 11, 12, 13]
LONG_PROMPT = [20 + i % 200 for i in range(400)]
NUM_PAGES = 768
STEPS_IN_FLIGHT = 8
"""More than are ahead at depth 2, batches of short steps included."""
LIMIT_S = 20.0
FOUND, FINISHED, UNKNOWN = (
    router_pb2.ABORT_OUTCOME_FOUND,
    router_pb2.ABORT_OUTCOME_FINISHED,
    router_pb2.ABORT_OUTCOME_UNKNOWN,
)


@dataclass(slots=True)
class Bench:
    """A mesh with two routers, and what its next request must answer."""

    mesh: Mesh
    next_job: Job
    oracle: Callable[[list[int], int], list[int]] | None
    """Greedy continuation; None: the CPU worker's answers to these prompts are no recitation and not checked."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["simulated", pytest.param("cpu", marks=pytest.mark.full)]
)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    worker: dict[str, object] = {"num_slots": 1, "num_pages": NUM_PAGES, "page_size": 1}
    if request.param == "simulated":
        # A chunk of 8 tokens takes 24 ms: a long prompt is in the middle of its prefill for a second.
        worker |= {"simulated_base_us": 2000, "simulated_prefill_token_us": 3000}
    scheduler = {"chunk_tokens": 8, "pipeline_depth": 2}
    async with observed_mesh(request.param, scale={"router": 2}, worker=worker, scheduler=scheduler) as mesh:
        if request.param == "simulated":
            yield Bench(mesh, known_job(40), continuation)
        else:
            short = min(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))
            options = {**short.options, "max_tokens": len(short.answers[0].ids)}
            yield Bench(mesh, Job(name=short.name, prompt=short.prompt, messages=short.messages,
                                  options=options, answers=short.answers), None)  # type: ignore[arg-type]  # fmt: skip


def continuation(prompt: list[int], num: int) -> list[int]:
    return simulated_continuation(prompt, num, alphabet=simulated_alphabet())


@dataclass
class Stream:
    """A request at a router, read in the background."""

    request_id: str
    call: grpc.aio.UnaryStreamCall  # type: ignore[type-arg]
    ids: list[int] = field(default_factory=list)
    finished: router_pb2.OutputFinished | None = None
    is_resolved: bool = False
    error: grpc.aio.AioRpcError | None = None
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        try:
            async for response in self.call:
                self.is_resolved = True
                for delta in response.deltas:
                    assert delta.first_output_index == len(self.ids)
                    self.ids += unpack_ints(delta.ids, "ids").tolist()
                for finished in response.finished:
                    self.finished = finished
                self.changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        self.is_over = True
        self.changed.set()

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():
                assert not self.is_over or is_true(), (self.finished, self.error)
                self.changed.clear()
                await self.changed.wait()

    def check(self, bench: Bench, prompt: list[int]) -> None:
        """The output delivered so far is the beginning of the right answer."""
        if bench.oracle is not None:
            assert self.ids == bench.oracle(prompt, len(self.ids))

    def check_aborted(self) -> None:
        assert self.finished is not None, self.error
        assert self.finished.reason == common_pb2.FINISH_REASON_ABORT, self.finished
        assert self.finished.error.reason == common_pb2.ERROR_REASON_ABORTED
        assert self.finished.num_output == len(self.ids)


@asynccontextmanager
async def stream(
    bench: Bench, request_id: str, prompt: list[int] | str, *, num: int = 300, router: int = 0
) -> AsyncIterator[Stream]:
    request = router_pb2.GenerateRequest(
        request_id=request_id,
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopParams(max_tokens=num, ignore_eos=True),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.prompt_ids = pack_ints(prompt)
    async with open_channel(bench.mesh.routers[router]) as channel:
        stream = Stream(request_id, router_pb2_grpc.RouterServiceStub(channel).Generate(request))
        reading = asyncio.create_task(stream.read())
        try:
            yield stream
        finally:
            stream.call.cancel()
            await reading


async def abort(bench: Bench, request_id: str, router: int = 0) -> router_pb2.AbortOutcome:
    async with open_channel(bench.mesh.routers[router]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return (await stub.Abort(router_pb2.AbortRequest(request_id=request_id), timeout=60)).outcome


async def next_is_right(bench: Bench) -> None:
    """At once, on the slot and pages that were just given back; then nothing is left."""
    async with asyncio.timeout(LIMIT_S):
        assert await bench.next_job.run(bench.mesh.client) == bench.next_job.answers
    await settled(bench.mesh)


async def waiting_at_scheduler(bench: Bench, num_waiting: int) -> None:
    async with open_channel(bench.mesh.cluster.address("scheduler")) as channel, asyncio.timeout(LIMIT_S):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while (await stub.GetState(scheduler_pb2.GetStateRequest())).load.num_waiting != num_waiting:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("router", [0, 1], ids=["own router", "other router"])
async def test_queued_behind_a_full_batch(bench: Bench, router: int) -> None:
    # As long as it takes to abort another: a step of the CPU worker is a few of the simulated one's.
    num = 600 if bench.oracle is not None else 300
    async with stream(bench, "runs", PROMPT, num=num) as runs:
        await runs.until(lambda: len(runs.ids) > 0)
        async with stream(bench, "waits", [30, 31]) as waits:
            await waiting_at_scheduler(bench, 1)
            assert await abort(bench, "waits", router) == FOUND
            await waits.until(lambda: waits.is_over)
            waits.check_aborted()
            assert waits.ids == []
        assert not runs.is_over, "nothing was in the way of the one that waited"
        await runs.until(lambda: runs.is_over)
        assert runs.finished is not None and len(runs.ids) == num
        runs.check(bench, PROMPT)
    await next_is_right(bench)


async def test_waiting_for_the_tokenizer(bench: Bench) -> None:
    """Nothing of the request is anywhere but in its router: its call ends with a status."""
    bench.mesh.cluster.kill("tokenizer", number=signal.SIGSTOP)
    try:
        async with stream(bench, "unread", "The Tyger") as unread:
            await asyncio.sleep(0.2)
            assert not unread.is_resolved and not unread.is_over
            assert await abort(bench, "unread") == FOUND
            await unread.until(lambda: unread.is_over)
            assert unread.error is not None
            refusal = refusal_from(unread.error)
            assert (refusal.status, refusal.reason) == ("CANCELLED", "ABORTED")
    finally:
        bench.mesh.cluster.kill("tokenizer", number=signal.SIGCONT)
    await next_is_right(bench)


async def test_in_the_middle_of_a_chunked_prompt(bench: Bench) -> None:
    """The worker stands still from some chunk on, so that no machine is too busy for the abort to come in time."""
    for attempt in range(5):
        before = (await bench.mesh.scheduler_state()).prefilled_tokens
        # A prompt of its own per attempt: nothing of it is cached.
        async with stream(bench, f"chunks-{attempt}", [attempt, *LONG_PROMPT]) as chunks:
            async with asyncio.timeout(LIMIT_S):
                while (await bench.mesh.scheduler_state()).prefilled_tokens < before + 16:
                    await asyncio.sleep(0.002)
            bench.mesh.cluster.kill("worker", number=signal.SIGSTOP)
            try:
                prefilled = (await bench.mesh.scheduler_state()).prefilled_tokens - before
                outcome = await abort(bench, f"chunks-{attempt}")
            finally:
                bench.mesh.cluster.kill("worker", number=signal.SIGCONT)
            if prefilled > len(LONG_PROMPT) - 8 * STEPS_IN_FLIGHT:
                continue
            await chunks.until(lambda: chunks.is_over)
            assert outcome == FOUND
            chunks.check_aborted()
            assert chunks.ids == []
            prefilled = (await bench.mesh.scheduler_state()).prefilled_tokens - before
            assert prefilled < len(LONG_PROMPT), "the abort came after the prompt"
            break
    else:
        pytest.fail("no prompt could be stopped between its chunks")
    await next_is_right(bench)


@pytest.mark.parametrize("num_seen", [1, 2, 10], ids=["first token", "second token", "plans in flight"])
@pytest.mark.parametrize("router", [0, 1], ids=["own router", "other router"])
async def test_while_it_decodes(bench: Bench, num_seen: int, router: int) -> None:
    async with stream(bench, "decodes", PROMPT) as decodes:
        await decodes.until(lambda: len(decodes.ids) >= num_seen)
        assert await abort(bench, "decodes", router) == FOUND
        await decodes.until(lambda: decodes.is_over)
        decodes.check_aborted()
        assert num_seen <= len(decodes.ids) < 300
        decodes.check(bench, PROMPT)
        assert await abort(bench, "decodes", router) == FINISHED
    await next_is_right(bench)


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
async def test_around_the_last_token(bench: Bench, num_left: int) -> None:
    """The abort crosses the finish on the way: the output ends once, as one of both."""
    async with stream(bench, "last", PROMPT, num=12) as last:
        await last.until(lambda: len(last.ids) >= 12 - num_left)
        assert await abort(bench, "last") in (FOUND, FINISHED)
        await last.until(lambda: last.is_over)
        assert last.finished is not None
        if last.finished.reason == common_pb2.FINISH_REASON_LENGTH:
            assert len(last.ids) == 12
        else:
            last.check_aborted()
        last.check(bench, PROMPT)
    await next_is_right(bench)


async def test_twice_at_both_routers_at_once(bench: Bench) -> None:
    async with stream(bench, "twice", PROMPT) as twice:
        await twice.until(lambda: len(twice.ids) >= 3)
        outcomes = await asyncio.gather(*(abort(bench, "twice", router) for router in (0, 1, 0, 1)))
        assert FOUND in outcomes
        assert UNKNOWN not in outcomes
        await twice.until(lambda: twice.is_over)
        twice.check_aborted()
    await next_is_right(bench)


@pytest.mark.parametrize("num_seen", [0, 1, 10])
async def test_by_cancelling_the_call(bench: Bench, num_seen: int) -> None:
    async with stream(bench, "cancelled", PROMPT) as cancelled:
        await cancelled.until(lambda: cancelled.is_resolved and len(cancelled.ids) >= num_seen)
        cancelled.call.cancel()
        await cancelled.until(lambda: cancelled.is_over)
        cancelled.check(bench, PROMPT)
    await next_is_right(bench)


async def test_one_after_the_other_without_a_pause(bench: Bench) -> None:
    """The same slot and pages through twenty hands: each prefix is right, and so is who keeps them."""
    for number in range(20):
        async with stream(bench, f"brief-{number}", [40 + number, 41, 42]) as brief:
            await brief.until(lambda brief=brief, num=number % 4: len(brief.ids) >= num)  # type: ignore[misc]
            await abort(bench, f"brief-{number}", number % 2)
            await brief.until(lambda brief=brief: brief.is_over)  # type: ignore[misc]
            brief.check(bench, [40 + number, 41, 42])
    await next_is_right(bench)
    state = await bench.mesh.scheduler_state()
    assert state.num_page_violations == 0
