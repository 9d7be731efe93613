"""The router's requests behind one HTTP request: one per prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from radixmesh.daemons.router.requests.request_stream import RequestStream
from radixmesh.daemons.router.requests.updates import Update
from radixmesh.daemons.router.router import Router
from radixmesh.router.v1 import router_pb2

# Index of the prompt, and its new output.
GroupMessage = tuple[int, Update]

# Requests of one group that are being resolved.
_MAX_STARTING = 16


class RequestGroup:
    """`next()` until None, then close(); close() at any moment ends the requests. One consumer.

    on_broken: called when a request fails while its client is being written to. Raises what Router.open does.
    """

    def __init__(
        self, router: Router, requests: Sequence[router_pb2.GenerateRequest], on_broken: Callable[[], None]
    ) -> None:
        self._streams: list[RequestStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._num_open = len(requests)
        self._being_written: RequestStream | None = None
        self._place_written = 0
        if len(requests) > 1:
            # One entry: a pump waits, and its delivery merges, until the consumer has taken what is there.
            self._queue: asyncio.Queue[GroupMessage | BaseException | None] = asyncio.Queue(1)
            # A thousand prompts at once at the tokenizers, from each of some clients, are more than the event loop
            # takes.
            self._starts = asyncio.Semaphore(_MAX_STARTING)
            # By index of the prompt: the message of this request that was in the queue last is written.
            self._is_written = [asyncio.Event() for _ in requests]
        try:
            for request in requests:
                stream = router.open(request, while_draining=True)
                self._streams.append(stream)
                stream.on_broken = on_broken
        except BaseException:
            self.close()
            raise

    async def next(self) -> GroupMessage | None:
        """The next message of any request, None after the last. May be cancelled and called again, once every request
        has said its first. Raises MeshError when one fails."""
        if len(self._streams) == 1:
            (self._being_written,) = self._streams
            message = await self._being_written.take()
            return None if message is None else (0, message)
        if self._being_written is not None:
            self._being_written.delivery.stop_writing()
            self._is_written[self._place_written].set()
            self._being_written = None
        if not self._pumps:
            self._pumps = [asyncio.ensure_future(self._pump(i, stream)) for i, stream in enumerate(self._streams)]
        while self._num_open:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._place_written = item[0]
                self._being_written = self._streams[self._place_written]
                self._being_written.delivery.start_writing()
                return item
            self._num_open -= 1
        return None

    @property
    def is_single(self) -> bool:
        """True for one request: push() may then take the place of next()."""
        return len(self._streams) == 1

    async def push(self, sink: Callable[[Update], bool]) -> None:
        """Hands what next() would give to sink, of a single request: see Delivery.push()."""
        (self._being_written,) = self._streams
        await self._being_written.push(sink)

    def resume(self) -> None:
        """The client takes more again, after sink said that it does not."""
        if self._being_written is not None:
            self._being_written.delivery.resume()

    def progressed(self) -> None:
        """The client has taken some of what is being written to it."""
        if self._being_written is not None:
            self._being_written.delivery.progressed()

    def close(self) -> None:
        """Ends what still runs. Idempotent."""
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.close()

    def error(self) -> BaseException | None:
        """Why a request was broken off while its client was written to, if one was."""
        return next((stream.error for stream in self._streams if stream.error is not None), None)

    async def _pump(self, index: int, stream: RequestStream) -> None:
        with suppress(asyncio.CancelledError):
            try:
                async with self._starts:
                    message = await stream.take()
                while message is not None:
                    # It waits for the others' messages: that is no stall of the client's.
                    stream.delivery.stop_writing()
                    await self._queue.put((index, message))
                    # take() says that nothing is being written any more.
                    await self._is_written[index].wait()
                    self._is_written[index].clear()
                    message = await stream.take()
                await self._queue.put(None)
            except Exception as error:
                await self._queue.put(error)
