"""The GPU's runner on the host, its operations replaced by their references: the same tokens as the CPU worker's."""

from pathlib import Path

import pytest
from support.plan_driver import PLAIN_OPTIONS, check_same, drive

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.runner import ModelRunner

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PAGES = 512


def _device_runner(page_size: int) -> ModelRunner:
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_device_runner

    settings = DeviceSettings(
        dtype="float32",
        attention_backend="torch",
        load_format="auto",
        page_size=page_size,
        num_pages=PAGES,
        num_slots=8,
        max_tokens_per_step=64,
        max_total_len=128,
        mem_fraction=0.5,
        cuda_graphs=False,
        use_pdl=False,
        deterministic=False,
    )
    return load_device_runner(MODEL, settings, HostDevice())


def _cpu_runner(page_size: int) -> ModelRunner:
    return load_cpu_runner(
        MODEL,
        page_size=page_size,
        num_pages=PAGES,
        threads=1,
        is_deterministic=True,
        attention_backend="paged_torch",
        dtype="float32",
        max_total_len=128,
        embed_pooling="mean",
    )


@pytest.mark.parametrize(("page_size", "chunk_len", "lag"), [(1, 7, 2), (4, 64, 1)])
def test_tokens_and_logprobs_are_those_of_the_cpu_worker(page_size, chunk_len, lag):
    want = drive(_cpu_runner(page_size), chunk_len=chunk_len, lag=0, options=PLAIN_OPTIONS)
    check_same(drive(_device_runner(page_size), chunk_len=chunk_len, lag=lag, options=PLAIN_OPTIONS), want)
