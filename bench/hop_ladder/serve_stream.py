"""A router's end of the Serve stream: ids in, ids out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc


class ServeStream:
    """One stream. Submits that are waiting to be written share a frame, as a router's do."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Serve()
        self._queues: dict[int, asyncio.Queue[tuple[list[int], bool] | Exception]] = {}
        self._pending = scheduler_pb2.ServeRequest()
        self._has_pending = asyncio.Event()
        self._aborted: dict[int, asyncio.Future[None]] = {}
        self._num_submits = 0
        self._num_aborts = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Returns once the scheduler has greeted."""
        await self._call.write(scheduler_pb2.ServeRequest(hello=make_hello(daemon="router", instance_id="hops")))
        await self._call.read()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._channel.close()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: common_pb2.SamplingParams, stop: common_pb2.StopParams
    ) -> AsyncIterator[list[int]]:
        """Ids of each frame. Raises RuntimeError if the request does not end well."""
        self._num_submits += 1
        handle = self._num_submits
        queue = self._queues[handle] = asyncio.Queue()
        self._pending.submits.append(
            scheduler_pb2.Submit(
                handle=handle,
                request_id=f"hops-{id(self)}-{handle}",
                sequence=handle,
                task=common_pb2.TASK_GENERATE,
                prompt_ids=pack_ints(prompt_ids),
                sampling=sampling,
                stop=stop,
            )
        )
        self._has_pending.set()
        is_over = False
        while not is_over:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            ids, is_over = item
            if ids:
                yield ids
        del self._queues[handle]

    async def ping(self) -> None:
        """A round trip through the scheduler's loop: the abort of a request that does not exist."""
        self._num_aborts += 1
        done = self._aborted[self._num_aborts] = asyncio.get_running_loop().create_future()
        self._pending.aborts.add(abort_id=self._num_aborts, request_id="nobody")
        self._has_pending.set()
        await done

    async def _write(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            frame, self._pending = self._pending, scheduler_pb2.ServeRequest()
            await self._call.write(frame)

    async def _read(self) -> None:
        while True:
            frame = await self._call.read()
            if not isinstance(frame, scheduler_pb2.ServeResponse):
                for queue in self._queues.values():
                    queue.put_nowait(RuntimeError("the scheduler closed the stream"))
                return
            self._take(frame)

    def _take(self, frame: scheduler_pb2.ServeResponse) -> None:
        for result in frame.abort_results:
            self._aborted.pop(result.abort_id).set_result(None)
        for rejected in frame.rejected:
            self._queues[rejected.handle].put_nowait(RuntimeError(f"rejected: {rejected.error}"))
        ended = {finished.handle: finished for finished in frame.finished}
        rows = frame.tokens
        if rows.handles:
            handles, counts = (unpack_ints(column, "column").tolist() for column in (rows.handles, rows.counts))
            ids, end = unpack_ints(rows.ids, "ids").tolist(), 0
            for handle, count in zip(handles, counts, strict=True):
                start, end = end, end + count
                self._queues[handle].put_nowait((ids[start:end], ended.pop(handle, None) is not None))
        for handle in ended:
            self._queues[handle].put_nowait(([], True))
