"""Prefill on one group, decode on another, by their schedulers: the output is one group's, whatever gets lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from support.kv_writers import needs_nixl
from support.runner_contract import MODEL
from support.running_daemon import Running, running
from support.serve_client import ServeClient, serve_client

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import Role, SchedulerSettings
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.pages.page_states import PageState
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.transfers import transfer_calls
from radixmesh.daemons.scheduler.transfers.arrival import Arrival, ArrivalFailure, ArrivalState
from radixmesh.daemons.scheduler.transfers.handovers import Handover
from radixmesh.daemons.scheduler.transfers.transfer_calls import TransferCalls
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.core import WorkerCore
from radixmesh.daemons.worker.kv_transfer import transfers
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.worker.v1 import worker_pb2

TIMEOUT_S = 60.0
PROMPT = [3 + 7 * i % 90 for i in range(49)]
NUM_OUT = 12


@dataclass
class Pair:
    """The prefill side's parts come first."""

    workers: list[Running[WorkerDaemon]]
    schedulers: list[Running[SchedulerDaemon]]
    clients: list[ServeClient]

    def planner(self, number: int) -> Planner:
        return self.schedulers[number].daemon.loop.planner

    async def reserve(self, transfer_id: str = "t", prompt: list[int] = PROMPT, **fields: object):
        """The answer of the decode side."""
        client = self.clients[1]
        values = {"transfer_id": transfer_id, "lease_ms": 30_000, "granule": self.clients[0].hello.page_size, **fields}
        reservation = scheduler_pb2.Reservation(prompt_ids=pack_ints(prompt), **values)
        await client.write(scheduler_pb2.ServeRequest(reservations=[reservation]))
        await client.until(lambda: transfer_id in client.reservations, TIMEOUT_S)
        return client.reservations.pop(transfer_id)

    async def prefill(self, target, prompt: list[int] = PROMPT, **fields: object):
        handle = await self.clients[0].submit(prompt, max_tokens=NUM_OUT, send_kv_to=target, **fields)
        (seen,) = await self.clients[0].over(handle, timeout_s=TIMEOUT_S)
        return seen

    async def decode(self, first: list[int], transfer_id: str = "t", prompt: list[int] = PROMPT, **fields: object):
        handle = await self.clients[1].submit(
            prompt, max_tokens=NUM_OUT, resumed=first, transfer_id=transfer_id, **fields
        )
        (seen,) = await self.clients[1].over(handle, timeout_s=TIMEOUT_S)
        return seen

    def is_clean(self) -> bool:
        """True if nothing of any transfer is left anywhere."""
        counts = [self.planner(number).state.page_counts() for number in (0, 1)]
        return (
            not any(worker.daemon.core.transfers.staging.num_bytes for worker in self.workers)
            and not len(self.planner(1).arrivals)
            and not any(counts[n][state] for n in (0, 1) for state in counts[n] if state.name in _TRANSIENT)
            and all(self.planner(n).state.pages.cache.num_evictable == counts[n][_CACHED] for n in (0, 1))
        )


_TRANSIENT = ("LOADING", "LEASED", "OWNED", "QUARANTINED", "SAVING")
_CACHED = PageState.CACHED


