"""Networks that draft in the steps of the GPU's runner, on the host: the same tokens, and the CPU worker's drafts."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.drafting import MODELS, check_same_outputs, cpu_drafter, drive_long, speculation_of, target_folder
from support.plan_driver import PlanDriver
from support.replaying_device import ReplayingDevice
from support.triton_interpreter import DEVICE

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.cuda.load import DeviceSettings, load_device_runner
from radixmesh.daemons.worker.kv_pool import kv_slots
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, Drafter, DraftRow

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="the runner on the host samples under Triton's interpreter; tests/gpu has those of the GPU",
)

NETWORKS = [("standalone", "tiny-llama"), ("eagle3", "tiny-llama"), ("mtp", "tiny-deepseek")]
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=5)
SIZES = {"num_pages": 600, "max_total_len": 400}


def _settings(algorithm: str, model: str, page_size: int, max_drafts: int, topk: int = 1) -> DeviceSettings:
    speculation = speculation_of(algorithm, model, max_drafts, topk)
    return replace(TINY_SETTINGS, page_size=page_size, speculation=speculation, **SIZES)


def _device_runner(algorithm: str, model: str, page_size: int, max_drafts: int, topk: int = 1) -> ModelRunner:
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    settings = _settings(algorithm, model, page_size, max_drafts, topk)
    return load_device_runner(target_folder(algorithm, model), settings, HostDevice())


def _cpu_runner(algorithm: str, model: str, page_size: int) -> CpuRunner:
    runner = load_cpu_runner(target_folder(algorithm, model), page_size=page_size, threads=1, **SIZES)
    assert isinstance(runner, CpuRunner)
    return runner


def text_of(model: str) -> tuple[list[int], list[int]]:
    """Prompt of a text that the model has learned, and its continuation."""
    items = json.loads((MODELS / model / "recitations.json").read_text())
    item = next(item for item in items if len(item["expected_ids"]) > 250)
    return item["prompt_ids"], item["expected_ids"]


def draft_counts(driver: PlanDriver) -> tuple[int, int]:
    """Drafts that its steps computed, and accepted."""
    return tuple(sum(int(getattr(result, kind).sum()) for result in driver.results) for kind in ("drafted", "accepted"))  # type: ignore[return-value]


def _drive(runner: ModelRunner, model: str, num_out: int, *, lag: int) -> PlanDriver:
    """One greedy request and one that is sampled, of the same prompt."""
    prompt, _ = text_of(model)
    driver = PlanDriver(runner, lag=lag)
    for slot, sampling in enumerate((GREEDY, SAMPLED)):
        driver.add(slot, prompt, sampling, chunk_len=16, num_out=num_out)
    driver.finish(num_out)
    return driver


Drafts = dict[tuple[int, int], list[int]]
"""By slot and position of the first one."""


def _note_cpu(drafter: Drafter) -> Drafts:
    noted: Drafts = {}
    propose = drafter.propose

    def noting(rows: Sequence[DraftRow]) -> Sequence[IntArray]:
        proposals = propose(rows)
        for row, ids in zip(rows, proposals, strict=True):
            noted[row.slot, row.sample.position] = ids.tolist()
        return proposals

    drafter.propose = noting  # type: ignore[method-assign]
    return noted


Trees = dict[tuple[int, int], list[tuple[int, ...]]]
"""Drafts as their paths, sorted."""


def _paths(ids: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """parents: of each draft."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*paths[parent], token))
    return sorted(paths[1:])


