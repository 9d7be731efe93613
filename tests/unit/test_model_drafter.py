"""Networks that draft on the CPU: their KV follows the target's, lapses while drafts do not pay, and comes back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafting import MODELS, cpu_drafter, sample_of, target_folder
from support.planner_world import World

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.load_drafter import load_model_drafter
from radixmesh.daemons.worker.cpu.model_drafter import ModelDrafter
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.runner import Segment
from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND, DraftRow
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm

NETWORKS = [("standalone", "tiny-llama"), ("eagle3", "tiny-llama"), ("mtp", "tiny-deepseek")]


class _Switched(DraftLengths):
    """Drafts in the steps from `first_step` on."""

    def __init__(self, first_step: int, max_drafts: int) -> None:
        super().__init__(16, max_drafts)
        self._left, self._most = first_step, max_drafts

    def choose(self, slots, *, is_alone):
        self._left -= 1
        return RowLengths.even(len(slots), self._most) if self._left < 0 else None


class _Noted:
    """Rows that a network computed of tokens, without drafts, by call; and how far each draft was from a first one."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.num_rows: list[int] = []
        self._compute = drafter._compute
        drafter._compute = self._noting  # type: ignore[method-assign]

    def _noting(self, parts):
        self.num_rows.append(sum(len(part.ids) for part in parts))
        return self._compute(parts)


def _runner(model: str, algorithm: str = "ngram", page_size: int = 4) -> CpuRunner:
    runner = load_cpu_runner(
        target_folder(algorithm, model), page_size=page_size, num_pages=2400 // page_size, threads=1, max_total_len=600
    )
    assert isinstance(runner, CpuRunner)
    return runner


def _drafting(model: str, algorithm: str, lengths: DraftLengths | None = None) -> tuple[CpuRunner, _Noted]:
    runner = _runner(model, algorithm)
    drafter = cpu_drafter(algorithm, runner, model)
    assert isinstance(drafter, ModelDrafter)
    noted = _Noted(drafter)
    runner.verify(drafter, max_drafts=4, lengths=lengths)
    return runner, noted


def _world(runner: CpuRunner) -> World:
    return World(runner=runner, num_slots=4, chunk_tokens=32, max_tokens_per_step=64)


def _recite(world: World, model: str, number: int, *, max_tokens: int, seed: int | None = None) -> list[int]:
    """One request alone, to its end."""
    items = json.loads((MODELS / model / "recitations.json").read_text())
    item = next(item for item in items if len(item["expected_ids"]) > 250 and number == 0)
    sampling = Sampling(temperature=0.0 if seed is None else 1.0, seed=seed)
    before = set(world.records)
    world.submit(item["prompt_ids"], sampling=sampling, stop=Stop(max_tokens=max_tokens))
    world.run(1)
    (new,) = set(world.records) - before
    return world.records[new].tokens


def _shares(world: World) -> list[float]:
    return [record.finished.accepted_tokens / record.finished.drafted_tokens for record in world.records.values()]


def _least_share(algorithm: str, seed: int | None) -> float:
    """Of drafts that are accepted, far below what was measured. Without its KV a network is right by chance alone."""
    if algorithm == "standalone":
        return 0.5 if seed is None else 0.15
    return 0.15 if seed is None else 0.04


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
@pytest.mark.parametrize("seed", [None, 7])
def test_real_text_is_drafted_rightly(algorithm: str, model: str, seed: int | None) -> None:
    """Greedy and, by the target's own noise, sampled."""
    runner, noted = _drafting(model, algorithm)
    world = _world(runner)
    tokens = _recite(world, model, 0, max_tokens=120, seed=seed)
    assert tokens == _recite(_world(_runner(model)), model, 0, max_tokens=120, seed=seed)
    assert _shares(world)[0] > _least_share(algorithm, seed)
    # A step computes again what the verify before it confirmed, and the last token: no row twice but for that one.
    assert max(noted.num_rows[3:]) <= 6


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
def test_a_prefix_that_requests_share_is_shared_by_the_network(algorithm: str, model: str) -> None:
    runner, noted = _drafting(model, algorithm)
    world = _world(runner)
    first = _recite(world, model, 0, max_tokens=60)
    before = sum(noted.num_rows)
    noted.num_rows.clear()
    assert _recite(world, model, 0, max_tokens=60) == first
    shares = _shares(world)
    assert abs(shares[0] - shares[1]) < 0.1, "what is found in the cache is as good as what was computed"
    assert sum(noted.num_rows) < before, "the prompt's rows were there"


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS[:2])
def test_kv_that_lapsed_is_rebuilt_when_drafts_pay_again(algorithm: str, model: str) -> None:
    """Steps that do not draft leave gaps; the first that does closes them, at most so many tokens in one step."""
    for num_plain in (40, MOST_BEHIND + 40):
        runner, noted = _drafting(model, algorithm, _Switched(num_plain, 4))
        world = _world(runner)
        tokens = _recite(world, model, 0, max_tokens=num_plain + 80)
        assert tokens == _recite(_world(_runner(model)), model, 0, max_tokens=num_plain + 80)
        assert noted.num_rows and max(noted.num_rows) <= MOST_BEHIND + 1
        assert max(noted.num_rows) >= min(num_plain - 8, MOST_BEHIND)
        assert _shares(world)[0] > _least_share(algorithm, None)


