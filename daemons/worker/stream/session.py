"""One Execute stream, message by message.

NEW --hello--> GREETED --complete*--> GREETED --fence--> FENCING --claim--> HOLDER --plan*--> HOLDER
                                         `-----------claim (version 2)--------^
The holder of a fence may send alive at any time.
Ends: by a refusal (which is the last message), by an error (fenced, protocol violation), or by the peer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TypeGuard

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import check_peer
from radixmesh.daemons.runtime.rpc.wire_bounds import parse_frame
from radixmesh.daemons.runtime.steps.forward_shape import missing_field
from radixmesh.daemons.runtime.steps.result_codec import refusal_to_proto
from radixmesh.daemons.runtime.steps.step import Refusal
from radixmesh.daemons.worker.core import WorkerCore
from radixmesh.daemons.worker.stream.capabilities import claimed
from radixmesh.worker.v1 import worker_pb2

# Of results that leave as one message.
_MERGED_BYTES = 64 << 10
_FIELDS = ("hello", "complete", "fence", "claim", "plan", "alive")


# The exception that a plan meets with instead of its step; None: it runs.
FaultOf = Callable[[worker_pb2.StepPlan], Exception | None]


def _no_fault(plan: worker_pb2.StepPlan) -> Exception | None:
    return None


class SessionState(Enum):
    NEW = auto()
    GREETED = auto()
    FENCING = auto()
    HOLDER = auto()


class ExecuteSession:
    """Takes the scheduler's messages by receive(), gives the worker's by next_response(). fault_of: fault injection."""

    def __init__(self, core: WorkerCore, fault_of: FaultOf = _no_fault, *, may_merge: bool = True) -> None:
        """may_merge: results that wait together leave as one message, where the peer takes that."""
        self._core = core
        self._fault_of = fault_of
        self._state = SessionState.NEW
        self._instance_id = ""
        self._num_unanswered = 0
        self._answered_one = asyncio.Event()
        self._may_merge = may_merge
        self._takes_result_batches = False
        self._num_writing = 0
        self._outbox: deque[worker_pb2.ExecuteResponse | Exception | None] = deque()
        self._has_more = asyncio.Event()

    async def receive(self, request: worker_pb2.ExecuteRequest) -> None:
        """Handles one message. Raises the MeshError that ends the stream: PROTOCOL_VIOLATION, MALFORMED_MESSAGE, ..."""
        field = _field_of(request)
        if field == "hello":
            self._expect(SessionState.NEW, field)
            check_peer(self._core.hello, request.hello)
            self._instance_id = request.hello.instance_id
            self._state = SessionState.GREETED
            self.deliver(worker_pb2.ExecuteResponse(hello=self._core.worker_hello()))
        elif field == "complete":
            self._expect(SessionState.GREETED, field)
            await self._complete(request.complete)
        elif field == "fence":
            self._expect(SessionState.GREETED, field)
            self._fence(request.fence)
        elif field == "claim":
            if self._state is not SessionState.FENCING:
                self._expect(SessionState.GREETED, field)
            await self._claim(request.claim)
        elif field == "alive":
            if self._state is not SessionState.HOLDER:
                self._expect(SessionState.FENCING, field)
            self._core.alive(self)
        else:
            self._expect(SessionState.HOLDER, field)
            await self._plans([request.plan, *request.more_plans])

    async def next_response(self) -> worker_pb2.ExecuteResponse | None:
        """The next message to send; None: the stream ends well. Raises the error that ends it otherwise.

        Asked for once the message before has been written.
        """
        if self._num_writing:
            self._num_unanswered -= self._num_writing
            self._num_writing = 0
            self._answered_one.set()
        while not self._outbox:
            self._has_more.clear()
            await self._has_more.wait()
        response = self._outbox.popleft()
        if isinstance(response, Exception):
            raise response
        if _is_result(response):
            self._num_writing = 1 + self._merge_results(response)
        return response

    def _merge_results(self, into: worker_pb2.ExecuteResponse) -> int:
        """Moves the results that wait behind this one into its message; how many."""
        if not (self._may_merge and self._takes_result_batches and self._outbox):
            return 0
        num_merged, num_bytes = 0, into.ByteSize()
        while self._outbox and _is_result(response := self._outbox[0]):
            num_bytes += response.ByteSize()
            if num_bytes > _MERGED_BYTES:
                break
            self._outbox.popleft()
            into.more_results.append(response.result)
            num_merged += 1
        return num_merged

    def deliver(self, response: worker_pb2.ExecuteResponse) -> None:
        """Queues a message; a refusal is the last one. Queued are as many as plans in flight at most."""
        self._put(response)
        if response.HasField("refusal"):
            self._put(None)

    def fail(self, error: Exception) -> None:
        """Ends the stream with `error`, after what was queued."""
        self._put(error)

    def finish(self) -> None:
        """Ends the stream well, after what was queued: the peer has no more to say."""
        self._put(None)

    def close(self) -> None:
        """The stream is gone."""
        self._core.left(self)

    def _put(self, response: worker_pb2.ExecuteResponse | Exception | None) -> None:
        self._outbox.append(response)
        self._has_more.set()

    async def _complete(self, data: bytes) -> None:
        try:
            # Bytes within a message: the scan of the frame has not looked into them.
            request = parse_frame(data, worker_pb2.ExecuteRequest)
        except MeshError as error:
            raise MeshError(error.reason, f"complete: {error}", {"field": "complete"}) from error
        if not request.HasField("plan"):
            raise missing_field("complete.plan")
        await self._core.submit(None, request.plan)

    def _fence(self, fence: worker_pb2.Fence) -> None:
        if fence.epoch == 0:
            raise missing_field("fence.epoch")
        try:
            self._core.fence(self, fence.epoch, self._instance_id)
        except MeshError as error:
            self._refuse(fence.epoch, error)
            return
        self._state = SessionState.FENCING
        self.deliver(worker_pb2.ExecuteResponse(fenced=worker_pb2.Fenced(epoch=fence.epoch)))

    def _refuse(self, epoch: int, error: MeshError) -> None:
        refusal = Refusal(epoch=epoch, step_id=0, error=error)
        self.deliver(worker_pb2.ExecuteResponse(refusal=refusal_to_proto(refusal)))

    async def _claim(self, claim: worker_pb2.Claim) -> None:
        if claim.epoch == 0:
            raise missing_field("claim.epoch")
        try:
            await self._core.claim(self, claim, self._instance_id)
        except MeshError as error:
            self._refuse(claim.epoch, error)
            return
        self._state = SessionState.HOLDER
        self._takes_result_batches = claim.takes_result_batches
        self.deliver(worker_pb2.ExecuteResponse(claimed=claimed(claim.epoch, self._core.executor)))

    async def _plans(self, plans: Sequence[worker_pb2.StepPlan]) -> None:
        self._core.ledger.heard()
        most = self._core.config.max_plans_in_flight
        if len(plans) > most:
            raise MeshError(
                ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
                f"{len(plans)} plans came in one message: at most {most} may be in flight, send fewer at once",
                {"field": "more_plans", "max": str(most)},
            )
        # A plan counts until its result is written: a peer that reads none gets no more plans in.
        while self._num_unanswered + len(plans) > most:
            self._answered_one.clear()
            await self._answered_one.wait()
        self._num_unanswered += len(plans)
        await self._core.submit_all(self, [(plan, self._fault_of(plan)) for plan in plans])

    def _expect(self, state: SessionState, field: str) -> None:
        if self._state is not state:
            raise MeshError(
                ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
                f"{field} came while the stream was {self._state.name.lower()}: send hello, fence, claim, then plans",
                {"field": field},
            )


def _is_result(
    response: worker_pb2.ExecuteResponse | Exception | None,
) -> TypeGuard[worker_pb2.ExecuteResponse]:
    return isinstance(response, worker_pb2.ExecuteResponse) and response.HasField("result")


def _field_of(request: worker_pb2.ExecuteRequest) -> str:
    present = [name for name in _FIELDS if (request.complete if name == "complete" else request.HasField(name))]
    has_stray_plans = bool(request.more_plans) and present != ["plan"]
    if has_stray_plans:
        present.append("more_plans")
    if len(present) != 1 or has_stray_plans:
        raise MeshError(
            ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION,
            f"a message has {' and '.join(present) or 'no field'} set: exactly one of {', '.join(_FIELDS)} is, and"
            " more_plans beside a plan alone",
        )
    return present[0]
