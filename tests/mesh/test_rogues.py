"""Rogue peers, which are no part of the mesh, in an open mesh. With mutual TLS they get no connection:
tests/mesh/test_secure_mesh.py tries every rpc with every certificate."""

from __future__ import annotations

import asyncio

from support.jobs import simulated_jobs
from support.mesh import running_mesh
from support.worker_client import WorkerClient

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc


async def highest_epoch(address: str) -> int:
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.GetCapabilities(worker_pb2.GetCapabilitiesRequest(), timeout=30)).highest_epoch


async def test_a_rogue_scheduler_takes_the_worker_away_and_no_answer_is_lost_or_changed() -> None:
    """It can hold the worker for as long as it stays; it cannot make the worker useless for good, nor alter a token."""
    async with running_mesh("simulated", worker={"simulated_base_us": 6000}) as mesh:
        address = mesh.cluster.address("worker")
        jobs = simulated_jobs(6)
        running = [asyncio.ensure_future(job.run(mesh.client)) for job in jobs]
        for turn in range(3):
            epoch = await highest_epoch(address)
            async with WorkerClient(address, f"rogue-{turn}") as rogue:
                await rogue.greet()
                # One that no later claim could pass is refused.
                refusal = (await rogue.claim((1 << 64) - 1)).refusal
                assert refusal.error.message
            async with WorkerClient(address, f"zzz-rogue-{turn}") as rogue:
                await rogue.hold(epoch + 1)
                assert turn or not all(task.done() for task in running), "there was something to disturb"
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*running)
        assert answers == [job.answers for job in jobs]
        assert mesh.bugs == []
