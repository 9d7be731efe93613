"""Networks that draft on a GPU, in captured steps: outputs are those without, and drafts about as good as the CPU's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernels.test_network_steps import NETWORKS, draft_counts, text_of
from support.device_settings import TINY_SETTINGS
from support.drafting import check_same_outputs, cpu_drafter, drive_long, speculation_of, target_folder
from support.plan_driver import PlanDriver, logprob_tolerance

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cuda.attention import triton_attention
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SETTINGS = replace(
    TINY_SETTINGS,
    attention_backend="triton",
    num_pages=4096,
    max_total_len=600,
    cuda_graphs=True,
    use_pdl=True,
    tune_gemm=False,
)
NUM_OUT = 120


def _runner(
    algorithm: str, model: str, max_drafts: int, lengths: DraftLengths | None = None, *, topk: int = 1, **changes
) -> ModelRunner:
    settings = replace(SETTINGS, speculation=speculation_of(algorithm, model, max_drafts, topk), **changes)
    return load_cuda_runner(
        target_folder(algorithm, model),
        settings,
        lambda runner: runner.verify(runner.network_drafter, max_drafts=max_drafts, lengths=lengths),
    )


def _recite(runner: ModelRunner, model: str, sampling: Sampling, *, lag: int, slot: int = 0) -> PlanDriver:
    driver = PlanDriver(runner, lag=lag)
    driver.add(slot, text_of(model)[0], sampling, chunk_len=16, num_out=NUM_OUT)
    driver.finish(NUM_OUT)
    return driver


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize(("page_size", "cuda_graphs"), [(1, True), (16, True), (4, False)])
def test_real_text_is_drafted_as_on_the_cpu(algorithm, model, page_size, cuda_graphs):
    cpu = load_cpu_runner(target_folder(algorithm, model), page_size=4, num_pages=400, threads=1, max_total_len=600)
    cpu.verify(cpu_drafter(algorithm, cpu, model), max_drafts=4)  # type: ignore[attr-defined, arg-type]
    runner = _runner(algorithm, model, 4, page_size=page_size, num_pages=4096 // page_size, cuda_graphs=cuda_graphs)
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7)):
        theirs = _recite(cpu, model, sampling, lag=0)
        ours = _recite(runner, model, sampling, lag=2)
        assert ours.tokens == theirs.tokens and len(ours.tokens[0]) == NUM_OUT
        drafted, accepted = draft_counts(ours)
        their_drafted, their_accepted = draft_counts(theirs)
        print(algorithm, sampling.temperature, (drafted, accepted), (their_drafted, their_accepted))
        assert abs(accepted / drafted - their_accepted / their_drafted) < 0.06


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize(("max_drafts", "lag"), [(1, 1), (8, 2)])
def test_networks_change_no_output(algorithm, model, max_drafts, lag):
    """All options of sampling; of more rows than one, attention is that of chunks where `LEAST_CHUNKS` says so."""
    plain = load_cuda_runner(target_folder(algorithm, model), SETTINGS)
    steps = {"chunk_len": 7, "num_steps": 40, "num_out": 40}
    want = drive_long(plain, lag=1, **steps)
    runner = _runner(algorithm, model, max_drafts)
    got = drive_long(runner, lag=lag, **steps)
    check_same_outputs(got, want, num_out=40, atol=logprob_tolerance(target_folder(algorithm, model)))
    assert np.concatenate([result.counts for result in got.results]).max() > 1


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize(
    ("page_size", "cuda_graphs", "topk", "max_drafts"), [(1, True, 4, 7), (16, True, 2, 5), (4, False, 3, 4)]
)
def test_trees_of_real_text_are_as_on_the_cpu(algorithm, model, page_size, cuda_graphs, topk, max_drafts):
    """As many drafts of one row are right, whose branches are decodes with tails."""
    cpu = load_cpu_runner(target_folder(algorithm, model), page_size=4, num_pages=400, threads=1, max_total_len=600)
    drafter = cpu_drafter(algorithm, cpu, model, max_drafts, topk)
    cpu.verify(drafter, max_drafts=max_drafts)  # type: ignore[attr-defined, arg-type]
    pages = {"page_size": page_size, "num_pages": 4096 // page_size}
    runner = _runner(algorithm, model, max_drafts, topk=topk, cuda_graphs=cuda_graphs, **pages)
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7)):
        theirs = _recite(cpu, model, sampling, lag=0)
        ours = _recite(runner, model, sampling, lag=2)
        assert ours.tokens == theirs.tokens and len(ours.tokens[0]) == NUM_OUT
        drafted, accepted = draft_counts(ours)
        their_drafted, their_accepted = draft_counts(theirs)
        print(algorithm, topk, sampling.temperature, (drafted, accepted), (their_drafted, their_accepted))
        assert abs(accepted / drafted - their_accepted / their_drafted) < 0.06


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize(
    ("topk", "max_drafts", "least_masked", "changes"),
    [(4, 7, 1, {}), (2, 4, 99, {"page_size": 16, "num_pages": 256}), (3, 5, 1, {"deterministic": True})],
)
def test_trees_change_no_output(monkeypatch, algorithm, model, topk, max_drafts, least_masked, changes):
    """All options of sampling, several rows; branches as trees with masks (but of latents), and as decodes."""
    monkeypatch.setattr(triton_attention, "LEAST_MASKED_TREES", least_masked)
    plain = load_cuda_runner(target_folder(algorithm, model), replace(SETTINGS, **changes))
    steps = {"chunk_len": 7, "num_steps": 40, "num_out": 40}
    want = drive_long(plain, lag=1, **steps)
    runner = _runner(algorithm, model, max_drafts, topk=topk, **changes)
    got = drive_long(runner, lag=2, **steps)
    check_same_outputs(got, want, num_out=40, atol=logprob_tolerance(target_folder(algorithm, model)))
    assert np.concatenate([result.counts for result in got.results]).max() > 1


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
def test_adaptive_steps_come_back_to_drafts(algorithm, model):
    """Tokens that lapsed are computed again, ahead of a captured step."""

    class Switched(DraftLengths):
        left = 60

        def choose(self, slots, *, is_alone):
            self.left -= 1
            return None if self.left > 0 else RowLengths.even(len(slots), 4)

    runner = _runner(algorithm, model, 4, Switched(SETTINGS.num_slots, 4))
    driver = _recite(runner, model, Sampling(temperature=0.0), lag=2)
    assert driver.tokens[0] == text_of(model)[1][:NUM_OUT]
    drafted, accepted = draft_counts(driver)
    assert accepted / drafted > 0.15


@pytest.mark.parametrize("topk", [1, 2])
def test_features_come_back_from_host_memory(topk):
    runner = _runner("eagle3", "tiny-llama", 4, topk=topk, page_size=16, num_pages=256)
    network = runner.network_drafter.on_device()  # type: ignore[attr-defined]
    assert network is not None and network.features_NF is not None
    runner.add_host_pool(8 << 20)
    pool = runner.host_pool
    assert pool is not None and pool.page_bytes > pool.kv_bytes
    pages, others = np.arange(0, 64, dtype=np.int32), np.arange(64, 128, dtype=np.int32)
    features, fresh = network.features_NF, network.fresh.is_fresh_N
    with runner.device.in_order(), torch.inference_mode():  # type: ignore[attr-defined]
        features[: 16 * 64] = torch.randn_like(features[: 16 * 64])
        fresh[: 16 * 128] = 1
    pool.save(pages, pages)
    pool.load(pages, others).wait()
    torch.cuda.synchronize()
    assert torch.equal(features[16 * 64 : 16 * 128], features[: 16 * 64]) and features[: 16 * 64].any()
    assert not fresh[16 * 64 : 16 * 128].any() and fresh[: 16 * 64].all()
    pool.write(pages, np.zeros((64, pool.kv_bytes), np.uint8))
    pool.load(pages, others).wait()
    torch.cuda.synchronize()
    assert not features[16 * 64 : 16 * 128].any()
