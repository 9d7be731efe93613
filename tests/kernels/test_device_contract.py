"""The promises of every ModelRunner, kept by the device's: its kernels under Triton's interpreter, on the host."""

import os
from dataclasses import replace

import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.runner_contract import MAX_TOTAL_LEN, MODEL, NUM_PAGES, PAGE_SIZE, ModelRunnerContract

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="a runner on the host samples by Triton's interpreter; tests/gpu/test_device_contract.py is for the GPU",
)


@pytest.fixture(scope="module", params=["torch", pytest.param("triton", marks=pytest.mark.full)])
def runner(request):
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    settings = replace(
        TINY_SETTINGS,
        attention_backend=request.param,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_total_len=MAX_TOTAL_LEN,
    )
    return load_device_runner(MODEL, settings, HostDevice())


class TestDeviceRunner(ModelRunnerContract):
    NUM_LOGPROBS = 2
