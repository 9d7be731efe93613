"""The scheduler over real gRPC, on a simulated worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.running_daemon import SOURCES, running
from support.serve_client import Seen, ServeClient, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.health.progress import State
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.daemons.runtime.steps.step import StepResult
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.scheduler.planning.admission.prefill import Prefill
from radixmesh.daemons.scheduler.planning.epoch_state import EpochState, PlanDraft
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

VOCAB_SIZE = 1000
PROMPT = list(range(3, 40))


def worker_settings(**changes: object) -> WorkerSettings:
    values: dict[str, object] = {
        "backend": Backend.SIMULATED,
        "simulated_vocab_size": VOCAB_SIZE,
        "num_pages": 4096,
        "num_slots": 32,
        "max_total_len": 1024,
        "simulated_base_us": 1000.0,
    }
    return WorkerSettings(**{**values, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def scheduler(worker: str, **changes: object) -> AsyncIterator[str]:
    settings = SchedulerSettings(workers=(worker,), check_invariants=True, **changes)  # type: ignore[arg-type]
    async with running(SchedulerDaemon, settings) as daemon:
        yield daemon.address


@asynccontextmanager
async def mesh(**changes: object) -> AsyncIterator[str]:
    async with running(WorkerDaemon, worker_settings()) as worker, scheduler(worker.address, **changes) as address:
        yield address


async def test_a_first_token_does_not_wait_for_a_load() -> None:
    """Whenever one is due: the next frame has it."""
    async with running(WorkerDaemon, worker_settings()) as worker:
        # The next steps are at the worker before the first one ends, however slow this machine is.
        settings = SchedulerSettings(workers=(worker.address,), pipeline_depth="2", check_invariants=True)
        async with running(SchedulerDaemon, settings) as running_one, serve_client(running_one.address) as client:
            await _take_first_tokens(running_one.daemon.loop, client)


async def _take_first_tokens(loop: SchedulerLoop, client: ServeClient) -> None:
    take = loop.take

    def take_while_a_load_is_due(results: Sequence[StepResult]) -> None:
        loop.streams.push_loads(is_urgent=False)
        take(results)

    loop.take = take_while_a_load_is_due
    num_loads = len(client.loads)
    for i in range(4):
        await client.over(await client.submit(PROMPT[: 5 + i], max_tokens=6))
    assert client.num_loads_beside_first_tokens == 0
    assert len(client.loads) > num_loads


class Process:
    """A daemon in a process of its own, to be killed."""

    def __init__(self, module: str, argv: list[str], folder: Path, name: str) -> None:
        self._argv = [sys.executable, "-m", module, *argv, "--address-file", str(folder / name)]
        self._file = folder / name
        self._process: asyncio.subprocess.Process | None = None
        self.address = ""

    async def start(self) -> None:
        self._file.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": str(SOURCES)}
        self._process = await asyncio.create_subprocess_exec(*self._argv, env=env)
        async with asyncio.timeout(30):
            while not self._file.exists():
                assert self._process.returncode is None
                await asyncio.sleep(0.02)
        self.address = self._file.read_text().split()[0]

    async def kill(self, signum: int = signal.SIGKILL) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)
        if signum == signal.SIGKILL:
            await self._process.wait()


def expected(prompt: list[int], num: int) -> list[int]:
    return simulated_continuation(prompt, num, alphabet=Alphabet.of(VOCAB_SIZE))


async def state_of(address: str) -> scheduler_pb2.GetStateResponse:
    async with open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)


async def idle_state(address: str) -> scheduler_pb2.GetStateResponse:
    async with asyncio.timeout(60):
        while (state := await state_of(address)).load.num_running or state.load.num_waiting:
            await asyncio.sleep(0.05)
    return state


@pytest.mark.parametrize("depth", ["auto", "0", "2"])
async def test_output_is_the_oracles_and_nothing_is_left(depth: str) -> None:
    async with mesh(pipeline_depth=depth, chunk_tokens=16) as address, serve_client(address) as client:
        assert client.hello is not None and client.hello.num_pages == 4096
        handles = [await client.submit(PROMPT[: 5 + i], max_tokens=5 + i) for i in range(30)]
        for i, seen in enumerate(await client.over(*handles)):
            assert seen.tokens == expected(PROMPT[: 5 + i], 5 + i)
            assert seen.finished is not None and seen.finished.reason == common_pb2.FINISH_REASON_LENGTH
            assert seen.finished.usage.prompt_tokens == 5 + i
        await client.until(lambda: client.loads[-1].submit_sequence == 30)
        state = await idle_state(address)
        load = state.load
        assert (load.free_pages + load.cached_pages, state.owned_pages, state.num_page_violations) == (4096, 0, 0)
        assert state.prompt_cached_tokens > 0 and load.epoch == 1


async def test_resubmission_on_a_new_stream_continues_and_old_attempts_are_stale() -> None:
    async with mesh() as address:
        async with serve_client(address, "a") as first:
            handle = await first.submit(PROMPT, request_id="r", max_tokens=200)
            await first.until(lambda: len(first.seen[handle].tokens) >= 10)
            known = first.seen[handle].tokens[:7]
        async with serve_client(address, "b") as second:
            handle = await second.submit(PROMPT, request_id="r", attempt=1, max_tokens=200, resumed=known)
            stale = await second.submit(PROMPT, request_id="r", attempt=0)
            seen, rejected = await second.over(handle, stale)
        assert known + seen.tokens == expected(PROMPT, 200)
        assert rejected.rejected is not None
        assert rejected.rejected.error.reason == common_pb2.ERROR_REASON_STALE_ATTEMPT
        assert seen.finished is not None and seen.finished.usage.cached_tokens == len(PROMPT)


async def test_a_router_that_lets_go_of_what_another_took_over_ends_nothing() -> None:
    """Its client left before it was told SUPERSEDED: one id and one attempt, and another router's stream by now."""
    async with mesh() as address, serve_client(address, "a") as a, serve_client(address, "b") as b:
        taken = await a.submit(PROMPT, request_id="r", max_tokens=200)
        kept = await a.submit(PROMPT[:9], request_id="s", max_tokens=900)
        await a.until(lambda: len(a.seen[taken].tokens) >= 5)
        theirs = await b.submit(PROMPT, request_id="r", max_tokens=200)
        await b.until(lambda: b.seen[theirs].tokens)
        for request_id in ("r", "s"):
            abort = scheduler_pb2.Abort(request_id=request_id, below_attempt=1 << 16, is_own=True)
            await a.write(scheduler_pb2.ServeRequest(aborts=[abort]))
        (seen,) = await b.over(theirs)
        assert seen.tokens == expected(PROMPT, 200), seen.finished
        for ended, reason in zip(await a.over(taken, kept), ("took over", ""), strict=True):
            assert ended.finished is not None and ended.finished.reason == common_pb2.FINISH_REASON_ABORT
            assert reason in ended.finished.error.message


