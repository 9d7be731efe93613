"""Prefill and decode by worker processes: KV goes from GPU to GPU, or within one that both use, without the host."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.jobs import recitations
from support.mesh import running_mesh
from support.wire import metrics_of

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