def test_a_broken_network_drafts_what_is_never_taken() -> None:
    """Weights of NaN: drafts are ids all the same, and outputs are untouched."""
    runner, _ = _drafting("tiny-llama", "standalone")
    drafter = runner.drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.model.logits = lambda output: np_nan(len(output), runner.vocab_size)  # type: ignore[method-assign]
    world = _world(runner)
    tokens = _recite(world, "tiny-llama", 0, max_tokens=40)
    assert tokens == _recite(_world(_runner("tiny-llama")), "tiny-llama", 0, max_tokens=40)


@pytest.mark.parametrize(("algorithm", "model"), NETWORKS)
def test_kv_of_another_worker_is_drafted_for_as_if_its_pages_had_never_been_used(algorithm: str, model: str) -> None:
    """Pages that take KV of a transfer keep nothing of the request that they held before."""
    source, pages = _runner(model, algorithm), np.arange(16, dtype=np.int32)
    ids = np.arange(40, 88, dtype=np.int32)
    source.forward([Segment(slot=0, ids=ids[:-1], start=0, pages=pages, is_last_chunk=False)])
    indexes = np.arange(len(ids) - 1, dtype=np.int32)
    rows = []
    for earlier in (None, np.arange(300, 348, dtype=np.int32)):
        runner, noted = _drafting(model, algorithm)
        drafter = runner.drafter
        assert isinstance(drafter, ModelDrafter)
        if earlier is not None:
            runner.forward([Segment(slot=0, ids=earlier, start=0, pages=pages, is_last_chunk=False)])
        drafter.admitted(0)
        noted.num_rows.clear()
        runner.write_kv(indexes, source.read_kv(indexes))
        outputs: list[torch.Tensor] = []
        drafter.model.logits = lambda output, to=outputs, of=drafter.model.logits: to.append(output) or of(output)  # type: ignore[method-assign, func-returns-value]
        drafter.propose([DraftRow(sample=sample_of(ids.tolist(), []), most=1, slot=0, pages=pages)])
        rows.append((noted.num_rows[0], outputs[0]))
    assert rows[0][0] == rows[1][0] == len(ids) - drafter.model.first_position
    assert torch.equal(rows[0][1], rows[1][1]), "what an earlier request left there tells in the drafts of this one"


def test_ids_that_a_smaller_vocabulary_lacks_are_drafted_behind(tmp_path: Path) -> None:
    """Models of one family are padded to different sizes: a prompt may have ids that the network has no row for."""
    folder = tmp_path / "smaller"
    shutil.copytree(MODELS / "tiny-llama", folder)
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"] - 64
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    tensors = load_file(folder / "model.safetensors")
    in_vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    cut = {name: tensor[:size].clone() if name in in_vocabulary else tensor for name, tensor in tensors.items()}
    save_file(cut, folder / "model.safetensors")
    runner = _runner("tiny-llama")
    speculation = Speculation(algorithm=SpeculativeAlgorithm.STANDALONE, max_drafts=2, draft_model=folder)
    runner.verify(load_model_drafter(speculation, runner, MODELS / "tiny-llama", "float32"), max_drafts=2)
    pages = np.arange(8, dtype=np.int32)
    ids = np.array([40, size, runner.vocab_size - 1, 41], np.int32)
    runner.forward([Segment(slot=0, ids=ids, start=0, pages=pages, is_last_chunk=False)])
    drafter = runner.drafter
    assert drafter is not None
    (drafts,) = drafter.propose([DraftRow(sample=sample_of(ids.tolist(), [size]), most=2, slot=0, pages=pages)])
    assert len(drafts) == 2 and max(drafts) < size