async def test_requests_of_a_stream_that_ended_are_aborted_after_two_seconds() -> None:
    async with mesh() as address:
        async with serve_client(address, "a") as client:
            handle = await client.submit(PROMPT, request_id="gone", max_tokens=900)
            await client.until(lambda: len(client.seen[handle].tokens) > 0)
        await asyncio.sleep(0.5)
        assert (await state_of(address)).load.num_running == 1, "it may still be superseded"
        async with asyncio.timeout(60):
            while (state := await state_of(address)).load.num_running:
                await asyncio.sleep(0.05)
        assert state.owned_pages == 0
        assert state.load.cached_pages >= len(PROMPT), "its pages stay cached"


async def test_two_routers_share_and_abort_each_others_requests() -> None:
    async with (
        running(WorkerDaemon, worker_settings(num_slots=2)) as worker,
        scheduler(worker.address) as address,
        serve_client(address, "a") as a,
        serve_client(address, "b") as b,
    ):
        flood = [await a.submit([3, 4, 5 + i], max_tokens=20) for i in range(40)]
        polite = [await b.submit([9, 8, 7], max_tokens=20) for _ in range(2)]
        await b.over(*polite)
        assert sum(a.seen[h].is_over for h in flood) < 20, "b does not wait for the flood of a"
        assert await b.abort(f"a-{flood[-1]}", 1) == scheduler_pb2.ABORT_OUTCOME_FOUND
        assert await b.abort(f"a-{flood[-1]}", 2) == scheduler_pb2.ABORT_OUTCOME_FINISHED
        assert await b.abort("nobody", 3) == scheduler_pb2.ABORT_OUTCOME_UNKNOWN
        seen = await a.over(*flood)
        assert seen[-1].finished is not None
        assert seen[-1].finished.reason == common_pb2.FINISH_REASON_ABORT
        assert all(s.tokens == expected([3, 4, 5 + i], 20) for i, s in enumerate(seen[:-1]))


