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


@torch.inference_mode()
def test_what_is_fetched_is_there_behind_scatters_and_a_tail_behind_its_gather() -> None:
    """On another stream the one would be read, and the other written, while the work ahead still runs."""
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_cuda_runner(MODEL, settings)
    device, num_bytes, tokens = runner.kv_device, 100 * runner.pool.token_bytes, np.arange(100, dtype=np.int32)
    assert device is not None
    region = DevicePiece(device.allocate(num_bytes + 8), num_bytes + 8)
    body, tail = region.part(0, num_bytes), region.part(num_bytes, 8)
    stamp = runner.device.host_ints(2)
    stamp.fill_(0x01020304)
    device.warm_up(region)
    device.write(tail.address, bytes(8))

    def arrives() -> None:
        torch.cuda._sleep(400_000_000)
        runner.device.copy_bytes(stamp.data_ptr(), tail.address, 8)

    # The bytes that come ahead of the scatter are those fetched behind it.
    runner.device.run_beside(arrives, DONE, is_urgent=False)
    copied = device.scatter(TokenNumbers(tokens), body, None, DONE)
    fetched = device.fetch([tail], copied, DONE)
    assert not copied.event.is_done and not fetched.event.is_done and device.read(tail.address, 8) == bytes(8)
    assert fetched.data() == [stamp.numpy().tobytes()]
    # A gather waits for its step, and the tail with it.
    device.write(tail.address, bytes(8))
    with runner.device.in_order():
        torch.cuda._sleep(400_000_000)
        computed = runner.device.record_event()
    gathered = device.gather(TokenNumbers(tokens), region, None, computed, tail=b"the tail")
    assert not gathered.event.is_done and device.read(tail.address, 8) == bytes(8)
    gathered.event.wait()
    assert device.read(tail.address, 8) == b"the tail"
    assert device.read(body.address, num_bytes) == runner.read_kv(tokens).tobytes()


@torch.inference_mode()
def test_work_that_fails_is_over_when_its_error_is_raised() -> None:
    runner = load_cuda_runner(MODEL, replace(TINY_SETTINGS, attention_backend="torch"))
    written = torch.zeros(1, device=runner.device.torch_device)

    def fails() -> None:
        torch.cuda._sleep(400_000_000)
        written.fill_(1)
        raise ValueError("the second launch")

    for is_urgent in (False, True):
        with pytest.raises(ValueError, match="the second launch"):
            runner.device.run_beside(fails, DONE, is_urgent=is_urgent)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert written.item() == 1
            written.zero_()
            torch.cuda.current_stream().synchronize()