@asynccontextmanager
async def pair(
    backend: str = "simulated",
    sizes: tuple[int, int] = (1, 1),
    *,
    max_total_len: int = 96,
    kind: TransferTransport = TransferTransport.SHARED_MEMORY,
    **fields: object,
) -> AsyncIterator[Pair]:
    values: dict[str, object] = {"backend": Backend.SIMULATED, "simulated_base_us": 500.0}
    if backend == "cpu":
        values = {"backend": Backend.CPU, "model": MODEL, "cpu_threads": 1}
    elif backend == "device":
        # Copies take longer than calls: plans name pages that are scattered to.
        values |= {"simulated_device": True, "simulated_copied_token_us": 200.0}
        kind = TransferTransport.DEVICE
    elif backend == "cuda":
        values = {"backend": Backend.CUDA, "model": MODEL, "dtype": "float32"}
    values |= {"num_slots": 4, "max_total_len": max_total_len, "transfer_staging_bytes": 1 << 20}
    values["transfer_transport"] = kind
    async with AsyncExitStack() as stack:
        workers, schedulers, clients = [], [], []
        for role, size in zip((Role.PREFILL, Role.DECODE), sizes, strict=True):
            settings = WorkerSettings(page_size=size, num_pages=max(256, 3 * max_total_len) // size, **values)  # type: ignore[arg-type]
            worker = await stack.enter_async_context(running(WorkerDaemon, settings, instance_id=f"worker-{role}"))
            # A loaded machine may take its time: where KV is to come, it is waited for.
            values_of_scheduler = {
                "role": role,
                "check_invariants": True,
                "chunk_tokens": 16,
                "transfer_timeout_s": 30.0,
            }
            values_of_scheduler |= fields
            own = SchedulerSettings(workers=(worker.address,), **values_of_scheduler)  # type: ignore[arg-type]
            scheduler = await stack.enter_async_context(running(SchedulerDaemon, own, instance_id=f"s-{role}"))
            workers.append(worker)
            schedulers.append(scheduler)
            clients.append(await stack.enter_async_context(serve_client(scheduler.address)))
        yield Pair(workers, schedulers, clients)


async def alone(both: Pair, prompt: list[int] = PROMPT) -> list[int]:
    """The output that the prefill side gives by itself."""
    handle = await both.clients[0].submit(prompt, max_tokens=NUM_OUT, request_id=f"alone-{prompt[0]}")
    (seen,) = await both.clients[0].over(handle, timeout_s=TIMEOUT_S)
    return seen.tokens


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sizes", [(1, 1), (16, 1), (1, 16)])
@pytest.mark.parametrize("backend", ["simulated", "cpu", "device"])
async def test_the_output_is_one_groups(backend: str, sizes: tuple[int, int]) -> None:
    async with pair(backend, sizes) as both:
        assert [client.hello.role for client in both.clients] == [1, 2]
        result = await both.reserve()
        expected_tokens = 49 if sizes == (1, 1) else 48
        assert (result.target.first_token, result.target.num_tokens) == (0, expected_tokens)
        first = await both.prefill(result.target)
        assert first.finished.reason == common_pb2.FINISH_REASON_HANDED_OVER and len(first.tokens) == 1
        rest = await both.decode(first.tokens)
        assert rest.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert first.tokens + rest.tokens == await alone(both)
        # It is what arrived that was decoded from: the prompt was computed on one side only.
        assert rest.finished.usage.cached_tokens == expected_tokens
        assert both.planner(1).counters.prefilled_tokens <= 2
        assert both.planner(1).arrivals.num_arrived == 1
        await until(both.is_clean)


async def test_all_outputs_of_a_request_wait_for_one_transfer() -> None:
    async with pair() as both:
        expected = await alone(both)
        result = await both.reserve()
        client = both.clients[1]
        handles = [
            await client.submit(PROMPT, max_tokens=NUM_OUT, transfer_id="t", request_id="n", index=index)
            for index in range(3)
        ]
        await until(lambda: both.planner(1).num_live == 3)
        await both.prefill(result.target)
        for seen in await client.over(*handles, timeout_s=TIMEOUT_S):
            assert seen.tokens == expected and seen.finished.usage.cached_tokens == 48
        assert both.planner(1).counters.prefilled_tokens == 3, "the last token of the prompt, for each"
        await until(both.is_clean)


@pytest.mark.parametrize("short_of", ["staging", "pages", "time"])
async def test_many_prompts_at_once_wait_for_room_and_none_is_computed_twice(short_of: str) -> None:
    """There is room for two or three of twelve."""
    prompts = [[number + 5, *PROMPT] for number in range(12)]
    most_tokens = {"max_total_len": 62} if short_of == "pages" else {}
    async with pair(**most_tokens, transfer_queue_s=0.5 if short_of == "time" else 30.0) as both:
        expected = [await alone(both, prompt) for prompt in prompts]
        planner, transfers, client = both.planner(1), both.workers[1].daemon.core.transfers, both.clients[1]
        result = await both.reserve("first", prompts[0])
        if short_of != "pages":
            transfers.staging.max_bytes = 3 * transfers.receiver.get("first").num_bytes
        first = scheduler_pb2.Reservation(transfer_id="first", is_cancelled=True)
        await client.write(scheduler_pb2.ServeRequest(reservations=[first]))
        await until(both.is_clean)
        handles, firsts, most = [], [[] for _ in prompts], 0
        for number, prompt in enumerate(prompts):
            values = {"lease_ms": 30_000, "granule": 1, "prompt_ids": pack_ints(prompt)}
            reservation = scheduler_pb2.Reservation(transfer_id=f"t{number}", **values)
            await client.write(scheduler_pb2.ServeRequest(reservations=[reservation]))
            handle = await client.submit(prompt, max_tokens=NUM_OUT, transfer_id=f"t{number}", request_id=f"r{number}")
            handles.append(handle)
        if short_of == "time":
            await client.until(lambda: len(client.reservations) == 12, TIMEOUT_S)
        for number, prompt in enumerate(prompts):
            await client.until(lambda name=f"t{number}": name in client.reservations, TIMEOUT_S)
            most = max(most, len(transfers.receiver))
            result = client.reservations[f"t{number}"]
            if result.HasField("target"):
                first = await both.prefill(result.target, prompt, request_id=f"p{number}")
                # As a router does it: the output goes on behind the first token, as a later attempt.
                values = {"max_tokens": NUM_OUT, "transfer_id": f"t{number}", "request_id": f"r{number}"}
                handles[number] = await client.submit(prompt, resumed=first.tokens, attempt=1, **values)
                firsts[number] = first.tokens
        answers = await client.over(*handles, timeout_s=TIMEOUT_S)
        assert [first + seen.tokens for first, seen in zip(firsts, answers, strict=True)] == expected
        if short_of == "time":
            assert (planner.arrivals.num_arrived, planner.arrivals.failures[ArrivalFailure.QUEUE]) == (3, 9)
        else:
            assert planner.arrivals.num_arrived == 12
            assert planner.arrivals.failures == {ArrivalFailure.CANCELLED: 1}, "the first one"
            assert planner.counters.prefilled_tokens <= 24 and 2 <= most <= 5
        await until(both.is_clean)


@pytest.mark.parametrize("behind_steps", [True, False])
async def test_an_older_worker_is_asked_when_the_step_is_over(
    behind_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would find no KV in pages that are being computed."""
    capabilities, start_of, asked = WorkerCore.capabilities, transfer_calls.start_of, []

    def of_older(self: WorkerCore) -> worker_pb2.Capabilities:
        told = capabilities(self)
        told.sends_behind_steps &= behind_steps
        return told

    def noted(rank: WorkerStream, handover: Handover, part: object) -> object:
        oldest = handover.state.in_flight.oldest
        asked.append(oldest is not None and oldest.plan.step_id <= handover.after_step)
        return start_of(rank, handover, part)

    monkeypatch.setattr(WorkerCore, "capabilities", of_older)
    monkeypatch.setattr(transfer_calls, "start_of", noted)
    prompt = [3 + 7 * i % 90 for i in range(700)]
    async with pair(max_total_len=800, transfer_chunk_tokens=256) as both:
        result = await both.reserve(prompt=prompt)
        first = await both.prefill(result.target, prompt)
        rest = await both.decode(first.tokens, prompt=prompt)
        assert first.tokens + rest.tokens == await alone(both, prompt)
        assert rest.finished.usage.cached_tokens == 700 and both.planner(0).handovers.num_chunks > 1
        # That of the last chunk at least is asked for with its step.
        assert len(asked) == both.planner(0).handovers.num_chunks and asked[-1] == behind_steps
        assert behind_steps or not any(asked)
        await until(both.is_clean)


async def test_only_what_the_decode_side_lacks_is_sent() -> None:
    async with pair(sizes=(16, 1)) as both:
        handle = await both.clients[1].submit(PROMPT[:20], max_tokens=1)
        await both.clients[1].over(handle, timeout_s=TIMEOUT_S)
        result = await both.reserve()
        assert (result.target.first_token, result.target.num_tokens) == (20, 28)
        first = await both.prefill(result.target)
        rest = await both.decode(first.tokens)
        assert first.tokens + rest.tokens == await alone(both)
        assert rest.finished.usage.cached_tokens == 48
        again = await both.reserve("u")
        assert not again.HasField("target") and not again.HasField("error"), "all that could come is there"
        await until(both.is_clean)


async def test_a_request_whose_kv_does_not_come_computes_it() -> None:
    async with pair(transfer_timeout_s=0.5) as both:
        expected = await alone(both)
        # Nobody sends anything.
        result = await both.reserve()
        rest = await both.decode(expected[:1])
        assert expected[:1] + rest.tokens == expected and rest.finished.usage.cached_tokens == 0
        # It comes too late: the region is gone.
        first = await both.prefill(result.target)
        assert first.tokens == expected[:1]
        # An id that nobody knows.
        rest = await both.decode(expected[:1], "unknown")
        assert expected[:1] + rest.tokens == expected
        await until(both.is_clean)
        assert both.planner(1).arrivals.num_failed == 1


async def test_reservations_that_nobody_uses_end_and_cancelled_ones_at_once() -> None:
    async with pair() as both:
        await both.reserve(lease_ms=300)
        await until(both.is_clean)
        await both.reserve("u")
        assert both.workers[1].daemon.core.transfers.staging.num_bytes
        cancelled = scheduler_pb2.Reservation(transfer_id="u", is_cancelled=True)
        renewed = scheduler_pb2.Reservation(transfer_id="v", lease_ms=100)
        await both.clients[1].write(scheduler_pb2.ServeRequest(reservations=[cancelled, renewed]))
        await until(both.is_clean)


async def test_a_region_that_comes_after_its_reservation_was_cancelled_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixmesh.daemons.scheduler.transfers.transfer_calls._LEASE_MS", 60_000)
    prepare, abort, is_aborted = TransferCalls.prepare, TransferCalls.abort_arrival, asyncio.Event()

    async def prepare_late(self: TransferCalls, rank: WorkerStream, arrival: Arrival, part: object) -> object:
        await is_aborted.wait()
        return await prepare(self, rank, arrival, part)

    async def note_abort(self: TransferCalls, arrival: Arrival) -> None:
        await abort(self, arrival)
        is_aborted.set()

    monkeypatch.setattr(TransferCalls, "prepare", prepare_late)
    monkeypatch.setattr(TransferCalls, "abort_arrival", note_abort)
    async with pair() as both:
        reserved = scheduler_pb2.Reservation(transfer_id="t", lease_ms=30_000, prompt_ids=pack_ints(PROMPT), granule=1)
        cancelled = scheduler_pb2.Reservation(transfer_id="t", is_cancelled=True)
        await both.clients[1].write(scheduler_pb2.ServeRequest(reservations=[reserved]))
        await until(lambda: any(a.state is ArrivalState.RESERVING for a in both.planner(1).arrivals.live()))
        await both.clients[1].write(scheduler_pb2.ServeRequest(reservations=[cancelled]))
        async with asyncio.timeout(30.0):
            while both.workers[1].daemon.core.transfers.num_failed < 1:
                await asyncio.sleep(0.01)
        assert both.is_clean()


async def test_kv_of_other_tokens_is_not_sent() -> None:
    async with pair(transfer_timeout_s=0.5) as both:
        result = await both.reserve()
        other = [5, *PROMPT[1:]]
        first = await both.prefill(result.target, other)
        rest = await both.decode(first.tokens, prompt=other)
        assert first.tokens + rest.tokens == await alone(both, other)
        assert both.planner(1).arrivals.num_arrived == 0
        await until(both.is_clean)


async def test_a_new_epoch_on_either_side_ends_transfers_and_no_request() -> None:
    async with pair(transfer_timeout_s=2.0) as both:
        for number in (0, 1):
            prompt = [5 + number, *PROMPT]
            expected = await alone(both, prompt)
            result = await both.reserve(f"t{number}", prompt)
            asked = asyncio.ensure_future(both.decode(expected[:1], f"t{number}", prompt))
            await until(lambda: both.planner(1).num_live > 0)
            both.schedulers[number].daemon.loop.lost(ConnectionError("the stream is cut"))
            await until(lambda n=number: both.schedulers[n].daemon.loop.epoch > 1)
            first = await both.prefill(result.target, prompt, request_id=f"p{number}")
            assert first.tokens == expected[:1]
            assert expected[:1] + (await asked).tokens == expected
        await until(both.is_clean)


async def test_what_cannot_be_is_refused() -> None:
    async with pair() as both:
        for fields, reason in (
            ({"prompt": [10**6]}, "INVALID_ARGUMENT"),
            ({"prompt": [5] * 96}, "INVALID_ARGUMENT"),
            ({"lease_ms": 0}, "INVALID_ARGUMENT"),
            ({"lease_ms": 60_001}, "INVALID_ARGUMENT"),
            ({"model": "other"}, "UNKNOWN_MODEL"),
            ({"cache_salt": "x" * 1025}, "INVALID_ARGUMENT"),
        ):
            result = await both.reserve("bad", **fields)
            assert common_pb2.ErrorReason.Name(result.error.reason) == f"ERROR_REASON_{reason}", fields
        client = both.clients[1]
        too_long = scheduler_pb2.Reservation(transfer_id="x" * 65, lease_ms=1000, prompt_ids=pack_ints(PROMPT))
        await client.write(scheduler_pb2.ServeRequest(reservations=[too_long]))
        await client.until(lambda: "x" * 64 in client.reservations, TIMEOUT_S)
        await both.reserve("t")
        result = await both.reserve("t")
        assert result.error.reason == common_pb2.ERROR_REASON_INVALID_ARGUMENT, "an id is used once"
        # The prefill side takes no reservations, and no target that is none.
        both.clients.reverse()
        assert (await both.reserve("r")).error.reason == common_pb2.ERROR_REASON_UNSUPPORTED
        both.clients.reverse()
        seen = await both.prefill(scheduler_pb2.TransferTarget(transfer_id="t", num_tokens=3))
        assert seen.rejected.error.reason == common_pb2.ERROR_REASON_INVALID_ARGUMENT
        assert seen.rejected.error.metadata["field"] == "send_kv_to.regions"


async def test_roles_need_workers_that_transfer() -> None:
    settings = WorkerSettings(backend=Backend.SIMULATED, num_pages=64)
    async with running(WorkerDaemon, settings) as worker:
        own = SchedulerSettings(workers=(worker.address,), role=Role.DECODE)
        async with running(SchedulerDaemon, own) as scheduler, serve_client(scheduler.address) as client:
            assert client.hello is not None and client.hello.role == scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED
    with pytest.raises(ValueError, match="needs a prefix cache"):
        SchedulerSettings(workers=("w:1",), role=Role.PREFILL, cache="none")


LONG = [3 + 7 * i % 90 for i in range(1300)]


@pytest.mark.parametrize("sizes", [(1, 1), (16, 4)])
async def test_chunks_leave_while_the_prompt_is_computed(sizes: tuple[int, int]) -> None:
    async with pair(sizes=sizes, max_total_len=2048, chunk_tokens=128, transfer_chunk_tokens=256) as both:
        expected = await alone(both, LONG)
        flushed = LONG[::-1]  # Another prompt: nothing of it is cached.
        result = await both.reserve(prompt=flushed)
        starts: list[tuple[int, int, bool, int]] = []
        transfers, planner = both.workers[0].daemon.core.transfers, both.planner(0)
        start = transfers.start

        async def noted(request):
            starts.append((request.first_token, request.num_tokens, request.is_last, planner.counters.output_tokens))
            await start(request)

        transfers.start = noted
        before = planner.counters.output_tokens
        first = await both.prefill(result.target, flushed)
        rest = await both.decode(first.tokens, prompt=flushed)
        assert rest.finished.usage.cached_tokens == len(flushed) // max(sizes) * max(sizes)
        assert first.tokens + rest.tokens == await alone(both, flushed)
        assert len(starts) > 3 and [s[2] for s in starts] == [False] * (len(starts) - 1) + [True]
        ends = [0, *(s[0] + s[1] for s in starts)]
        assert [s[0] for s in starts] == ends[:-1] and ends[-1] == result.target.num_tokens
        assert starts[0][3] == before, "before the first token was there"
        assert expected == await alone(both, LONG)
        await until(both.is_clean)


async def test_an_aborted_prompt_ends_the_transfer_that_it_had_begun() -> None:
    async with pair(max_total_len=2048, chunk_tokens=128, transfer_chunk_tokens=256) as both:
        result = await both.reserve(prompt=LONG)
        planner, transfers = both.planner(0), both.workers[0].daemon.core.transfers
        take = planner.handovers.take_wanted

        def aborted():
            wanted = take()
            if wanted and wanted[0].first_token:
                planner.abort("gone")  # Its second chunk is about to be sent.
            return wanted

        planner.handovers.take_wanted = aborted
        seen = await both.prefill(result.target, LONG, request_id="gone")
        assert seen.finished.reason == common_pb2.FINISH_REASON_ABORT
        await until(both.is_clean)
        assert both.planner(1).arrivals.num_failed == 1 and not transfers.senders
        assert not planner.handovers.sending


@pytest.mark.parametrize("fault", ["second chunk", "second chunk, no stream yet", "first chunk", "no sender"])
@pytest.mark.parametrize("backend", ["simulated", "device"])
async def test_a_chunk_that_is_not_sent_fails_the_transfer_and_not_the_output(
    backend: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode side is told, also by a writer of which it has not heard yet: it does not wait for its patience."""
    async with pair(backend, max_total_len=2048, chunk_tokens=128, transfer_chunk_tokens=256) as both:
        result = await both.reserve(prompt=LONG)
        handovers, transport = both.planner(0).handovers, both.workers[0].daemon.core.transfers.transport
        take = handovers.take_wanted

        def stale():
            wanted = take()
            for chunk in wanted:
                if fault == "first chunk" or (chunk.first_token and not chunk.is_last):
                    chunk.generations[:] += 1
            return wanted

        @asynccontextmanager
        async def slow_open(*_: object) -> AsyncIterator[None]:
            await asyncio.Event().wait()
            yield

        if fault == "no sender":
            monkeypatch.setattr(transfers, "MAX_SENDERS", 0)
        else:
            handovers.take_wanted = stale
        if fault == "second chunk, no stream yet":
            transport.open = slow_open
        first = asyncio.ensure_future(both.prefill(result.target, LONG))
        if (backend, fault) == ("device", "second chunk, no stream yet"):
            # Its chunks go to the region itself, and wait for the stream.
            await until(lambda: bool(both.workers[0].daemon.core.transfers.senders))
            both.workers[0].daemon.core.transfers.abort("t")
        await first
        rest = await both.decode(first.result().tokens, prompt=LONG)
        arrivals = both.planner(1).arrivals
        assert rest.finished.usage.cached_tokens == 0 and arrivals.num_arrived == 0
        assert first.result().tokens + rest.tokens == await alone(both, LONG)
        # The end of a stream, if there is one, may be heard of first.
        told = {"worker_writer_aborted"} if "no s" in fault else {"worker_writer_aborted", "worker_writer_gone"}
        assert arrivals.failures.total() == 1 and set(arrivals.failures) <= told, arrivals.failures
        await until(both.is_clean)


async def test_a_role_that_is_taken_counts_from_the_next_load_on() -> None:
    async with pair() as both, open_channel(both.schedulers[1].address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        assert (await both.reserve("a")).HasField("target")
        taken = await stub.SetRole(scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_PREFILL))
        assert taken.previous == scheduler_pb2.SCHEDULER_ROLE_DECODE
        refused = await both.reserve("b")
        assert refused.error.reason == common_pb2.ERROR_REASON_UNSUPPORTED
        state = await stub.GetState(scheduler_pb2.GetStateRequest())
        assert state.load.role == state.hello.role == scheduler_pb2.SCHEDULER_ROLE_PREFILL
        with pytest.raises(grpc.aio.AioRpcError, match="role is 9"):
            await stub.SetRole(scheduler_pb2.SetRoleRequest(role=9))
        await stub.SetRole(scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_DECODE))
        assert (await both.reserve("c")).HasField("target")


async def test_workers_without_transfers_take_no_role() -> None:
    async with AsyncExitStack() as stack:
        settings = WorkerSettings(backend=Backend.SIMULATED, num_pages=64, num_slots=2, max_total_len=64)
        worker = await stack.enter_async_context(running(WorkerDaemon, settings, instance_id="w"))
        own = SchedulerSettings(workers=(worker.address,))
        scheduler = await stack.enter_async_context(running(SchedulerDaemon, own, instance_id="s"))
        channel = await stack.enter_async_context(open_channel(scheduler.address))
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="transfer-staging-bytes"):
            await stub.SetRole(scheduler_pb2.SetRoleRequest(role=scheduler_pb2.SCHEDULER_ROLE_DECODE))
        await stub.SetRole(scheduler_pb2.SetRoleRequest())


