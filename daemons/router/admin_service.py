"""The router's gRPC service for operators."""

from __future__ import annotations

import grpc

from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.queue.waiting_outputs import WaitingOutputs
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.addresses import parse_address
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.request_ids import check_request_id
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2


class RouterAdminService(router_pb2_grpc.RouterAdminServiceServicer):
    """Changes what the router routes to."""

    def __init__(self, router: Router) -> None:
        self._schedulers = router.schedulers
        self._members = router.members
        self._discovery = router.discovery

    async def AddScheduler(
        self,
        request: router_pb2.AddSchedulerRequest,
        context: grpc.aio.ServicerContext[router_pb2.AddSchedulerRequest, router_pb2.AddSchedulerResponse],
    ) -> router_pb2.AddSchedulerResponse:
        if not request.address:
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "say which address", {"field": "address"})
        parse_address(request.address)
        self._members.add(request.address)
        return router_pb2.AddSchedulerResponse()

    async def RemoveScheduler(
        self,
        request: router_pb2.RemoveSchedulerRequest,
        context: grpc.aio.ServicerContext[router_pb2.RemoveSchedulerRequest, router_pb2.RemoveSchedulerResponse],
    ) -> router_pb2.RemoveSchedulerResponse:
        link = self._schedulers.link(request.address)
        if request.finish_outputs and link.is_connected:
            self._members.retire(request.address, moves_outputs=False)
            return router_pb2.RemoveSchedulerResponse(num_running=link.num_running)
        await self._schedulers.remove(request.address)
        return router_pb2.RemoveSchedulerResponse()

    async def DrainScheduler(
        self,
        request: router_pb2.DrainSchedulerRequest,
        context: grpc.aio.ServicerContext[router_pb2.DrainSchedulerRequest, router_pb2.DrainSchedulerResponse],
    ) -> router_pb2.DrainSchedulerResponse:
        num_moved = self._schedulers.drain(request.address, moves_outputs=request.move_outputs)
        num_running = self._schedulers.link(request.address).num_running
        return router_pb2.DrainSchedulerResponse(num_running=num_running, num_moved=num_moved)

    async def MoveOutputs(
        self,
        request: router_pb2.MoveOutputsRequest,
        context: grpc.aio.ServicerContext[router_pb2.MoveOutputsRequest, router_pb2.MoveOutputsResponse],
    ) -> router_pb2.MoveOutputsResponse:
        if request.request_id:
            check_request_id(request.request_id)
        num_moved = self._schedulers.move(
            request_id=request.request_id,
            source=request.from_address,
            target=request.to_address,
            most=request.max_outputs,
        )
        return router_pb2.MoveOutputsResponse(num_moved=num_moved)

    async def ListSchedulers(
        self,
        request: router_pb2.ListSchedulersRequest,
        context: grpc.aio.ServicerContext[router_pb2.ListSchedulersRequest, router_pb2.ListSchedulersResponse],
    ) -> router_pb2.ListSchedulersResponse:
        return router_pb2.ListSchedulersResponse(
            schedulers=[self._info_of(link) for link in self._schedulers.links],
            queue=_queue_info(self._schedulers.waiting),
            sources=[
                router_pb2.DiscoverySourceInfo(
                    source=name,
                    num_addresses=state.num_named,
                    error=state.error,
                    num_ignored=state.num_ignored,
                )
                for name, state in self._discovery.states.items()
            ],
        )

    def _info_of(self, link: SchedulerLink) -> router_pb2.SchedulerInfo:
        group = _GROUPS.get(link.load.group, f"unknown ({link.load.group})")
        state, routed = self._schedulers.placement.state_of(link), self._schedulers.placement.routed(link)
        return router_pb2.SchedulerInfo(
            address=link.address,
            is_connected=link.is_connected,
            is_draining=link.is_draining or link.load.is_draining,
            instance_id=link.instance_id,
            models=link.models,
            num_running=link.num_running,
            group=group if link.is_connected and link.load.group else "",
            epoch=link.load.epoch,
            trust=link.health.state,
            num_outputs=max(0, state.num_outputs),
            queued_tokens=max(0, state.queued_tokens),
            num_routed=routed.num_decisions,
            routed_tokens=routed.num_tokens,
            routed_cached_tokens=routed.cached_tokens,
            max_outputs=self._schedulers.placement.max_outputs(link),
        )


def _queue_info(waiting: WaitingOutputs) -> router_pb2.QueueInfo:
    return router_pb2.QueueInfo(
        num_outputs=len(waiting),
        max_outputs=waiting.bounds.max_outputs,
        num_bytes=waiting.num_bytes,
        num_tenants=waiting.num_tenants,
        longest_wait_ms=int(1000 * waiting.longest_wait_s()),
        num_refused=waiting.num_refused,
        retry_after_ms=waiting.retry_after_ms(),
    )


_GROUPS = {number: name.removeprefix("GROUP_STATE_").lower() for name, number in scheduler_pb2.GroupState.items()}
