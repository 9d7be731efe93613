"""Prefill and decode by worker processes: KV goes from GPU to GPU, or within one that both use, without the host."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.jobs import recitations
from support.mesh import running_mesh
from support.runner_contract import MODEL
from support.wire import metrics_of

from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.kv_transfer.device_memory import DevicePiece, TokenNumbers
from radixmesh.daemons.worker.step_handle import DONE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.mark.parametrize("page_sizes", [(1, 1), (16, 4)])
async def test_the_tiny_model_recites(page_sizes: tuple[int, int]) -> None:
    jobs = sorted(recitations(with_sampled=False), key=lambda job: len(job.answers[0].ids))[:8]
    common = {"backend": "cuda", "mem_fraction": 0.3}
    services = {
        name: {**common, "cuda_device": min(index, torch.cuda.device_count() - 1), "page_size": page_sizes[index]}
        for index, name in enumerate(("worker", "worker-prefill"))
    }
    async with running_mesh("pd", services=services, timeout_s=300.0) as mesh:
        answers = await asyncio.gather(*(job.run(mesh.client) for job in jobs))
        assert list(answers) == [job.answers for job in jobs]
        received = await metrics_of(mesh.cluster.address("worker", 1, 9100))
        assert received['radixmesh_kv_transfer_bytes_total{stage="scatter"}'] > 0
        assert any("kv_memory_mapped" in line for line in mesh.cluster.recent_lines("worker-prefill"))
        assert mesh.bugs == []


@torch.inference_mode()
def test_what_is_launched_behind_a_hold_sees_what_was_scattered() -> None:
    """Work of a step would run at once, and read what was there before: the scatter waits for another one."""
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_cuda_runner(MODEL, settings)
    device, plane = runner.kv_device, next(iter(runner.pool.planes.values()))
    assert device is not None
    sources, targets = (np.arange(first, first + 100, dtype=np.int32) for first in (0, 300))
    to_send, to_receive = TokenNumbers(sources), TokenNumbers(targets)
    with runner.device.in_order():
        plane.normal_()
        runner.device.record_event().wait()
    num_bytes = 100 * runner.pool.token_bytes
    piece = DevicePiece(device.allocate(num_bytes), num_bytes)
    device.gather(to_send, piece, None).event.wait()
    expected = runner.read_kv(sources).tobytes()
    runner.write_kv(targets, np.zeros(num_bytes, np.uint8))
    device.scatter(to_receive, piece, None, DONE).event.wait()  # Compiles it.
    runner.write_kv(targets, np.zeros(num_bytes, np.uint8))
    runner.device.run_beside(lambda: torch.cuda._sleep(400_000_000), DONE, is_urgent=False)
    copied = device.scatter(to_receive, piece, None, DONE)
    assert not copied.event.is_done
    device.hold(copied)
    assert runner.read_kv(targets).tobytes() == expected