async def test_a_reader_that_pauses_gets_merged_frames_and_loses_nothing() -> None:
    # Logprobs make frames large: the transport holds a few of them, and what is left waits in the scheduler.
    sampling = common_pb2.SamplingParams(temperature=0.0, num_top_logprobs=64)
    async with mesh() as address, serve_client(address) as client:
        handles = [await client.submit([3, 4, 5 + i], max_tokens=600, sampling=sampling) for i in range(16)]
        await client.until(lambda: client.num_token_frames > 3)
        client.is_reading.clear()
        await idle_state(address)
        client.is_reading.set()
        for i, seen in enumerate(await client.over(*handles)):
            assert seen.tokens == expected([3, 4, 5 + i], 600)
            assert len(seen.logprobs) == 600
        assert client.most_tokens_a_row > 10, "a step gives an output one token"


async def test_worker_killed_and_restarted_outputs_continue(tmp_path: Path) -> None:
    argv = ["--backend", "simulated", "--simulated-vocab-size", str(VOCAB_SIZE), "--num-pages", "4096"]
    argv += ["--max-total-len", "1024", "--num-slots", "8", "--listen", f"unix:{tmp_path}/worker.sock"]
    worker = Process("radixmesh.daemons.worker", argv, tmp_path, "worker")
    await worker.start()
    try:
        async with scheduler(worker.address) as address, serve_client(address) as client:
            handles = [await client.submit(PROMPT[: 4 + i], max_tokens=150) for i in range(12)]
            await client.until(lambda: len(client.seen[handles[0]].tokens) > 10)
            await worker.kill()
            await worker.start()
            for i, seen in enumerate(await client.over(*handles)):
                assert seen.tokens == expected(PROMPT[: 4 + i], 150)
            assert (await state_of(address)).load.epoch == 1, "a new worker has seen no epoch"
    finally:
        await worker.kill()


async def test_standby_takes_over_when_the_holder_dies(tmp_path: Path) -> None:
    async with running(WorkerDaemon, worker_settings()) as worker:
        procs = [
            Process("radixmesh.daemons.scheduler", ["--workers", worker.address], tmp_path, name)
            for name in ("one", "two")
        ]
        try:
            await procs[0].start()
            async with serve_client_when_ready(procs[0].address, "a") as client:
                handle = await client.submit(PROMPT, max_tokens=50)
                await client.over(handle)
                await procs[1].start()
                await wait_for_group(procs[1].address, scheduler_pb2.GROUP_STATE_STANDBY)
                async with serve_client(procs[1].address, "b") as refused:
                    assert refused.error is not None
                    assert refused.error.reason == common_pb2.ERROR_REASON_NOT_SERVING, refused.error
                await asyncio.sleep(6)
                assert (await state_of(procs[0].address)).load.group == scheduler_pb2.GROUP_STATE_SERVING
                handle = await client.submit(PROMPT, max_tokens=60)
                await client.over(handle)
            await procs[0].kill()
            await wait_for_group(procs[1].address, scheduler_pb2.GROUP_STATE_SERVING)
            state = await state_of(procs[1].address)
            assert state.adopted_tokens >= len(PROMPT) + 50 and state.load.epoch == 2
            async with serve_client(procs[1].address, "b") as client:
                handle = await client.submit(PROMPT, max_tokens=60)
                (seen,) = await client.over(handle)
                assert seen.tokens == expected(PROMPT, 60)
                assert seen.finished is not None and seen.finished.usage.cached_tokens == len(PROMPT) - 1
        finally:
            for proc in procs:
                with contextlib.suppress(AssertionError):
                    await proc.kill()


