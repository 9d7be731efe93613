"""The writing end of an Execute stream: messages leave one at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from radixmesh.worker.v1 import worker_pb2

Send = Callable[[worker_pb2.ExecuteResponse], Awaitable[None]]


class ResultStream:
    """Sends messages as they come. Fault injection replaces it: simulated.faulty_stream."""

    may_merge = True
    """Results that wait together may leave as one message."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def fault_of(self, plan: worker_pb2.StepPlan) -> Exception | None:
        """The exception that `plan` meets with instead of its step; None: it runs."""
        return None

    async def write(self, response: worker_pb2.ExecuteResponse) -> None:
        """Sends a message."""
        await self._send(response)

    async def flush(self) -> None:
        """Sends messages that were held back."""

    def close(self) -> None:
        """The stream is over: messages that are held back are lost."""
