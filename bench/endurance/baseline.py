"""The time of a decode step on its own: one request for every slot of the worker, all of one length."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from endurance.mesh import EnduranceMesh
from radixmesh.client import AsyncClient

_POLL_S = 0.05
_PROMPT_LEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineDecode:
    """ms_per_step: median over the 50 ms in which nothing but decode steps of all rows ran; None if there were none.
    peak_running: slots in use at a time. seconds: of all."""

    rows: int
    peak_running: int
    steps: int
    ms_per_step: float | None
    seconds: float


async def baseline_decode(
    mesh: EnduranceMesh, *, rows: int, out_len: int, vocab_size: int, name: str
) -> BaselineDecode:
    """Runs `rows` requests at a time with nothing else in the mesh. name: their cache salt; a new one each time."""
    ids = np.random.default_rng(rows).integers(300, vocab_size, (rows, _PROMPT_LEN))
    points: list[tuple[float, float, float]] = []
    peak = 0

    async def poll() -> None:
        nonlocal peak
        while True:
            # In a thread, so that the streams of this process do not hold it up.
            points.append(await asyncio.to_thread(_counters, mesh))
            peak = max(peak, (await mesh.state()).load.num_running)
            await asyncio.sleep(_POLL_S)

    started = time.monotonic()
    async with AsyncClient([mesh.router]) as client, asyncio.TaskGroup() as group:
        polling = group.create_task(poll())
        answers = await asyncio.gather(
            *(
                client.complete(
                    prompt, max_tokens=out_len, ignore_eos=True, temperature=0.0, ids_only=True, cache_salt=name
                )
                for prompt in ids.tolist()
            )
        )
        polling.cancel()
    seconds = time.monotonic() - started
    assert all(len(answer.outputs[0].ids) == out_len for answer in answers)
    full = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points) if b[2] - a[2] == rows * (b[1] - a[1]) > 0]
    return BaselineDecode(
        rows=rows,
        peak_running=peak,
        steps=int(sum(steps for _, steps in full)),
        ms_per_step=round(float(np.median([1e3 * device_s / steps for device_s, steps in full])), 3) if full else None,
        seconds=round(seconds, 2),
    )


def _counters(mesh: EnduranceMesh) -> tuple[float, float, float]:
    """(device seconds, steps, rows) of the worker so far."""
    values = mesh.read_metrics("worker")
    names = ("radixmesh_step_seconds_sum", "radixmesh_step_seconds_count", "radixmesh_batch_size_sum")
    device_s, steps, rows = (values.get(name, 0.0) for name in names)
    return device_s, steps, rows