def np_nan(*shape: int):
    import torch

    return torch.from_numpy(np.full(shape, np.nan, np.float32))


def _settings(**changes: object) -> WorkerSettings:
    settings = {
        "backend": Backend.CPU,
        "model": MODELS / "tiny-llama",
        "speculative_algorithm": SpeculativeAlgorithm.STANDALONE,
        "num_pages": 64,
        "cpu_threads": 1,
        "max_total_len": 64,
    }
    return WorkerSettings(**(settings | changes))  # type: ignore[arg-type]


def test_a_folder_that_cannot_draft_for_the_model_is_refused_with_its_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODELS / "tiny-llama", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(MeshError, match="another vocabulary than tiny-llama") as error:
        load_model(_settings(speculative_draft_model_path=other))
    assert error.value.reason == common_pb2.ERROR_REASON_INVALID_ARGUMENT
    with pytest.raises(MeshError, match="is no folder"):
        load_model(_settings(speculative_draft_model_path=tmp_path / "none"))


@pytest.mark.parametrize(
    ("algorithm", "folder", "size"),
    [("standalone", "tiny-llama", "vocab_size"), ("eagle3", "drafters/tiny-llama-eagle3", "draft_vocab_size")],
)
def test_sizes_beyond_any_memory_are_refused_with_what_to_check(
    tmp_path: Path, algorithm: str, folder: str, size: str
) -> None:
    shutil.copytree(MODELS / folder, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, size: 2**31 - 1}))
    settings = _settings(
        speculative_algorithm=SpeculativeAlgorithm(algorithm), speculative_draft_model_path=tmp_path / "draft"
    )
    # A kernel that grants any size of memory leaves it to the checkpoint's shapes.
    with pytest.raises(MeshError, match=r"check the sizes in its config.json|of shape"):
        load_model(settings)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "needs --speculative-draft-model-path"),
        ({"speculative_algorithm": SpeculativeAlgorithm.NGRAM, "speculative_draft_model_path": MODELS}, "leave it out"),
        ({"speculative_algorithm": SpeculativeAlgorithm.OFF, "speculative_draft_model_path": MODELS}, "one of ngram"),
    ],
)
def test_flags_of_networks_that_do_not_combine_say_what_does(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _settings(**changes)


def test_an_eagle3_head_computes_what_the_one_that_was_trained_does() -> None:
    """Names, alignment, RoPE, norms and the map of ids, against the module of the training script."""
    sys.path.insert(0, str(MODELS))
    import train_tiny_drafters as training

    runner = _runner("tiny-llama")
    drafter = cpu_drafter("eagle3", runner, "tiny-llama")
    assert isinstance(drafter, ModelDrafter)
    tensors = load_file(MODELS / "drafters" / "tiny-llama-eagle3" / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors.pop("d2t")
    assert tensors.pop("t2d").nonzero()[:, 0].tolist() == ids.tolist()
    embedding_VD = runner.model.weights.embedding_VD
    head = training.EagleHead(embedding_VD, ids, training.EAGLE_CONFIG)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    tokens = np.arange(40, 70, dtype=np.int32)
    outputs: list[torch.Tensor] = []
    drafter.model.logits = lambda output: outputs.append(output) or torch.zeros(len(output), 768)  # type: ignore[method-assign, func-returns-value]
    shown: list[tuple[torch.Tensor, ...]] = []
    drafter.model.features = lambda hidden, of=drafter.model.features: shown.append(hidden) or of(hidden)  # type: ignore[method-assign, func-returns-value]
    runner.verify(drafter, max_drafts=1)
    pages = np.arange(8, dtype=np.int32)
    runner.forward([Segment(slot=0, ids=tokens[:-1], start=0, pages=pages, is_last_chunk=False)])
    drafter.propose([DraftRow(sample=sample_of(tokens.tolist(), []), most=1, slot=0, pages=pages)])
    num_rows = len(tokens) - 1
    with torch.inference_mode():
        features = head.start([state[None] for state in shown[0]])
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        want = head.step(torch.from_numpy(tokens[None, 1:]).long(), features, mask, torch.arange(num_rows))
    torch.testing.assert_close(outputs[0][-1], want[0, -1], atol=1e-4, rtol=1e-4)
