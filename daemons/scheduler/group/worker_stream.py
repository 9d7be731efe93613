"""One Execute stream of one epoch to one rank: hello, fence, claim, snapshot, plans down, results up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import FENCE_VERSION, check_hello
from radixmesh.daemons.runtime.rpc.wire_bounds import parse_frame
from radixmesh.daemons.runtime.steps.result_codec import (
    pinned_from_proto,
    records_from_proto,
    refusal_from_proto,
    result_from_proto,
)
from radixmesh.daemons.runtime.steps.step import PageRecords, StepResult
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot
from radixmesh.daemons.scheduler.group.rank_transport import RankTransport
from radixmesh.daemons.scheduler.messages import snapshot_of
from radixmesh.worker.v1 import worker_pb2


class RefusedPlan(Exception):
    """The worker refused a plan; nothing of it has run."""

    def __init__(self, step_id: int, error: MeshError) -> None:
        super().__init__(str(error))
        self.step_id = step_id
        self.error = error


class WorkerStream:
    """Every method raises MeshError when the stream is lost or the peer breaks the protocol."""

    def __init__(self, transport: RankTransport, ours: common_pb2.Hello) -> None:
        self._transport = transport
        self._ours = ours
        self.epoch = 0
        self.contract_version = 0
        self._takes_alive = False
        self.takes_plan_batches = False
        """The worker takes several plans in one message."""
        self.transfer_kv = worker_pb2.KvFormat()
        self.sends_behind_steps = False
        """Of the KV that the worker sends and takes; empty: it does neither."""
        self.placement: worker_pb2.ExpertPlacement | None = None
        """Of experts that ranks share, once claimed."""

    @property
    def transport(self) -> RankTransport:
        """For calls beside the stream."""
        return self._transport

    @property
    def instance_id(self) -> str:
        """Ours, as the worker knows the holder of the epoch."""
        return self._ours.instance_id

    async def hello(self) -> worker_pb2.WorkerHello:
        """Opens the stream; returns what the worker says of itself. Raises a mismatch."""
        self._transport.open()
        await self._write(worker_pb2.ExecuteRequest(hello=self._ours).SerializeToString())
        answer = await self._read()
        if not answer.HasField("hello"):
            raise _violation("the worker's first message is no hello")
        self.contract_version = check_hello(answer.hello.hello, self._ours)
        self._takes_alive = answer.hello.capabilities.takes_alive
        self.takes_plan_batches = answer.hello.capabilities.takes_plan_batches
        self.transfer_kv.CopyFrom(answer.hello.capabilities.transfer_kv)
        self.sends_behind_steps = answer.hello.capabilities.sends_behind_steps
        return answer.hello

    async def complete(self, plan: bytes) -> None:
        """Sends a plan of the epoch before that this rank has not received: the bytes that another rank kept."""
        await self._write(worker_pb2.ExecuteRequest(complete=plan).SerializeToString())

    async def fence(self, epoch: int) -> None:
        """Shuts every other scheduler out. Raises the refusal: EPOCH_FENCED, NOT_SERVING.

        Workers of contract version 2 know no fence: their claim does it.
        """
        if self.contract_version >= FENCE_VERSION:
            await self._write(worker_pb2.ExecuteRequest(fence=worker_pb2.Fence(epoch=epoch)).SerializeToString())
            answer = await self._read()
            if answer.HasField("refusal"):
                raise refusal_from_proto(answer.refusal).error
            if not answer.HasField("fenced") or answer.fenced.epoch != epoch:
                raise _violation("the worker answered the fence with something else")
        self.epoch = epoch

    async def alive(self) -> None:
        """Says to the fenced worker that its holder lives."""
        if self.epoch and self._takes_alive:
            await self._write(worker_pb2.ExecuteRequest(alive=worker_pb2.Alive(epoch=self.epoch)).SerializeToString())

    async def put_blob(self, blob_hash: str, data: bytes) -> None:
        """Gives the rank a blob that admits may name. Raises what the rank says of it."""
        await self._transport.put_blob(blob_hash, data)

    async def form_group(
        self,
        generation: int,
        layout: worker_pb2.RankLayout,
        rendezvous: str,
        members: Sequence[str],
        experts: worker_pb2.ExpertPlacement | None = None,
    ) -> None:
        """Makes the fenced worker a rank of a new group; returns when it has met the others, and has the experts that
        the placement gives it."""
        request = worker_pb2.FormGroupRequest(
            epoch=self.epoch,
            instance_id=self._ours.instance_id,
            generation=generation,
            layout=layout,
            rendezvous=rendezvous,
            member_instance_ids=members,
            experts=experts,
        )
        await self._transport.form_group(request)

    async def leave_group(self) -> None:
        """Takes the fenced worker out of its group: steps that wait in collectives are discarded."""
        request = worker_pb2.LeaveGroupRequest(epoch=self.epoch, instance_id=self._ours.instance_id)
        await self._transport.leave_group(request)

    async def claim(self, epoch: int, group_generation: int) -> None:
        """Asks for the worker. Raises the refusal: EPOCH_FENCED, NOT_SERVING, GROUP_GENERATION."""
        claim = worker_pb2.Claim(epoch=epoch, group_generation=group_generation, takes_result_batches=True)
        await self._write(worker_pb2.ExecuteRequest(claim=claim).SerializeToString())
        answer = await self._read()
        if answer.HasField("refusal"):
            raise refusal_from_proto(answer.refusal).error
        if not answer.HasField("claimed") or answer.claimed.epoch != epoch:
            raise _violation("the worker answered the claim with something else")
        self.epoch = epoch
        self.placement = answer.claimed.experts if answer.claimed.HasField("experts") else None

    async def snapshot(self, num_pages: int, num_host_pages: int = 0) -> CacheSnapshot:
        """The page records of the claimed worker, of device and host."""
        request = worker_pb2.SnapshotCacheRequest(epoch=self.epoch, instance_id=self._ours.instance_id)
        parts: list[PageRecords] = []
        host_parts: list[PageRecords] = []
        names: list[str] = []
        host_names: list[str] = []
        pinned: tuple[tuple[int, ...], Mapping[str, tuple[int, ...]]] = ((), {})
        async for message in self._transport.snapshot(request):
            is_host = message.tier == worker_pb2.KV_TIER_HOST
            (host_parts if is_host else parts).append(records_from_proto(message))
            (host_names if is_host else names).extend(message.namespaces)
            if message.is_last:
                pinned = pinned_from_proto(message)
        snapshot = snapshot_of(parts, tuple(names), pinned, num_pages)
        if not num_host_pages:
            return snapshot
        return replace(snapshot, host=snapshot_of(host_parts, tuple(host_names), ((), {}), num_host_pages))

    async def send(self, plan: bytes) -> None:
        """Sends an encoded plan, or several as one message."""
        await self._write(plan)

    async def results(self) -> AsyncIterator[StepResult]:
        """Results in step order. Raises RefusedPlan, or MeshError when the stream ends."""
        while True:
            answer = await self._read()
            if answer.HasField("refusal"):
                refusal = refusal_from_proto(answer.refusal)
                raise RefusedPlan(refusal.step_id, refusal.error)
            if not answer.HasField("result"):
                raise _violation("the worker sent something other than a result")
            yield result_from_proto(answer.result)
            for result in answer.more_results:
                yield result_from_proto(result)

    def close(self) -> None:
        """Drops the stream: the worker finishes what it has received."""
        self._transport.cancel()

    async def _write(self, data: bytes) -> None:
        await self._transport.write(data)

    async def _read(self) -> worker_pb2.ExecuteResponse:
        return parse_frame(await self._transport.read(), worker_pb2.ExecuteResponse)


def _violation(what: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, f"{what}: check the versions of both ends")
