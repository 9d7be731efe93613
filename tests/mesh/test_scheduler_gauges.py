"""The scheduler's metrics while it is busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from support.mesh import running_mesh
from support.wire import metrics_of

METRICS_PORT = 9100


async def test_the_schedulers_gauges_move_while_its_load_changes_all_the_time() -> None:
    async with running_mesh("simulated") as mesh:

        async def requests() -> None:
            for number in itertools.count():
                await mesh.client.complete(f"number {number}", max_tokens=2)

        churn = [asyncio.create_task(requests()) for _ in range(4)]
        try:
            address = mesh.cluster.address("scheduler", 1, METRICS_PORT)
            await asyncio.sleep(1.5)
            before = await metrics_of(address)
            await asyncio.sleep(1.5)
            after = await metrics_of(address)
        finally:
            for task in churn:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*churn)
        assert before["radixmesh_output_tokens_total"] > 0
        assert after["radixmesh_output_tokens_total"] > before["radixmesh_output_tokens_total"] + 10
