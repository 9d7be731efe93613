"""A model whose weights are divided among the ranks of a device backend: logits and tokens are those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.llama_folders import random_llama
from support.model_folders import random_model
from support.thread_group import ThreadGroup

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.device import HostDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.cuda.ranks.choice import create_device_group
from radixmesh.daemons.worker.cuda.ranks.device_group import HostGroup
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.prompt_steps import no_rows
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from radixmesh.daemons.worker.runner import Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks of GPUs are processes: tests/gpu")

_MODELS_FOLDER = Path(__file__).parents[2] / "compose" / "models"
_IDS = np.array([5, 99, 3, 42, 42, 7, 130], np.int32)
_SETTINGS = replace(TINY_SETTINGS, page_size=4, num_pages=8, num_slots=2, max_tokens_per_step=16, max_total_len=16)


@pytest.fixture
def group_of() -> Iterator[Callable[[int], ThreadGroup]]:
    groups: list[ThreadGroup] = []

    def create(size: int) -> ThreadGroup:
        groups.append(ThreadGroup(size))
        return groups[-1]

    yield create
    for group in groups:
        group.close()


def _runner(folder: Path, group: HostGroup | None = None, **changes: object) -> DeviceRunner:
    return load_device_runner(folder, replace(_SETTINGS, **changes), HostDevice(), group)  # type: ignore[arg-type]


def _logits(runner: DeviceRunner) -> np.ndarray:
    """Of all ids: some rows at once, then one."""
    pages = np.array([3, 1], np.int32)
    parts = [
        runner.logits([Segment(slot=1, ids=_IDS[first:end], start=first, pages=pages)])[0]
        for first, end in ((0, 5), (5, 6), (6, 7))
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama_biases", 2),
        ("llama_tied", 4),
        ("qwen2", 2),
        ("qwen3_moe", 2),
        ("mixtral", 2),
        ("tiny-llama", 3),
        ("tiny-deepseek", 2),
        ("tiny-deepseek", 4),
    ],
)
def test_logits_are_those_of_one_rank(
    name: str, size: int, tmp_path: Path, group_of: Callable[[int], ThreadGroup]
) -> None:
    folder = _MODELS_FOLDER / name
    if not folder.is_dir():
        model = {"llama_biases": "biases", "llama_tied": "wide_heads_tied"}.get(name)
        (random_llama(model) if model else random_model(name)).save_pretrained(tmp_path)
        folder = tmp_path
    want = _logits(_runner(folder))
    ranks = group_of(size)

    def on_rank(rank: int) -> np.ndarray:
        group = HostGroup(ranks.groups[rank])
        runner = _runner(folder, group)
        runner.formed()
        return _logits(runner)

    got = ranks.run(on_rank)
    for other in got[1:]:
        np.testing.assert_array_equal(other, got[0], "all ranks have the same logits, to the bit")
    np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("qwen2", "fp8"), ("qwen2", "fp8-block"), ("tiny-llama", "fp8-block"), ("tiny-deepseek", "fp8-block")],
)
def test_shares_of_fp8_weights_give_nearly_the_logits_of_all(
    name: str, quantization: str, tmp_path: Path, group_of: Callable[[int], ThreadGroup]
) -> None:
    """Scales are those of a share: the numbers are rounded otherwise than the whole matrix's."""
    folder = _MODELS_FOLDER / name
    if not folder.is_dir():
        random_model(name).save_pretrained(tmp_path)
        folder = tmp_path
    want = _logits(_runner(folder, quantization=quantization))
    exact = _logits(_runner(folder))
    ranks = group_of(2)

    def on_rank(rank: int) -> np.ndarray:
        runner = _runner(folder, HostGroup(ranks.groups[rank]), quantization=quantization)
        runner.formed()
        return _logits(runner)

    got = ranks.run(on_rank)
    np.testing.assert_array_equal(got[0], got[1])
    # As far from the weights' own logits as those of one rank are; where a router's near ties fall otherwise, farther.
    most = 1.3 if name != "tiny-deepseek" else 2.5
    assert np.abs(got[0] - exact).mean() < most * np.abs(want - exact).mean()


