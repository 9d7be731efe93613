"""Running outputs move between two groups that decode, with their KV: what was computed is not computed anew."""

from __future__ import annotations

import time

import pytest
from mesh.test_pd import check_nothing_is_left, state_of
from support.jobs import simulated_jobs
from support.mesh import Mesh, running_mesh
from support.stream_load import StreamLoad

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2

BOTH = ("scheduler", "scheduler-prefill")
SIMULATED = {"backend": "simulated", "simulated_base_us": 10_000.0}


async def move_all(mesh: Mesh, number: int) -> int:
    """Moves all outputs from one scheduler to the other; the number of them."""
    async with open_channel(mesh.routers[0]) as channel:
        admin = router_pb2_grpc.RouterAdminServiceStub(channel)
        listed = await admin.ListSchedulers(router_pb2.ListSchedulersRequest(), timeout=60)
        source, target = sorted(scheduler.address for scheduler in listed.schedulers)[:: 1 if number % 2 else -1]
        request = router_pb2.MoveOutputsRequest(from_address=source, to_address=target)
        return (await admin.MoveOutputs(request, timeout=60)).num_moved


async def states(mesh: Mesh) -> list[scheduler_pb2.GetStateResponse]:
    return [await state_of(mesh, service) for service in BOTH]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_outputs_move_with_their_kv_and_are_the_same() -> None:
    """Half of them are sampled with n = 2. Either way is taken: by KV, and once that is measured by a prefill."""
    services = {
        "worker-prefill": SIMULATED,
        "scheduler-prefill": {"role": "decode", "check_invariants": "true"},
        "scheduler": {"check_invariants": "true"},
    }
    jobs = [job for job in simulated_jobs(40, num_tokens=300) if not isinstance(job.prompt, str)]
    async with running_mesh("pd", worker=SIMULATED, services=services) as mesh:
        num_moved = 0
        async with StreamLoad(mesh.client, jobs, num_streams=4) as load:
            for number in range(6):
                await load.all_progressed(time.monotonic(), 90)
                num_moved += await move_all(mesh, number)
        assert load.failures == [] and load.num_completed and num_moved > 4
        await check_nothing_is_left(mesh)
        found = await states(mesh)
        arrived, handed_over = (
            sum(getattr(s, name) for s in found) for name in ("num_kv_arrived", "num_kv_handed_over")
        )
        assert arrived and handed_over >= arrived
        assert not any(state.num_page_violations for state in found)
        lines = [line for line in mesh.cluster.recent_lines("router") if "outputs_moved" in line]
        assert any('"by":"kv"' in line.replace(" ", "") for line in lines), lines
        assert mesh.bugs == []