async def test_fenced_scheduler_closes_its_streams_and_stands_by(tmp_path: Path) -> None:
    async with running(WorkerDaemon, worker_settings()) as worker:
        first = Process("radixmesh.daemons.scheduler", ["--workers", worker.address], tmp_path, "one")
        second = Process("radixmesh.daemons.scheduler", ["--workers", worker.address], tmp_path, "two")
        try:
            await first.start()
            async with serve_client_when_ready(first.address, "a") as client:
                await first.kill(signal.SIGSTOP)
                await second.start()
                await wait_for_group(second.address, scheduler_pb2.GROUP_STATE_SERVING)
                await first.kill(signal.SIGCONT)
                await client.until(lambda: client.error is not None)
            await wait_for_group(first.address, scheduler_pb2.GROUP_STATE_STANDBY)
            assert (await state_of(second.address)).load.group == scheduler_pb2.GROUP_STATE_SERVING
        finally:
            for proc in (first, second):
                await proc.kill()


@pytest.mark.parametrize("fault", ["refuse@20", "duplicate@20", "reorder@20", "vanish@20", "hang@20:4000"])
async def test_worker_faults_lose_and_repeat_nothing(fault: str) -> None:
    faulty = worker_settings(faults=(fault,))
    async with (
        running(WorkerDaemon, faulty) as worker,
        scheduler(worker.address, pipeline_depth="2", step_timeout_s=1.0) as address,
    ):
        async with serve_client(address) as client:
            handles = [await client.submit(PROMPT[: 4 + i], max_tokens=60) for i in range(8)]
            for i, seen in enumerate(await client.over(*handles)):
                assert seen.tokens == expected(PROMPT[: 4 + i], 60)
        state = await idle_state(address)
        assert state.load.epoch >= 2 and state.num_page_violations == 0


async def test_flush_and_drain() -> None:
    async with mesh() as address, serve_client(address) as client, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await client.over(await client.submit(PROMPT, max_tokens=5))
        flushed = await stub.FlushCache(scheduler_pb2.FlushCacheRequest(timeout_ms=3000))
        assert flushed.flushed_pages >= len(PROMPT)
        assert (await state_of(address)).load.cached_pages == 0
        long = await client.submit(PROMPT, max_tokens=900)
        await client.until(lambda: len(client.seen[long].tokens) > 0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.FlushCache(scheduler_pb2.FlushCacheRequest(timeout_ms=100))
        assert mesh_error_from_rpc(late.value).reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
        drained = await stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=100))
        assert drained.num_remaining == 1
        refused = await client.submit(PROMPT)
        await client.until(lambda: client.seen[refused].is_over)
        assert client.seen[refused].rejected is not None
        assert await client.abort(f"a-{long}") == scheduler_pb2.ABORT_OUTCOME_FOUND
        assert (await stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=3000))).num_remaining == 0


