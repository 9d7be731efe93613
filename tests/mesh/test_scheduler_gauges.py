"""The scheduler's metrics while it is busy."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from support.mesh import running_mesh
from support.wire import metrics_of

METRICS_PORT = 9100
# Files that a step changes: no two steps in a row leave them as they were.
GAUGES = ("radixmesh_tokens_per_second", "radixmesh_cache_hit_ratio", 'radixmesh_pages{state="cached"}')


async def test_the_schedulers_gauges_move_while_its_load_changes_all_the_time() -> None:
    """They are brought up to date twice a second, not only when a moment is quiet."""
    async with running_mesh("simulated") as mesh:

        async def requests() -> None:
            for number in itertools.count():
                await mesh.client.complete(f"number {number}", max_tokens=2)

        churn = [asyncio.create_task(requests()) for _ in range(4)]
        seen: dict[str, set[float]] = {name: set() for name in (*GAUGES, "radixmesh_requests_running")}
        try:
            address = mesh.cluster.address("scheduler", 1, METRICS_PORT)
            async with asyncio.timeout(60):
                while any(len(seen[name]) < 4 for name in GAUGES) or not any(seen["radixmesh_requests_running"]):
                    assert not any(task.done() for task in churn)
                    metrics = await metrics_of(address)
                    # Those with labels are there once they were brought up to date for the first time.
                    for name in seen.keys() & metrics.keys():
                        seen[name].add(metrics[name])
                    await asyncio.sleep(0.1)
        finally:
            for task in churn:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*churn)
        assert max(seen["radixmesh_requests_running"]) <= len(churn)
