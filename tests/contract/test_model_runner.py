"""The promises of every ModelRunner, kept by those that run on a CPU; tests/kernels and tests/gpu have the device's."""

import pytest
from support.runner_contract import MAX_TOTAL_LEN, MODEL, NUM_PAGES, PAGE_SIZE, VOCAB_SIZE, ModelRunnerContract

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet


class TestSimulatedRunner(ModelRunnerContract):
    @pytest.fixture
    def runner(self):
        return SimulatedRunner(
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            vocab_size=VOCAB_SIZE,
            max_total_len=MAX_TOTAL_LEN,
            alphabet=Alphabet.of(VOCAB_SIZE),
            latency=LatencyModel(),
            clock=VirtualClock(),
        )


class TestCpuRunner(ModelRunnerContract):
    @pytest.fixture
    def runner(self):
        return load_cpu_runner(MODEL, page_size=PAGE_SIZE, num_pages=NUM_PAGES, threads=1, max_total_len=MAX_TOTAL_LEN)


def test_kv_of_equal_runners_has_one_fingerprint_and_other_pages_another():
    def cpu(page_size):
        return load_cpu_runner(MODEL, page_size=page_size, num_pages=8, threads=1, max_total_len=MAX_TOTAL_LEN)

    one, same, other = cpu(4), cpu(4), cpu(8)
    assert one.kv_dtype == "float32" and one.kv_layout and one.kv_layout == same.kv_layout != other.kv_layout