async def test_a_scheduler_that_is_told_to_end_says_so_in_its_load() -> None:
    async with running(WorkerDaemon, worker_settings()) as worker:
        settings = SchedulerSettings(workers=(worker.address,))
        async with running(SchedulerDaemon, settings) as scheduler, serve_client(scheduler.address) as client:
            long = await client.submit(PROMPT, max_tokens=900)
            await client.until(lambda: len(client.seen[long].tokens) > 0)
            draining = asyncio.create_task(scheduler.daemon.drain())
            await client.until(lambda: any(load.is_leaving and load.is_draining for load in client.loads))
            assert not draining.done()
            assert await client.abort(f"a-{long}") == scheduler_pb2.ABORT_OUTCOME_FOUND
            await asyncio.wait_for(draining, 60)


@asynccontextmanager
async def slow_mesh() -> AsyncIterator[str]:
    """Steps of 20 ms: an output of 900 tokens outlasts whatever a test does beside it."""
    settings = worker_settings(simulated_base_us=20_000.0)
    async with running(WorkerDaemon, settings) as worker, scheduler(worker.address) as address:
        yield address


async def test_each_of_two_flushes_waits_for_itself() -> None:
    async with slow_mesh() as address, serve_client(address) as client, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        long = await client.submit(PROMPT, max_tokens=900)
        await client.until(lambda: len(client.seen[long].tokens) > 0)
        patient = stub.FlushCache(scheduler_pb2.FlushCacheRequest(timeout_ms=120_000))
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.FlushCache(scheduler_pb2.FlushCacheRequest(timeout_ms=100))
        assert mesh_error_from_rpc(late.value).reason == common_pb2.ERROR_REASON_DEADLINE_EXCEEDED
        assert await client.abort(f"a-{long}") == scheduler_pb2.ABORT_OUTCOME_FOUND
        async with asyncio.timeout(60):
            assert (await patient).flushed_pages >= len(PROMPT)
        assert (await state_of(address)).load.cached_pages == 0


async def test_a_cancelled_flush_leaves_admission_as_it_was() -> None:
    async with slow_mesh() as address, serve_client(address) as client, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        long = await client.submit(PROMPT, max_tokens=900)
        await client.until(lambda: len(client.seen[long].tokens) > 0)
        flush = stub.FlushCache(scheduler_pb2.FlushCacheRequest(timeout_ms=600_000))
        held_up = await client.submit(PROMPT[:7], max_tokens=3)
        state = await state_of(address)
        async with asyncio.timeout(60):
            while not state.load.num_waiting:
                state = await state_of(address)
        flush.cancel()
        (seen,) = await client.over(held_up)
        assert seen.tokens == expected(PROMPT[:7], 3) and not client.seen[long].is_over
        assert await client.abort(f"a-{long}") == scheduler_pb2.ABORT_OUTCOME_FOUND


