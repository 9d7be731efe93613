"""A router's end of a Serve stream, for tests of the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_floats, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


@dataclass
class Seen:
    """Events of one handle; positions are checked as they come."""

    attempt: int
    first: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    """Of each token that had any: its own, then ids and logprobs of the alternatives."""
    finished: scheduler_pb2.Finished | None = None
    rejected: scheduler_pb2.Rejected | None = None

    @property
    def is_over(self) -> bool:
        return self.finished is not None or self.rejected is not None


class ServeClient:
    """Reads in the background unless `is_reading` is cleared."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self.name = name
        self.seen: dict[int, Seen] = {}
        self.aborts: dict[int, int] = {}
        self.loads: list[scheduler_pb2.Load] = []
        self.reservations: dict[str, scheduler_pb2.ReservationResult] = {}
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.num_token_frames = 0
        self.num_loads_beside_first_tokens = 0
        self.most_tokens_a_row = 0
        """Of one output in one frame: more than a step gives it where steps were merged."""
        self.error: MeshError | None = None
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._changed = asyncio.Event()
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Serve()
        self._num_sent = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.write(scheduler_pb2.ServeRequest(hello=make_hello(daemon="router", instance_id=self.name)))
        self._task = asyncio.ensure_future(self._read())
        await self.until(lambda: self.hello is not None or self.error is not None)

    async def write(self, request: scheduler_pb2.ServeRequest) -> None:
        await self._call.write(request)

    async def submit(self, prompt: list[int], **changes: object) -> int:
        """Returns the handle."""
        self._num_sent += 1
        handle = int(changes.pop("handle", self._num_sent))  # type: ignore[call-overload]
        message = submit_of(handle, self._num_sent, self.name, prompt, changes)
        self.seen.setdefault(handle, Seen(message.attempt, len(message.resumed_output_ids) // 4))
        await self.write(scheduler_pb2.ServeRequest(submits=[message]))
        return handle

    async def abort(self, request_id: str, abort_id: int = 1) -> int:
        await self.write(scheduler_pb2.ServeRequest(aborts=[{"abort_id": abort_id, "request_id": request_id}]))
        await self.until(lambda: abort_id in self.aborts)
        return self.aborts[abort_id]

    async def over(self, *handles: int, timeout_s: float = 30.0) -> list[Seen]:
        """Waits until these handles have ended."""
        await self.until(lambda: self.error is not None or all(self.seen[h].is_over for h in handles), timeout_s)
        assert self.error is None, self.error
        return [self.seen[h] for h in handles]

    async def until(self, is_true: object, timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_true():  # type: ignore[operator]
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        self._call.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        try:
            while True:
                await self.is_reading.wait()
                frame = await self._call.read()
                if frame is grpc.aio.EOF:
                    code, details = await self._call.code(), await self._call.details()
                    trailing = await self._call.trailing_metadata()
                    empty = grpc.aio.Metadata()
                    raise grpc.aio.AioRpcError(code, empty, trailing or empty, details)
                self._take(frame)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = mesh_error_from_rpc(error)
        finally:
            self._changed.set()

    def _take(self, frame: scheduler_pb2.ServeResponse) -> None:
        if frame.HasField("hello"):
            self.hello = frame.hello
        if frame.HasField("load"):
            self.loads.append(frame.load)
            handles = unpack_ints(frame.tokens.handles, "handles").tolist()
            self.num_loads_beside_first_tokens += any(not self.seen[handle].tokens for handle in handles)
        rows = frame.tokens
        if rows.handles:
            self.num_token_frames += 1
        handles = unpack_ints(rows.handles, "handles").tolist()
        assert len(set(handles)) == len(handles), "a handle occurs once"
        columns = [unpack_ints(c, "c").tolist() for c in (rows.attempts, rows.first_output_indexes, rows.counts)]
        ids, start = unpack_ints(rows.ids, "ids").tolist(), 0
        for handle, attempt, first, count in zip(handles, *columns, strict=True):
            seen = self.seen[handle]
            assert not seen.is_over, "tokens after the end"
            assert attempt == seen.attempt
            assert first == seen.first + len(seen.tokens), "a gap or a repetition"
            seen.tokens += ids[start : start + count]
            self.most_tokens_a_row = max(self.most_tokens_a_row, count)
            start += count
        for row in rows.logprobs:
            self.seen[handles[row.row]].logprobs += _logprobs_of(row.logprobs)
        for finished in frame.finished:
            assert self.seen[finished.handle].finished is None
            self.seen[finished.handle].finished = finished
        for rejected in frame.rejected:
            self.seen[rejected.handle].rejected = rejected
        for answer in frame.reservation_results:
            self.reservations[answer.transfer_id] = answer
        for result in frame.abort_results:
            self.aborts[result.abort_id] = result.outcome


def submit_of(
    handle: int, sequence: int, name: str, prompt: list[int], changes: dict[str, object]
) -> scheduler_pb2.Submit:
    resumed = changes.pop("resumed", [])
    stop = common_pb2.StopParams(max_tokens=int(changes.pop("max_tokens", 8)))  # type: ignore[call-overload]
    temperature = float(changes.pop("temperature", 0.0))  # type: ignore[arg-type]
    sampling = changes.pop("sampling", common_pb2.SamplingParams(temperature=temperature, seed=5))
    values = {"request_id": f"{name}-{handle}", "task": common_pb2.TASK_GENERATE, **changes}
    return scheduler_pb2.Submit(
        handle=handle,
        sequence=sequence,
        prompt_ids=pack_ints(prompt),
        resumed_output_ids=pack_ints(resumed),  # type: ignore[arg-type]
        sampling=sampling,  # type: ignore[arg-type]
        stop=stop,
        **values,  # type: ignore[arg-type]
    )


def _logprobs_of(message: common_pb2.Logprobs) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
    own, num = unpack_floats(message.token_logprobs, "own").tolist(), message.num_top
    ids = unpack_ints(message.top_ids, "top").tolist()
    top = unpack_floats(message.top_logprobs, "top").tolist()
    assert len(ids) == len(top) == num * len(own)
    return [
        (value, tuple(ids[i * num : (i + 1) * num]), tuple(top[i * num : (i + 1) * num])) for i, value in enumerate(own)
    ]


@asynccontextmanager
async def serve_client(address: str, name: str = "a") -> AsyncIterator[ServeClient]:
    async with open_channel(address) as channel:
        client = ServeClient(channel, name)
        await client.start()
        try:
            yield client
        finally:
            client.close()
