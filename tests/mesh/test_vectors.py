"""Embed tasks over the wire: a scheduler and a CPU worker of the tiny model, beside requests that generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from support.llama_folders import TINY_LLAMA
from support.rounding import model_tolerance
from support.running_daemon import running
from support.serve_client import ServeClient
from transformers import AutoConfig, LlamaForCausalLM

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import unpack_floats
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.scheduler.v1 import scheduler_pb2


class _VectorClient(ServeClient):
    """Keeps vectors by handle."""

    def _take(self, frame: scheduler_pb2.ServeResponse) -> None:
        for vector in frame.vectors:
            assert vector.handle not in self.vectors, "one vector a request"
            self.vectors[vector.handle] = unpack_floats(vector.values, "values")
        super()._take(frame)

    async def start(self) -> None:
        self.vectors: dict[int, np.ndarray] = {}
        await super().start()


def _expected(prompts: list[list[int]]) -> list[np.ndarray]:
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model.model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() for ids in prompts]


async def test_vectors_are_those_of_transformers_whatever_else_runs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    whole = generator.integers(3, 700, 150).tolist()
    prompts = [whole[:1], whole[:64], whole, generator.integers(3, 700, 40).tolist(), whole]
    worker_settings = WorkerSettings(
        backend=Backend.CPU,
        model=TINY_LLAMA,
        num_pages=2048,
        num_slots=16,
        max_total_len=512,
        cpu_threads=1,
        dump_folder=tmp_path,
    )
    async with running(WorkerDaemon, worker_settings) as worker:
        settings = SchedulerSettings(workers=(worker.address,), check_invariants=True, chunk_tokens=32)
        async with running(SchedulerDaemon, settings) as scheduler, open_channel(scheduler.address) as channel:
            client = _VectorClient(channel, "a")
            await client.start()
            # Cached first, so that a prefix could be taken from there.
            (first,) = await client.over(await client.submit(whole, max_tokens=20))
            handles = []
            for ids in prompts:
                handles.append(await client.submit(ids, task=common_pb2.TASK_EMBED))
                handles.append(await client.submit(whole, max_tokens=20))
            ended = await client.over(*handles)
            client.close()
    for handle, expected in zip(handles[::2], _expected(prompts), strict=True):
        tolerance = model_tolerance(AutoConfig.from_pretrained(TINY_LLAMA), len(whole), np.abs(expected).max())
        assert np.abs(client.vectors[handle] - expected).max() <= tolerance
    assert client.vectors.keys() == set(handles[::2])
    assert np.array_equal(client.vectors[handles[4]], client.vectors[handles[8]]), "the same bits in any company"
    assert all(seen.finished is not None and not seen.tokens for seen in ended[::2])
    assert all(seen.tokens == first.tokens for seen in ended[1::2])


async def test_a_score_is_refused_by_a_model_without_a_score_head(tmp_path: Path) -> None:
    worker_settings = WorkerSettings(
        backend=Backend.CPU, model=TINY_LLAMA, num_pages=256, max_total_len=128, cpu_threads=1, dump_folder=tmp_path
    )
    async with running(WorkerDaemon, worker_settings) as worker:
        settings = SchedulerSettings(workers=(worker.address,))
        async with running(SchedulerDaemon, settings) as scheduler, open_channel(scheduler.address) as channel:
            client = _VectorClient(channel, "a")
            await client.start()
            (seen,) = await client.over(await client.submit([5, 6, 7], task=common_pb2.TASK_SCORE))
            client.close()
    assert seen.rejected is not None
    assert seen.rejected.error.reason == common_pb2.ERROR_REASON_UNSUPPORTED