def _note_cpu_trees(drafter: Drafter) -> Trees:
    noted: Trees = {}
    propose = drafter.propose_trees

    def noting(rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        trees = propose(rows)
        for row, tree in zip(rows, trees, strict=True):
            noted[row.slot, row.sample.position] = _paths(tree.ids.tolist(), tree.parents[1:].tolist())
        return trees

    drafter.propose_trees = noting  # type: ignore[method-assign]
    return noted


def _note_device_trees(drafter: Drafter) -> Trees:
    network = drafter.on_device()
    assert network is not None
    noted: Trees = {}
    propose = network.propose

    def noting(inputs, state):
        propose(inputs, state)
        for row, (slot, start, count) in enumerate(zip(inputs.slots, inputs.starts, inputs.counts, strict=True)):
            if count:
                of_row = (part[: int(count), row].tolist() for part in (inputs.window_WB, inputs.parents_WB))
                noted[int(slot), int(start)] = _paths(*of_row)

    network.propose = noting  # type: ignore[method-assign]
    return noted


def _note_device(drafter: Drafter) -> Drafts:
    network = drafter.on_device()
    assert network is not None
    noted: Drafts = {}
    propose = network.propose

    def noting(inputs, state):
        propose(inputs, state)
        for row, (slot, start, count) in enumerate(zip(inputs.slots, inputs.starts, inputs.counts, strict=True)):
            if count:
                noted[int(slot), int(start)] = inputs.window_WB[: int(count), row].tolist()

    network.propose = noting  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize(("page_size", "max_drafts", "lag"), [(4, 2, 2), pytest.param(1, 3, 0, marks=pytest.mark.full)])
def test_drafts_are_those_of_the_cpu_worker(algorithm, model, page_size, max_drafts, lag):
    """Id for id, at every position at which both drafted, greedy and by the target's noise."""
    num_out = 18
    want = _cpu_runner(algorithm, model, page_size)
    drafter = cpu_drafter(algorithm, want, model, max_drafts)
    their_drafts = _note_cpu(drafter)
    want.verify(drafter, max_drafts=max_drafts)
    theirs = _drive(want, model, num_out, lag=0)
    runner = _device_runner(algorithm, model, page_size, max_drafts)
    drafter = runner.network_drafter  # type: ignore[attr-defined]
    our_drafts = _note_device(drafter)
    runner.verify(drafter, max_drafts=max_drafts)  # type: ignore[attr-defined]
    ours = _drive(runner, model, num_out, lag=lag)
    assert ours.tokens == theirs.tokens and len(ours.tokens[0]) == num_out
    assert draft_counts(ours)[1] > 0
    common = our_drafts.keys() & their_drafts.keys()
    assert len(common) > 10
    for key in common:
        size = min(len(our_drafts[key]), len(their_drafts[key]))
        assert our_drafts[key][:size] == their_drafts[key][:size], key


@pytest.mark.parametrize(
    ("algorithm", "model", "page_size", "max_drafts", "topk", "lag"),
    [
        ("eagle3", "tiny-llama", 16, 4, 2, 2),
        pytest.param("mtp", "tiny-deepseek", 1, 4, 2, 1, marks=pytest.mark.slow),
        *(
            pytest.param(*network, *sizes, marks=pytest.mark.full)
            for network in NETWORKS
            for sizes in ((1, 4, 2, 0), (4, 3, 3, 1), (16, 9, 4, 2))
        ),
    ],
)
def test_trees_are_those_of_the_cpu_worker(algorithm, model, page_size, max_drafts, topk, lag):
    """Path for path, at every position at which both drafted, and with no room for all drafts at the end."""
    num_out = 12
    want = _cpu_runner(algorithm, model, page_size)
    drafter = cpu_drafter(algorithm, want, model, max_drafts, topk)
    their_trees = _note_cpu_trees(drafter)
    want.verify(drafter, max_drafts=max_drafts)
    theirs = _drive(want, model, num_out, lag=0)
    runner = _device_runner(algorithm, model, page_size, max_drafts, topk)
    drafter = runner.network_drafter  # type: ignore[attr-defined]
    our_trees = _note_device_trees(drafter)
    runner.verify(drafter, max_drafts=max_drafts)  # type: ignore[attr-defined]
    ours = _drive(runner, model, num_out, lag=lag)
    assert ours.tokens == theirs.tokens and len(ours.tokens[0]) == num_out
    assert draft_counts(ours)[1] > 0
    common = [key for key in our_trees.keys() & their_trees.keys() if len(our_trees[key]) == len(their_trees[key])]
    assert len(common) > 3 and any(len({path[0] for path in our_trees[key]}) > 1 for key in common)
    for key in common:
        assert our_trees[key] == their_trees[key], key
    _check_kv(runner, ours, want, theirs)


def _check_kv(runner: ModelRunner, ours: PlanDriver, want: ModelRunner, theirs: PlanDriver) -> None:
    """KV of a row's output lies at its positions, whatever branch it was computed in. The last token has none yet."""
    prompt_len = len(text_of("tiny-llama")[0])
    for slot, tokens in ours.tokens.items():
        length = prompt_len + len(tokens) - 1
        got, expected = (
            of.read_kv(kv_slots(driver.pages[slot], length, of.page_size).astype(np.int32)).view(np.float32)
            for of, driver in ((runner, ours), (want, theirs))
        )
        np.testing.assert_allclose(got, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("is_masked", "is_deterministic"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_branches_are_attended_to_by_the_kernels_of_a_gpu(monkeypatch, is_masked, is_deterministic):
    """As trees with masks, or as decodes with tails."""
    from radixmesh.daemons.worker.cuda.attention import triton_attention
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    num_trees, num_out = list[int](), 5
    monkeypatch.setattr(triton_attention, "LEAST_MASKED_TREES", 1 if is_masked else 99)
    plan_trees = triton_attention.plan_trees

    def noting(prefix_lens_B, workspace):
        num_trees.append(len(prefix_lens_B))
        plan_trees(prefix_lens_B, workspace)

    monkeypatch.setattr(triton_attention, "plan_trees", noting)
    settings = replace(
        _settings("standalone", "tiny-llama", 4, 5, topk=3), attention_backend="triton", deterministic=is_deterministic
    )
    runner = load_device_runner(target_folder("standalone", "tiny-llama"), settings, HostDevice())
    runner.verify(runner.network_drafter, max_drafts=5)  # type: ignore[attr-defined]
    driver = _drive(runner, "tiny-llama", num_out, lag=1)
    want = _cpu_runner("standalone", "tiny-llama", 4)
    assert driver.tokens == _drive(want, "tiny-llama", num_out, lag=0).tokens
    assert draft_counts(driver)[1] > 0 and bool(num_trees) == is_masked


@pytest.mark.full
@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
def test_trees_change_no_output(algorithm, model):
    """All options of sampling, whose penalties count what is on a draft's path, and logprobs of what was accepted."""
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.load import load_device_runner

    steps = {"chunk_len": 16, "num_steps": 8, "num_out": 8}
    plain = load_device_runner(
        target_folder(algorithm, model), replace(TINY_SETTINGS, page_size=4, **SIZES), HostDevice()
    )
    want = drive_long(plain, lag=1, **steps)
    runner = _device_runner(algorithm, model, 4, 5, topk=3)
    runner.verify(runner.network_drafter, max_drafts=5)  # type: ignore[attr-defined]
    got = drive_long(runner, lag=2, **steps)
    check_same_outputs(got, want, num_out=8, atol=1e-3)
    assert draft_counts(got)[1] > 0


_MORE_NETWORKS = [pytest.param(*network, marks=pytest.mark.full) for network in NETWORKS if network[0] != "eagle3"]


@pytest.mark.parametrize("topk", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("algorithm", "model"), [("eagle3", "tiny-llama"), *_MORE_NETWORKS])
@pytest.mark.parametrize("is_captured", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tokens_that_lapsed_are_computed_ahead_of_the_step_that_drafts_again(algorithm, model, topk, is_captured):
    """Without that, a row gets back a few tokens a step, and drafts in none of them."""

    class Switched(DraftLengths):
        left = 24

        def choose(self, slots, *, is_alone):
            self.left -= 1
            return None if self.left > 0 else RowLengths.even(len(slots), 2)

    device = ReplayingDevice()
    settings = replace(_settings(algorithm, model, 4, 2, topk), cuda_graphs=is_captured)
    runner = load_device_runner(target_folder(algorithm, model), settings, device)
    drafter = runner.network_drafter
    drafts = _note_device(drafter)
    runner.verify(drafter, max_drafts=2, lengths=Switched(TINY_SETTINGS.num_slots, 2), graph_rows=(1,) * is_captured)
    device.replayed.clear()
    prompt, text = text_of(model)
    driver = PlanDriver(runner, lag=0)
    driver.add(0, prompt, GREEDY, chunk_len=16, num_out=40)
    driver.finish(40)
    assert driver.tokens[0] == text[:40]
    first = min(position for _, position in drafts)
    assert len(prompt) + 20 <= first <= len(prompt) + 28, "the first step that was to draft did"
    catch_ups = [shape for shape in device.replayed if shape[0] == MOST_BEHIND]
    assert len(catch_ups) == is_captured, "one graph, and no kernels from Python"


def test_a_network_knows_of_kv_that_it_has_not_computed():
    """Pages that are copied, come from another worker, or are cleared."""
    runner = _device_runner("eagle3", "tiny-llama", 4, 2)
    drafter = runner.network_drafter  # type: ignore[attr-defined]
    runner.verify(drafter, max_drafts=2)  # type: ignore[attr-defined]
    driver = PlanDriver(runner, lag=0)
    driver.add(0, list(range(100, 116)), GREEDY, chunk_len=16, num_out=2)
    driver.run()
    network = drafter.on_device()
    is_fresh, features = network.fresh.is_fresh_N, network.features_NF
    fresh = is_fresh.nonzero()[:, 0].tolist()
    # The prompt and a token of the output: all but the first one, which has no row.
    assert len(fresh) == 16 and all(bool(features[token].any()) for token in fresh)
    page = next(page for page in {token // 4 for token in fresh} if sum(token // 4 == page for token in fresh) == 4)
    free = next(page for page in range(600) if not is_fresh[4 * page : 4 * page + 4].any())
    runner.copy_page(page, free, 3)
    assert is_fresh[4 * free : 4 * free + 4].tolist() == [1, 1, 1, 0]
    assert torch.equal(features[4 * free : 4 * free + 3], features[4 * page : 4 * page + 3])
    # From host memory features come back, and the network's own KV is computed from them.
    runner.add_host_pool(1 << 20)
    pool, back = runner.host_pool, next(page for page in range(free + 1, 600) if not is_fresh[4 * page])
    assert pool is not None and pool.beside_kv is not None and pool.memory is not None
    assert pool.memory.shape[1] + pool.beside_kv.shape[1] == pool.page_bytes > pool.kv_bytes == pool.memory.shape[1]
    with torch.inference_mode():
        is_fresh[4 * back : 4 * back + 4] = 1
    pool.save(np.array([page], np.int32), np.array([2], np.int32))
    pool.load(np.array([2], np.int32), np.array([back], np.int32))
    assert torch.equal(features[4 * back : 4 * back + 4], features[4 * page : 4 * page + 4])
    assert not is_fresh[4 * back : 4 * back + 4].any()
    # A store has the KV alone.
    pool.write(np.array([2], np.int32), pool.memory[[2]])
    pool.load(np.array([2], np.int32), np.array([back], np.int32))
    kv = [runner.read_kv(np.arange(4 * of, 4 * of + 4, dtype=np.int32)) for of in (back, page)]
    assert (kv[0] == kv[1]).all() and not features[4 * back : 4 * back + 4].any()
    tokens = np.arange(4 * page, 4 * page + 4, dtype=np.int32)
    runner.write_kv(tokens, runner.read_kv(tokens))
    assert not is_fresh[4 * page : 4 * page + 4].any() and not features[4 * page : 4 * page + 4].any()
    assert is_fresh[4 * free]
    runner.clear()
    assert not is_fresh.any()


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
def test_the_memory_that_is_counted_for_a_token_is_what_it_takes(algorithm, model):
    """Of the network: its KV, the features of a position, and what is noted of it."""
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.drafting.load import token_bytes
    from radixmesh.daemons.worker.cuda.load import create_runner, load_on_device

    loaded = load_on_device(target_folder(algorithm, model), _settings(algorithm, model, 4, 2), HostDevice())
    assert loaded.network is not None
    network = create_runner(loaded).network_drafter.on_device()
    assert network is not None
    pool = network.pool
    layers = range(loaded.network.kv_layout.num_layers)
    kept = [pool.tokens(name, layer) for name in pool.plane_names for layer in layers]
    kept += [network.fresh.is_fresh_N] + ([] if network.features_NF is None else [network.features_NF])
    assert sum(part.nbytes for part in kept) == token_bytes(loaded.network) * (600 + 1) * 4


def test_a_network_drafts_no_more_than_it_was_told_where_grammars_may_force_more():
    runner = _device_runner("eagle3", "tiny-llama", 4, 2)
    drafter = runner.network_drafter  # type: ignore[attr-defined]
    drafts = _note_device(drafter)
    runner.verify(drafter, max_drafts=4)  # type: ignore[attr-defined]
    driver = PlanDriver(runner, lag=0)
    driver.add(0, text_of("tiny-llama")[0], GREEDY, chunk_len=16, num_out=8)
    driver.finish(8)
    assert {len(of) for of in drafts.values()} >= {2} and max(len(of) for of in drafts.values()) == 2
