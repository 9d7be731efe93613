"""The gRPC server of the scheduler: validate, convert, delegate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.hello import check_hello, check_peer_names
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.cache.watch import watch_cache
from radixmesh.daemons.scheduler.group.group_client import GroupState
from radixmesh.daemons.scheduler.messages import submission_from_proto
from radixmesh.daemons.scheduler.queue.grammars import GrammarShelf
from radixmesh.daemons.scheduler.results.outputs import Rejected
from radixmesh.daemons.scheduler.routers.load_report import ROLES, hello_of, load_of, state_of
from radixmesh.daemons.scheduler.routers.outbox import rejected_to_proto
from radixmesh.daemons.scheduler.routers.router_streams import RouterStream
from radixmesh.daemons.scheduler.scheduler_loop import SchedulerLoop
from radixmesh.daemons.scheduler.sequence import Submission
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

log = get_logger(__name__)

_Context = grpc.aio.ServicerContext[object, object]
_FLUSH_TIMEOUT_S = 30.0
# Each holds an outbox of some MiB.
MAX_ROUTER_STREAMS = 256
# Each may hold a copy of the cache's outline while it reads the snapshot, and costs every change of the cache a little.
MAX_CACHE_WATCHES = 32


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves one SchedulerLoop."""

    def __init__(self, loop: SchedulerLoop, progress: Progress, *, instance_id: str, drain_s: float) -> None:
        self._loop = loop
        self._progress = progress
        self._instance_id = instance_id
        self._drain_s = drain_s
        self._num_watches = 0
        self._grammars = GrammarShelf()

    async def Serve(
        self, request_iterator: AsyncIterator[scheduler_pb2.ServeRequest], context: _Context
    ) -> AsyncIterator[scheduler_pb2.ServeResponse]:
        loop = self._loop
        # The hello first: a refusal that overtakes it makes the router's write fail, and grpc then loses what it says.
        first = await anext(aiter(request_iterator), None)
        self._require_group()
        if first is None or not first.HasField("hello"):
            raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, "start the stream with a hello")
        ours = hello_of(loop, self._instance_id)
        check_hello(first.hello, ours.hello)
        if len(loop.streams) >= MAX_ROUTER_STREAMS:
            raise _too_many("routers are connected", MAX_ROUTER_STREAMS)
        stream = loop.streams.open(first.hello.instance_id)
        reading = asyncio.ensure_future(self._read(stream, first, request_iterator))
        del first  # A stream that is idle holds no frame: one may be megabytes.
        reading.add_done_callback(lambda _: stream.outbox.push_load())
        try:
            yield scheduler_pb2.ServeResponse(hello=ours, load=load_of(loop))
            while True:
                await stream.outbox.wait()
                if stream.closed_by is not None:
                    raise stream.closed_by
                if reading.done():
                    reading.result()
                    return
                yield self._frame(stream)
        finally:
            reading.cancel()
            loop.streams.left(stream, time.monotonic())
            with suppress(asyncio.CancelledError, MeshError):
                await reading

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: _Context
    ) -> scheduler_pb2.GetStateResponse:
        return state_of(self._loop, self._instance_id)

    async def Drain(self, request: scheduler_pb2.DrainRequest, context: _Context) -> scheduler_pb2.DrainResponse:
        self._loop.is_draining = True
        self._loop.streams.push_loads()
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else self._drain_s
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drained()
        return scheduler_pb2.DrainResponse(num_remaining=self._loop.planner.num_live)

    async def SetRole(self, request: scheduler_pb2.SetRoleRequest, context: _Context) -> scheduler_pb2.SetRoleResponse:
        role = next((role for role, value in ROLES.items() if value == request.role), None)
        if role is None:
            message = f"role is {request.role}: choose one that SchedulerRole names"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "role"})
        previous = self._loop.set_role(role)
        return scheduler_pb2.SetRoleResponse(previous=ROLES[previous], num_remaining=self._loop.planner.num_live)

    async def drained(self) -> None:
        """Returns when nothing runs or waits."""
        await self._loop.until(lambda: not self._loop.planner.num_live)

    async def FlushCache(
        self, request: scheduler_pb2.FlushCacheRequest, context: _Context
    ) -> scheduler_pb2.FlushCacheResponse:
        self._require_group()
        planner = self._loop.planner
        if planner.group is None or "flush_cache" not in planner.group.barrier_ops:
            raise _unsupported("flush_cache")
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else _FLUSH_TIMEOUT_S
        wish = planner.flush.wish()
        try:
            self._loop.notify()
            async with asyncio.timeout(timeout_s):
                await self._loop.until(lambda: wish.is_done)
        except TimeoutError as error:
            message = f"{planner.num_running} requests still run after {timeout_s:g} s: drain first, or wait longer"
            raise MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error
        finally:
            # A caller that hung up as well: what it leaves behind would stop admission for ever.
            planner.flush.withdraw(wish)
            self._loop.notify()
        return scheduler_pb2.FlushCacheResponse(flushed_pages=wish.flushed_pages)

    async def WatchCache(
        self, request: scheduler_pb2.WatchCacheRequest, context: _Context
    ) -> AsyncIterator[scheduler_pb2.WatchCacheResponse]:
        if self._num_watches >= MAX_CACHE_WATCHES:
            raise _too_many("callers watch the cache", MAX_CACHE_WATCHES)
        self._num_watches += 1
        try:
            async for message in watch_cache(self._loop, request):
                yield message
        finally:
            self._num_watches -= 1

    async def _read(
        self,
        stream: RouterStream,
        first: scheduler_pb2.ServeRequest,
        requests: AsyncIterator[scheduler_pb2.ServeRequest],
    ) -> None:
        self._apply(stream, first)
        del first
        async for request in requests:
            if request.HasField("hello"):
                raise MeshError(
                    ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, "a hello belongs into the first frame only"
                )
            self._apply(stream, request)
            del request
            # The loop plans first: listening for the next frame takes longer than its turn, and nobody waits for that.
            await asyncio.sleep(0)

    def _apply(self, stream: RouterStream, request: scheduler_pb2.ServeRequest) -> None:
        """One frame, in the order of its fields."""
        if stream.closed_by is not None:
            raise stream.closed_by
        planner, now = self._loop.planner, time.monotonic()
        earlier: dict[int, Submission] = {}
        for submit in request.submits:
            try:
                submission = submission_from_proto(
                    submit,
                    owner=stream.owner,
                    router=stream.router,
                    now=now,
                    earlier=earlier,
                    grammars=self._grammars,
                )
                if not submit.HasField("shares_with"):
                    earlier[submit.handle] = submission
                self._require_open()
                planner.submit(submission)
            except MeshError as error:
                _reject(stream, submit, error)
            except Exception as bug:
                # It must not end the stream: its router would send it again with all others, and again.
                log.exception("submit_failed", request_id=submit.request_id)
                message = f"the submit failed ({type(bug).__name__}): see the scheduler's log"
                _reject(stream, submit, MeshError(ErrorReason.ERROR_REASON_INTERNAL, message))
            stream.submit_sequence = max(stream.submit_sequence, submit.sequence)
        for stop in request.stops:
            planner.finish_by_stop(stream.owner, stop.handle, stop.num_output)
        for abort in request.aborts:
            check_peer_names(request_id=abort.request_id)
            outcome = planner.abort(
                abort.request_id,
                abort.index if abort.HasField("index") else None,
                abort.below_attempt if abort.HasField("below_attempt") else None,
                abort.tenant if abort.HasField("tenant") else None,
                stream.owner if abort.is_own else None,
            )
            if abort.abort_id:
                result = scheduler_pb2.AbortResult(abort_id=abort.abort_id, outcome=int(outcome))  # type: ignore[arg-type]
                stream.outbox.add_frame(scheduler_pb2.ServeResponse(abort_results=[result]))
        for reservation in request.reservations:
            self._loop.reservations.take(reservation, stream.outbox.add_frame)
        for target in request.kv_targets:
            try:
                planner.take_target(stream.owner, KvTarget.from_proto(target))
            except MeshError as error:
                # It is another scheduler's answer: the prompt goes nowhere, and no other output of this stream suffers.
                log.warning("kv_target_refused", reason=error.reason_name, error=error.message)
        if request.stops or request.aborts or request.reservations:
            self._loop.notify()
        else:
            self._loop.submitted()

    def _frame(self, stream: RouterStream) -> scheduler_pb2.ServeResponse:
        group = self._loop.planner.group
        frame = stream.outbox.take(group.weights_version if group is not None else 0)
        # A load is not among what a first token waits for, here and at its router: the next frame has it.
        if stream.outbox.wants_load and not (self._loop.has_first_tokens and frame.HasField("tokens")):
            stream.outbox.wants_load = False
            frame.load.CopyFrom(load_of(self._loop, stream.submit_sequence))
        return frame

    def _require_group(self) -> None:
        self._progress.require_serving()
        if self._loop.group_state is GroupState.STANDBY:
            message = "another scheduler holds the worker group: submit there"
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "standby"})

    def _require_open(self) -> None:
        self._require_group()
        if self._loop.is_draining:
            message = "this scheduler drains and takes no submits: retry elsewhere"
            raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, message, {"state": "draining"})


def _reject(stream: RouterStream, submit: scheduler_pb2.Submit, error: MeshError) -> None:
    rejected = Rejected(owner=stream.owner, handle=submit.handle, attempt=submit.attempt, error=error)
    stream.outbox.add_frame(scheduler_pb2.ServeResponse(rejected=[rejected_to_proto(rejected)]))


def _too_many(what: str, most: int) -> MeshError:
    message = f"{most} {what}, as many as there may be: close some, or retry when others have left"
    return MeshError(ErrorReason.ERROR_REASON_OVERLOADED, message, {"retry_after_ms": "1000", "max": str(most)})


def _unsupported(feature: str) -> MeshError:
    message = f"{feature} is not offered by this scheduler"
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": feature})
