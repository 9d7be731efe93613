"""Short Encode calls over one stream to a tokenizer: opening a call of its own takes longer than encoding its text.

OPEN --ended, broken, refused, close()--> OVER (calls without an answer fail; the next one is made on a new stream)
"""

from __future__ import annotations

import asyncio
from collections import deque

from radixmesh.daemons.router.peers.frame_stream import FrameStream
from radixmesh.daemons.runtime.encode_calls import MAX_CALL_BYTES, MAX_CALLS
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_Call = tokenizer_pb2.EncodeEachRequest
_Answer = tokenizer_pb2.EncodeEachResponse
# Of a call, around its batch: its id and the context of a trace.
_AROUND_BYTES = 256


class EncodeStream:
    """One stream, from its opening to its end. Start it within an event loop."""

    def __init__(self, stream: FrameStream[_Call, _Answer], address: str) -> None:
        self._stream = stream
        self._address = address
        self.is_over = False
        self.has_answered = False
        """The tokenizer knows such streams: an older one would have refused it."""
        self._last_id = 0
        # Calls that were given up stay until they are answered: the tokenizer counts them too.
        self._calls: dict[int, asyncio.Future[tokenizer_pb2.EncodeResponse]] = {}
        self._outbox: deque[_Call] = deque()
        self._has_more = asyncio.Event()
        self._running = asyncio.create_task(self._run(), name=f"encode {address}")

    def takes(self, num_bytes: int) -> bool:
        """True if a batch of that size can go here now."""
        return not self.is_over and len(self._calls) < MAX_CALLS and num_bytes <= MAX_CALL_BYTES - _AROUND_BYTES

    async def encode(
        self, request: tokenizer_pb2.EncodeRequest, trace_context: str, timeout_s: float
    ) -> tokenizer_pb2.EncodeResponse:
        """Asks once. Raises what the tokenizer says of the call, what ended the stream, or DEADLINE_EXCEEDED."""
        answer = self.begin(request, trace_context)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            message = f"{self._address} has not answered within {timeout_s:.1f} s"
            raise MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message, {"daemon": self._address}) from None

    def begin(
        self, request: tokenizer_pb2.EncodeRequest, trace_context: str
    ) -> asyncio.Future[tokenizer_pb2.EncodeResponse]:
        """As encode(), with no bound in time; whoever does not want the answer any more cancels the future."""
        self._last_id += 1
        answer: asyncio.Future[tokenizer_pb2.EncodeResponse] = asyncio.get_running_loop().create_future()
        self._calls[self._last_id] = answer
        self._outbox.append(_Call(call_id=self._last_id, request=request, trace_context=trace_context))
        self._has_more.set()
        return answer

    async def close(self) -> None:
        """Ends the stream; calls without an answer fail."""
        self._running.cancel()
        await asyncio.wait((self._running,))

    async def _run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._read(), self._write())]
        error = MeshError(
            ErrorReason.ERROR_REASON_NO_REPLICA, f"{self._address} ended the stream", {"daemon": self._address}
        )
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            found = next((task.exception() for task in done if task.exception() is not None), None)
            if isinstance(found, MeshError):
                error = found
            elif found is not None:
                log.error("encode_stream_failed", address=self._address, error=repr(found))
        finally:
            self._end(error)
            for task in tasks:
                task.cancel()
            await self._stream.close()
            await asyncio.wait(tasks)

    async def _write(self) -> None:
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            while self._outbox:
                await self._stream.send(self._outbox.popleft())

    async def _read(self) -> None:
        while (answer := await self._stream.receive()) is not None:
            self.has_answered = True
            call = self._calls.pop(answer.call_id, None)
            if call is None:
                message = f"an answer to call {answer.call_id}, which has none to come"
                raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message, {"daemon": self._address})
            if call.done():  # Whoever asked has gone.
                continue
            if answer.WhichOneof("outcome") == "response":
                call.set_result(answer.response)
            else:
                call.set_exception(MeshError.from_proto(answer.error))

    def _end(self, error: MeshError) -> None:
        self.is_over = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                # One each: a traceback grows with everyone who raises it.
                call.set_exception(MeshError(error.reason, error.message, dict(error.metadata)))
