"""A worker that is killed again and again during one prefill: a request that waits for it is no suspect."""

import asyncio

import grpc
import pytest
from support.mesh import Mesh, running_mesh

from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.scheduler.v1 import scheduler_pb2

pytestmark = pytest.mark.timeout(240)
NUM_KILLS = 6  # One more than a request of which workers die gets, see suspects.py.


async def test_six_kills_of_a_worker_during_one_prefill_fail_no_request() -> None:
    # Chunks of 32 tokens at 60 ms each: the prefill takes 3 s, and starts over with each worker.
    worker = {"simulated_base_us": 60_000.0, "max_tokens_per_step": 32}
    async with running_mesh("simulated", worker=worker) as mesh:
        prompt = [3 + i % 200 for i in range(1_600)]
        answer = asyncio.ensure_future(mesh.client.complete(prompt, temperature=0.0, max_tokens=4))
        for number in range(1, NUM_KILLS + 1):
            await _until_running(mesh)
            assert not answer.done(), answer
            mesh.cluster.kill("worker")
            async with asyncio.timeout(60):
                await mesh.cluster.wait_until("worker", lambda status, n=number: _is_back(status, n))
        async with asyncio.timeout(120):
            completion = await answer
        undisturbed = await mesh.client.complete(prompt, temperature=0.0, max_tokens=4)
        assert completion.outputs[0].ids == undisturbed.outputs[0].ids and len(completion.outputs[0].ids) == 4


def _is_back(status: ProcessStatus, restarts: int) -> bool:
    return status.restarts == restarts and status.state is ProcessState.HEALTHY


async def _until_running(mesh: Mesh) -> None:
    """Until the request is in a slot of the worker that is there now."""
    async with asyncio.timeout(60):
        while True:
            try:
                state = await mesh.scheduler_state()
            except grpc.RpcError:
                continue
            if state.load.num_running and state.load.group == scheduler_pb2.GROUP_STATE_SERVING:
                return
            await asyncio.sleep(0.02)
