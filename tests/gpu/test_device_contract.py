"""The promises of every ModelRunner, kept by the device's on a GPU, with each attention and with and without graphs."""

from dataclasses import replace

import pytest
from support.device_settings import TINY_SETTINGS
from support.runner_contract import MAX_TOTAL_LEN, MODEL, NUM_PAGES, PAGE_SIZE, ModelRunnerContract

from radixmesh.daemons.worker.cuda.load import load_cuda_runner

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["triton-graphs", "triton", "torch", "flashinfer-graphs"])
def runner(request):
    attention, _, graphs = request.param.partition("-")
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    settings = replace(
        TINY_SETTINGS,
        attention_backend=attention,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_total_len=MAX_TOTAL_LEN,
        cuda_graphs=bool(graphs),
        use_pdl=attention != "torch",
    )
    return load_cuda_runner(MODEL, settings)


class TestDeviceRunner(ModelRunnerContract):
    """Over the fixture above."""
