"""A request as its client's connection holds it: closing the stream ends the request, however it comes to that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Request
from radixmesh.daemons.router.requests.updates import Update
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.tracing import NoSpan, Span
from radixmesh.router.v1 import router_pb2


class StreamOwner(Protocol):
    """Runs the requests of streams."""

    async def start(self, stream: RequestStream) -> Request:
        """Resolves the stream's request. Raises MeshError."""

    def begin(self, stream: RequestStream, request: Request) -> None:
        """Journals it and lets it run. Raises JOURNAL_FULL."""

    def release(self, stream: RequestStream) -> None:
        """The stream is over."""


class RequestStream:
    """`await take()` until None, then close(); close() at any moment ends the request. One consumer.

    on_broken: called once when the stream fails while its consumer is busy elsewhere (writing to a client that does not
    read): the consumer is to stop that and call take(), which raises the error.
    """

    def __init__(
        self, owner: StreamOwner, message: router_pb2.GenerateRequest, request_id: str, delivery: Delivery
    ) -> None:
        self._owner = owner
        self.message = message
        self.request_id = request_id
        self.tenant = (message.resume.resolved if message.HasField("resume") else message).tenant
        self.resumption = message.resume.resumption if message.HasField("resume") else 0
        self.delivery = delivery
        self.span: Span = NoSpan()
        self.request: Request | None = None
        self.error: MeshError | None = None
        self.on_broken: Callable[[], None] | None = None
        # The consumer's task while it resolves the request.
        self._starting: asyncio.Task[object] | None = None
        self._is_started = False
        self._is_closed = False

    async def take(self) -> Update | None:
        """The next update once there is something to say; None at the end. Raises MeshError."""
        if not self._is_started:
            self._is_started = True
            await self._start()
        return await self.delivery.take()

    async def push(self, sink: Callable[[Update], bool]) -> None:
        """Hands what follows the first take() to sink: see Delivery.push()."""
        await self.delivery.push(sink)

    def fail(self, error: MeshError) -> None:
        """Ends the stream with error."""
        if self.error is not None or self._is_closed:
            return
        self.error = error
        self.delivery.fail(error)
        if self._starting is not None:
            self._starting.cancel()
        if self.delivery.writing_since is not None and self.on_broken is not None:
            self.on_broken()

    def close(self) -> None:
        """Ends the request if it still runs. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._owner.release(self)

    async def _start(self) -> None:
        task = self._starting = asyncio.current_task()
        assert task is not None
        try:
            request = await self._owner.start(self)
        except asyncio.CancelledError:
            # By fail(), or because the consumer itself is to end: then more than one has asked for it.
            if self.error is not None and not task.uncancel():
                raise self.error from None
            raise
        finally:
            self._starting = None
        self.request = request
        self._owner.begin(self, request)
        # The scheduler's frame leaves ahead of the first message to the client, which the client can use no sooner than
        # it comes; the other order costs each first token that write.
        await asyncio.sleep(0)


class StreamTable:
    """Open streams by request id and tenant: an id is a name within its tenant."""

    def __init__(self) -> None:
        self._by_id: dict[str, dict[str, RequestStream]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RequestStream]:
        return iter([stream for streams in self._by_id.values() for stream in streams.values()])

    def get(self, request_id: str, tenant: str) -> RequestStream | None:
        return self._by_id.get(request_id, {}).get(tenant)

    def of_id(self, request_id: str, tenant: str | None) -> list[RequestStream]:
        """Streams of that id, tenant None = of any tenant."""
        streams = self._by_id.get(request_id, {}).values()
        return [stream for stream in streams if tenant in (None, stream.tenant)]

    def add(self, stream: RequestStream) -> None:
        """Takes a stream in, whose name is free."""
        streams = self._by_id.setdefault(stream.request_id, {})
        assert stream.tenant not in streams, stream.request_id
        streams[stream.tenant] = stream
        self._count += 1

    def remove(self, stream: RequestStream) -> None:
        """Drops a stream. Idempotent."""
        streams = self._by_id.get(stream.request_id, {})
        if streams.get(stream.tenant) is stream:
            del streams[stream.tenant]
            self._count -= 1
            if not streams:
                del self._by_id[stream.request_id]
