"""The calls of one EncodeEach stream: each is answered as soon as it is done, in whatever order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.encode_calls import MAX_CALL_BYTES, MAX_CALLS
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_Call = tokenizer_pb2.EncodeEachRequest
_Answer = tokenizer_pb2.EncodeEachResponse


class EncodeCalls:
    """Takes calls by read_all(), gives answers by next_answer(). One event loop.

    encode: answers one call, or raises MeshError. is_quick: true for a call that encode() answers without waiting for
    anything: it needs no task. on_error: told of every error, for counting.
    """

    def __init__(
        self,
        encode: Callable[[_Call], Awaitable[tokenizer_pb2.EncodeResponse]],
        is_quick: Callable[[_Call], bool],
        on_error: Callable[[MeshError], None],
    ) -> None:
        self._encode = encode
        self._is_quick = is_quick
        self._on_error = on_error
        self._num_unanswered = 0
        self._num_writing = 0
        self._has_room = asyncio.Event()
        self._answers: deque[_Answer | None] = deque()
        self._has_answers = asyncio.Event()
        self.running: set[asyncio.Task[None]] = set()

    async def read_all(self, calls: AsyncIterator[_Call]) -> None:
        """Takes calls until there are no more and all are done. Raises what ends the stream."""
        try:
            async for call in calls:
                # A call counts until its answer is written: a peer that reads none gets no more calls in.
                while self._num_unanswered >= MAX_CALLS:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._num_unanswered += 1
                if self._is_quick(call):
                    await self._run(call)
                    # The answer leaves before the next call is asked for.
                    await asyncio.sleep(0)
                    continue
                task = asyncio.create_task(self._run(call))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            if self.running:
                await asyncio.wait(self.running)
        finally:
            self.finish()

    async def next_answer(self) -> _Answer | None:
        """The next message to write; None: the stream ends. Asked for once the one before has been written."""
        self._num_unanswered -= self._num_writing
        self._num_writing = 0
        self._has_room.set()
        while not self._answers:
            self._has_answers.clear()
            await self._has_answers.wait()
        answer = self._answers.popleft()
        self._num_writing = int(answer is not None)
        return answer

    def finish(self) -> None:
        """Ends the stream behind the answers that are there."""
        self._put(None)

    def close(self) -> None:
        """The stream is gone: calls that wait are dropped."""
        for task in self.running:
            task.cancel()

    async def _run(self, call: _Call) -> None:
        answer = _Answer(call_id=call.call_id)
        try:
            if call.ByteSize() > MAX_CALL_BYTES:
                raise _too_large(call.ByteSize())
            answer.response.CopyFrom(await self._encode(call))
        except MeshError as error:
            self._refuse(answer, error)
        except Exception as error:
            log.exception("encode_failed")
            message = f"EncodeEach failed ({type(error).__name__}): see the daemon's log"
            self._refuse(answer, MeshError(ErrorReason.ERROR_REASON_INTERNAL, message))
        self._put(answer)

    def _refuse(self, answer: _Answer, error: MeshError) -> None:
        self._on_error(error)
        answer.error.CopyFrom(error.to_proto())

    def _put(self, answer: _Answer | None) -> None:
        self._answers.append(answer)
        self._has_answers.set()


def _too_large(num_bytes: int) -> MeshError:
    message = f"{num_bytes} bytes in one call of a stream are more than {MAX_CALL_BYTES}: send it by Encode"
    metadata = {"size": str(num_bytes), "max": str(MAX_CALL_BYTES)}
    return MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, metadata)