async def test_garbage_is_answered_with_types_and_hurts_nobody() -> None:
    async with mesh() as address, serve_client(address) as healthy, open_channel(address) as channel:
        running_handle = await healthy.submit(PROMPT, max_tokens=100)
        for raw, reason in (
            (b"\xff\xff\xff", common_pb2.ERROR_REASON_MALFORMED_MESSAGE),
            (b"", common_pb2.ERROR_REASON_PROTOCOL_VIOLATION),
            (hello_bytes(min_contract_version=99, max_contract_version=99), common_pb2.ERROR_REASON_VERSION_MISMATCH),
        ):
            serve = channel.stream_stream("/radixmesh.scheduler.v1.SchedulerService/Serve")
            call = serve()
            await call.write(raw)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_to_end(call)
            assert mesh_error_from_rpc(error.value).reason == reason
        bad: list[tuple[dict[str, object], int]] = [
            ({"prompt_ids": b"123"}, common_pb2.ERROR_REASON_MALFORMED_MESSAGE),
            ({"prompt_ids": b""}, common_pb2.ERROR_REASON_EMPTY_PROMPT),
            ({"request_id": ""}, common_pb2.ERROR_REASON_MISSING_FIELD),
            ({"task": common_pb2.TASK_UNSPECIFIED}, common_pb2.ERROR_REASON_MISSING_FIELD),
            ({"task": common_pb2.TASK_EMBED}, common_pb2.ERROR_REASON_UNSUPPORTED),
            ({"grammar_hash": "ab"}, common_pb2.ERROR_REASON_UNKNOWN_BLOB),
            ({"transfer_id": "t" * 65}, common_pb2.ERROR_REASON_INVALID_ARGUMENT),
            ({"model": "other"}, common_pb2.ERROR_REASON_UNKNOWN_MODEL),
            ({"attempt": -1}, common_pb2.ERROR_REASON_INVALID_ARGUMENT),
            ({"deadline_ms": 0}, common_pb2.ERROR_REASON_DEADLINE_EXCEEDED),
        ]
        for i, (changes, reason) in enumerate(bad):
            message = scheduler_pb2.Submit(
                handle=1000 + i, request_id=f"bad{i}", task=common_pb2.TASK_GENERATE, prompt_ids=b"\3\0\0\0"
            )
            message.sampling.temperature = 0
            for name, value in changes.items():
                setattr(message, name, value)
            healthy.seen[1000 + i] = Seen(message.attempt, 0)
            await healthy.write(scheduler_pb2.ServeRequest(submits=[message]))
            (seen,) = await healthy.over(1000 + i)
            answer = seen.rejected or seen.finished
            assert answer is not None and answer.error.reason == reason, changes
        with pytest.raises(grpc.aio.AioRpcError) as watch:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            await read_to_end(stub.WatchCache(scheduler_pb2.WatchCacheRequest(after_revision=2**64 - 1)))
        assert mesh_error_from_rpc(watch.value).reason == common_pb2.ERROR_REASON_RESNAPSHOT
        (seen,) = await healthy.over(running_handle)
        assert seen.tokens == expected(PROMPT, 100)


def hello_bytes(**changes: int) -> bytes:
    hello = make_hello(daemon="router", instance_id="x")
    for name, value in changes.items():
        setattr(hello, name, value)
    return scheduler_pb2.ServeRequest(hello=hello).SerializeToString()


async def read_to_end(call) -> None:  # type: ignore[no-untyped-def]
    async for _ in call:
        pass


async def wait_for_group(address: str, group: int) -> None:
    async with asyncio.timeout(30):
        while (await state_of(address)).load.group != group:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serve_client_when_ready(address: str, name: str) -> AsyncIterator[ServeClient]:
    await wait_for_group(address, scheduler_pb2.GROUP_STATE_SERVING)
    async with serve_client(address, name) as client:
        assert client.error is None, client.error
        yield client


async def test_outputs_of_one_model_are_not_continued_by_another(tmp_path: Path) -> None:
    argv = ["--backend", "simulated", "--num-pages", "4096", "--max-total-len", "1024", "--num-slots", "8"]
    argv += ["--listen", f"unix:{tmp_path}/worker.sock", "--simulated-vocab-size"]
    workers = [
        Process("radixmesh.daemons.worker", [*argv, str(size)], tmp_path, "worker") for size in (VOCAB_SIZE, 900)
    ]
    await workers[0].start()
    try:
        async with scheduler(workers[0].address) as address:
            async with serve_client(address) as client:
                handle = await client.submit(PROMPT, max_tokens=900)
                await client.until(lambda: len(client.seen[handle].tokens) > 10)
                await workers[0].kill()
                await workers[1].start()
                await client.until(lambda: client.error is not None)
                assert client.error is not None and client.error.metadata == {"state": "other_model"}
                tokens = client.seen[handle].tokens
                assert tokens == expected(PROMPT, len(tokens)), "none is the other model's"
            assert (await idle_state(address)).hello.hello.model.vocab_size == 900
    finally:
        for worker in workers:
            with contextlib.suppress(AssertionError):
                await worker.kill()


