"""The gRPC server of the detokenizer: one table and one outbox per stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer.entry_traces import EntryTraces
from radixmesh.daemons.detokenizer.outbox import Outbox
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable
from radixmesh.daemons.runtime.detokenize.frames import read_opens, read_tokens, write_response
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, TextDelta
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress, State
from radixmesh.daemons.runtime.rpc.hello import check_peer
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import NoTracer, Tracer
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc

log = get_logger(__name__)

_Request = detokenizer_pb2.DetokenizeRequest
_Response = detokenizer_pb2.DetokenizeResponse
# Replayed tokens, or closed handles, after which other streams get a turn: about 5 ms.
_TURN_TOKENS = 50_000
# An entry takes as long to open as that many tokens to replay.
_OPEN_TOKENS = 100


class TableMaker(Protocol):
    """A loaded daemon, as its streams use it."""

    def new_table(self) -> DecoderTable: ...

    def hello(self) -> common_pb2.Hello: ...


class DetokenizerService(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Detokenize: the reader applies frames and fills the outbox, the generator empties it into the stream."""

    def __init__(
        self,
        maker: TableMaker,
        progress: Progress,
        max_pending_bytes: int,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._metrics = metrics or Metrics("detokenizer")
        self._tracer = tracer or NoTracer()
        self._maker = maker
        self._progress = progress
        self._max_pending_bytes = max_pending_bytes
        self._num_streams = 0

    @property
    def num_streams(self) -> int:
        return self._num_streams

    async def Detokenize(
        self,
        request_iterator: AsyncIterator[_Request],
        context: grpc.aio.ServicerContext[_Request, _Response],
    ) -> AsyncIterator[_Response]:
        """See detokenizer.proto for the conversation."""
        # The hello first: a refusal that overtakes it makes the router's write fail, and grpc then loses what it says.
        first = await anext(request_iterator, None)
        self._progress.require_serving()
        if first is None:
            return
        ours = self._maker.hello()
        _check_first(first, ours)
        peer = first.hello.instance_id
        log.info("stream_opened", peer=peer, daemon=first.hello.daemon)
        self._num_streams += 1
        table = self._maker.new_table()
        outbox = Outbox(self._max_pending_bytes)
        traces = EntryTraces(self._tracer, table)
        reader = asyncio.create_task(self._read(first, request_iterator, table, outbox, traces))
        del first  # A stream that is idle holds no frame: one may be megabytes.
        # An error that nobody is left to be told of is no asyncio warning.
        reader.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            yield _Response(hello=ours)
            while (pending := await outbox.take()) is not None:
                yield write_response(pending)
            await reader  # Raises what ended it.
        finally:
            # No await from here on: a call that is cancelled twice would leave the entries behind.
            reader.cancel()
            log.info("stream_closed", peer=peer, num_entries=len(table))
            traces.cleared()
            table.clear()
            self._num_streams -= 1

    async def _read(
        self,
        first: _Request,
        requests: AsyncIterator[_Request],
        table: DecoderTable,
        outbox: Outbox,
        traces: EntryTraces,
    ) -> None:
        try:
            await self.apply(first, table, outbox, traces)
            del first
            async for request in requests:
                if request.HasField("hello"):
                    message = "hello belongs into the first frame of a stream only"
                    raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
                await self.apply(request, table, outbox, traces)
                del request
                self._progress.completed()
        finally:
            outbox.close()

    async def apply(self, request: _Request, table: DecoderTable, outbox: Outbox, traces: EntryTraces) -> None:
        """Opens, then tokens, then closes. All arrays are read first: a broken frame changes nothing."""
        opens = read_opens(request.opens)
        has_tokens = request.HasField("tokens")
        batch = read_tokens(request.tokens) if has_tokens else None
        close_handles = unpack_ints(request.close_handles, "close_handles").tolist()
        await outbox.wait_for_room()
        num_replayed = 0
        deltas: list[TextDelta] = []
        failures: list[EntryFailure] = []
        traces.opened(opens)
        for entry in opens:
            outbox.forget((entry.handle,))
            outcome = self._refusal(entry.handle, table) or table.open(entry)
            if isinstance(outcome, TextDelta):
                deltas.append(outcome)
            elif isinstance(outcome, EntryFailure):
                failures.append(outcome)
                traces.closed((entry.handle,))
                log.info("open_refused", request_id=entry.request_id, error=str(outcome.error))
            num_replayed += len(entry.output_ids) + _OPEN_TOKENS
            if num_replayed >= _TURN_TOKENS:
                num_replayed = 0
                await asyncio.sleep(0)
        if batch is not None:
            since_s = time.monotonic()
            new_deltas, new_failures = table.push(batch)
            self._metrics.detokenize_seconds.observe(time.monotonic() - since_s)
            self._metrics.detokenized_tokens.inc(len(batch.ids))
            deltas += new_deltas
            failures += new_failures
        for start in range(0, len(close_handles), _TURN_TOKENS):
            if start:
                await asyncio.sleep(0)
            some = close_handles[start : start + _TURN_TOKENS]
            traces.closed(some)
            table.close(some)
        if opens or has_tokens:
            outbox.put(deltas, failures)

    def _refusal(self, handle: int, table: DecoderTable) -> EntryFailure | None:
        """Set while draining: what is open may finish, new entries go to another replica."""
        if self._progress.state is not State.DRAINING:
            return None
        table.close((handle,))
        try:
            self._progress.require_serving()
        except MeshError as error:
            return EntryFailure(handle, True, error)
        return None


def _check_first(first: _Request, ours: common_pb2.Hello) -> None:
    if not first.HasField("hello"):
        message = "start the stream with a hello: who you are and which contract versions you speak"
        raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message)
    check_peer(ours, first.hello)