PHASES = ("reserved", "prefilling", "writing", "committing", "decoding")


KINDS = [
    TransferTransport.GRPC,
    TransferTransport.SHARED_MEMORY,
    TransferTransport.DEVICE,
    pytest.param(TransferTransport.NIXL, marks=[needs_nixl, pytest.mark.full]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_in_any_phase_leaves_nothing(phase: str, kind: TransferTransport) -> None:
    """As a router does it: the output is aborted at its decode side, its prefill and the reservation with it."""
    backend = "device" if kind is TransferTransport.DEVICE else "simulated"
    async with pair(backend, kind=kind, max_total_len=1024, chunk_tokens=128, transfer_chunk_tokens=256) as both:
        prompt = LONG[:600:-1]  # No prefix of others.
        sending, receiving = (worker.daemon.core.transfers for worker in both.workers)
        is_there, goes_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            is_there.set()
            await goes_on.wait()

        if phase == "prefilling":
            handovers, take = both.planner(0).handovers, both.planner(0).handovers.take_wanted

            def noted():
                wanted = take()
                if wanted:
                    is_there.set()
                return wanted

            handovers.take_wanted = noted
        elif phase == "writing":
            sending.transport.before_last_word = hold
        elif phase == "committing":
            commit = receiving.commit

            async def held(request):
                await hold()
                return await commit(request)

            receiving.commit = held
        result = await both.reserve(prompt=prompt)
        decoding = await both.clients[1].submit(
            prompt, max_tokens=NUM_OUT if phase != "decoding" else 300, transfer_id="t", request_id="r"
        )
        if phase != "reserved":
            prefill = asyncio.ensure_future(both.prefill(result.target, prompt, request_id="r"))
            if phase == "decoding":
                await until(lambda: both.planner(1).counters.output_tokens > 5)
            else:
                async with asyncio.timeout(TIMEOUT_S):
                    await is_there.wait()
        cancelled = scheduler_pb2.Reservation(transfer_id="t", is_cancelled=True)
        aborts = [scheduler_pb2.Abort(request_id="r")]
        await both.clients[1].write(scheduler_pb2.ServeRequest(aborts=aborts, reservations=[cancelled]))
        await both.clients[0].write(scheduler_pb2.ServeRequest(aborts=aborts))
        (seen,) = await both.clients[1].over(decoding, timeout_s=TIMEOUT_S)
        assert seen.finished.reason == common_pb2.FINISH_REASON_ABORT
        if phase != "reserved":
            await prefill
        goes_on.set()
        # A sender goes behind its channel, which it closes when its region is given back.
        await until(lambda: both.is_clean() and not sending.senders and not len(receiving.receiver))
        # The next one is not disturbed.
        expected, result = await alone(both), await both.reserve("u")
        first = await both.prefill(result.target, request_id="next")
        rest = await both.decode(first.tokens, "u", request_id="next")
        assert first.tokens + rest.tokens == expected and rest.finished.usage.cached_tokens == len(PROMPT)
        await until(both.is_clean)


async def send_target(both: Pair, target: scheduler_pb2.TransferTarget) -> None:
    await both.clients[0].write(scheduler_pb2.ServeRequest(kv_targets=[target]))


@pytest.mark.parametrize("prompt", [PROMPT, LONG])
@pytest.mark.parametrize("is_late", [False, True])
async def test_a_prompt_may_come_ahead_of_the_target_of_its_kv(prompt: list[int], is_late: bool) -> None:
    """is_late: the first token is there by then."""
    fields = {"max_total_len": 2048, "chunk_tokens": 128, "transfer_chunk_tokens": 256}
    async with pair("device", **fields) as both:
        client, bare = both.clients[0], scheduler_pb2.TransferTarget(transfer_id="t")
        handle = await client.submit(prompt, max_tokens=NUM_OUT, send_kv_to=bare)
        if is_late:
            await client.until(lambda: bool(client.seen[handle].tokens), TIMEOUT_S)
        result = await both.reserve(prompt=prompt)
        await send_target(both, result.target)
        (first,) = await client.over(handle, timeout_s=TIMEOUT_S)
        assert first.finished.reason == common_pb2.FINISH_REASON_HANDED_OVER and len(first.tokens) == 1
        rest = await both.decode(first.tokens, prompt=prompt)
        assert first.tokens + rest.tokens == await alone(both, prompt)
        assert rest.finished.usage.cached_tokens == result.target.num_tokens
        await until(both.is_clean)


@pytest.mark.parametrize("wrong", ["none", "bare", "broken", "of another", "of other tokens"])
async def test_a_prompt_without_a_target_ends_with_its_token_and_sends_nothing(wrong: str) -> None:
    async with pair() as both:
        client = both.clients[0]
        handle = await client.submit(
            PROMPT, max_tokens=NUM_OUT, send_kv_to=scheduler_pb2.TransferTarget(transfer_id="t")
        )
        prompt = [5, *PROMPT[1:]] if wrong == "of other tokens" else PROMPT
        target = (await both.reserve("u" if wrong == "of another" else "t", prompt=prompt)).target
        if wrong == "bare":
            target = scheduler_pb2.TransferTarget(transfer_id="t")
        elif wrong == "broken":
            target.tokens_digest = b"x"
        if wrong != "none":
            await send_target(both, target)
        (seen,) = await client.over(handle, timeout_s=TIMEOUT_S)
        assert seen.finished.reason == common_pb2.FINISH_REASON_LENGTH and len(seen.tokens) == 1
        handovers = both.planner(0).handovers
        assert not handovers.num_started and not handovers.sending and not handovers.num_running
        assert not both.workers[0].daemon.core.transfers.senders
        handle = await client.submit(PROMPT, max_tokens=1)
        await client.over(handle, timeout_s=TIMEOUT_S)  # The stream lives.