def test_ranks_compute_alone_until_they_have_met_and_not_without_each_other(
    group_of: Callable[[int], ThreadGroup],
) -> None:
    """Warm-up and capture come before a group is formed."""
    ranks = group_of(2)
    runner = _runner(_MODELS_FOLDER / "tiny-llama", HostGroup(ranks.groups[0]))
    assert runner.kv_layout.endswith(";tp=0/2") and not runner.takes_grammars
    assert np.isfinite(_logits(runner)).all()
    ranks.groups[0].communicator = None
    with pytest.raises(CollectiveAborted, match="in no group"):
        runner.launch(no_rows(), [Segment(slot=1, ids=_IDS, start=0, pages=np.array([3, 1], np.int32))], 0)


def test_models_of_transformers_are_not_divided(tmp_path: Path, group_of: Callable[[int], ThreadGroup]) -> None:
    random_llama("biases").save_pretrained(tmp_path)
    with pytest.raises(MeshError, match="not divided among ranks: set --tp-size 1") as refused:
        _runner(tmp_path, HostGroup(group_of(2).groups[0]), model_impl="transformers")
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED


@pytest.mark.parametrize(("name", "reason"), [("ring", "INVALID_ARGUMENT"), ("peer", "UNSUPPORTED")])
def test_collectives_that_a_device_does_not_have_are_refused(
    name: str, reason: str, group_of: Callable[[int], ThreadGroup]
) -> None:
    with pytest.raises(MeshError) as refused:
        create_device_group(name, group_of(2).groups[0], HostDevice())
    assert refused.value.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")


def test_ranks_with_steps_of_other_sizes_do_not_compute_together(group_of: Callable[[int], ThreadGroup]) -> None:
    """They would pad the same rows to other numbers, and sum what does not belong together."""
    ranks = group_of(2)
    folder = _MODELS_FOLDER / "tiny-llama"
    runners = [_runner(folder, HostGroup(ranks.groups[rank]), num_slots=2 + rank) for rank in range(2)]
    with pytest.raises(CollectiveAborted, match="give all of them the same --num-slots"):
        ranks.run(lambda rank: runners[rank].formed())


def test_prompt_logprobs_are_gathered_between_the_same_two_steps(group_of: Callable[[int], ThreadGroup]) -> None:
    """Ranks ask for results at different times: one of them only when it has launched the next step."""
    folder = _MODELS_FOLDER / "tiny-llama"
    ranks = group_of(2)
    segments = [
        Segment(
            slot=slot,
            ids=_IDS,
            start=0,
            pages=np.array([2 * slot, 2 * slot + 1], np.int32),
            prompt_logprobs=range(1, len(_IDS)),
            prompt_ids=_IDS,
            prompt_num_top=2,
        )
        for slot in (0, 1)
    ]
    rows = replace(no_rows(), page_tables=np.array([[0, 1], [2, 3]], np.int32), num_pages=np.array([2, 2], np.int32))

    def steps(runner: DeviceRunner, *, is_late: bool) -> list[np.ndarray]:
        first = runner.launch(rows, segments[:1], 0)
        early = None if is_late else first.result()
        second = runner.launch(rows, segments[1:], 0)
        outputs = [early or first.result(), second.result()]
        found = [output.segments[0].prompt_logprobs for output in outputs]
        assert all(of is not None for of in found)
        return [of.own for of in found if of is not None]

    want = steps(_runner(folder), is_late=True)

    def on_rank(rank: int) -> list[np.ndarray]:
        runner = _runner(folder, HostGroup(ranks.groups[rank]))
        runner.formed()
        return steps(runner, is_late=rank == 0)

    for got in ranks.run(on_rank):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