async def test_steps_longer_than_a_hang_come_through_in_the_end() -> None:
    slow = worker_settings(simulated_base_us=900_000.0)
    async with (
        running(WorkerDaemon, slow) as worker,
        scheduler(worker.address, step_timeout_s=0.3) as address,
        serve_client(address) as client,
    ):
        handle = await client.submit(PROMPT, max_tokens=3)
        (seen,) = await client.over(handle)
        assert seen.tokens == expected(PROMPT, 3)
        assert (await state_of(address)).load.epoch > 1, "it did look like a hang at first"


async def test_a_long_step_is_no_stall_of_anybody() -> None:
    """Or a supervisor would kill a slow worker, and its scheduler, again and again."""
    async with running(WorkerDaemon, worker_settings(simulated_base_us=1_000_000)) as worker:
        settings = SchedulerSettings(workers=(worker.address,), pipeline_depth="0")
        async with running(SchedulerDaemon, settings) as daemon, serve_client(daemon.address) as client:
            both = (worker.runtime.progress, daemon.runtime.progress)
            for progress in both:
                progress.stall_s = 0.3
            handle = await client.submit(PROMPT, max_tokens=3)
            states = set()
            while not client.seen[handle].is_over:
                states |= {progress.state for progress in both}
                await asyncio.sleep(0.02)
            assert states == {State.SERVING}


async def test_a_scheduler_that_admits_nobody_does_not_call_itself_well() -> None:
    async with running(WorkerDaemon, worker_settings()) as worker:
        settings = SchedulerSettings(workers=(worker.address,))
        async with running(SchedulerDaemon, settings) as daemon, serve_client(daemon.address) as client:
            progress = daemon.runtime.progress
            progress.stall_s = 0.5
            await asyncio.sleep(0.8)
            assert progress.state is State.SERVING, "nothing waits"
            daemon.daemon.loop.planner.prefill = NobodyEnters(daemon.daemon.loop.planner.prefill)  # type: ignore[assignment,arg-type]
            await client.submit(PROMPT, max_tokens=3)
            async with asyncio.timeout(60):
                while progress.state is State.SERVING:
                    await asyncio.sleep(0.05)


class NobodyEnters:
    """A prefill with a bug."""

    def __init__(self, prefill: Prefill) -> None:
        self.prefill = prefill

    def begin_plan(self, state: EpochState) -> None:
        self.prefill.begin_plan(state)

    def add_chunks(self, state: EpochState, draft: PlanDraft, *, may_admit: bool, only: object = None) -> None:
        return


async def test_routers_and_watches_of_the_cache_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixmesh.daemons.scheduler.service.MAX_ROUTER_STREAMS", 2)
    monkeypatch.setattr("radixmesh.daemons.scheduler.service.MAX_CACHE_WATCHES", 2)
    async with mesh() as address, open_channel(address) as channel, serve_client(address) as client:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        watches = [stub.WatchCache(scheduler_pb2.WatchCacheRequest()) for _ in range(2)]
        for watch in watches:
            async with asyncio.timeout(60):
                assert await watch.read() is not grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.WatchCache(scheduler_pb2.WatchCacheRequest()).read()
        assert mesh_error_from_rpc(refused.value).reason == common_pb2.ERROR_REASON_OVERLOADED
        async with serve_client(address):
            call = channel.stream_stream("/radixmesh.scheduler.v1.SchedulerService/Serve")()
            await call.write(hello_bytes())
            with pytest.raises(grpc.aio.AioRpcError) as third:
                await read_to_end(call)
            assert mesh_error_from_rpc(third.value).reason == common_pb2.ERROR_REASON_OVERLOADED
        # Streams that are open go on, and one that ends makes room.
        (seen,) = await client.over(await client.submit(PROMPT, max_tokens=5))
        assert seen.tokens == expected(PROMPT, 5)
        watches[0].cancel()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await stub.WatchCache(scheduler_pb2.WatchCacheRequest()).read() is not grpc.aio.EOF
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
