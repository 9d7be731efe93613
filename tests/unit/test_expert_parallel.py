"""Experts placed whole over ranks, as threads of this process: the bits of one worker, whoever has rows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deepseek_folders import random_deepseek, save_deepseek
from support.model_folders import random_model, save_model
from support.segments import Stream, scattered_pages
from support.thread_group import ThreadGroup

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.experts.expert_dispatch import LocalDispatch
from radixmesh.daemons.worker.experts.expert_slots import ExpertSlots

MODES = [DispatchMode.NORMAL, DispatchMode.LOW_LATENCY]
NUM_TOKENS = 24


def load(folder: Path, **changes: object) -> CpuRunner:
    settings = {"page_size": 4, "num_pages": 32, "threads": 1, **changes}
    runner = load_cpu_runner(folder, **settings)  # type: ignore[arg-type]
    assert isinstance(runner, CpuRunner)
    return runner


def stream_of(runner: CpuRunner, seed: int) -> Stream:
    ids = np.random.default_rng(seed).integers(0, runner.vocab_size, NUM_TOKENS).astype(np.int32)
    return Stream(0, ids.tolist(), scattered_pages(runner, [NUM_TOKENS])[0])


def logits_of(runner: CpuRunner, seed: int, num_tokens: int = NUM_TOKENS) -> np.ndarray:
    return runner.logits([stream_of(runner, seed).segment(num_tokens, 4, samples=False)])[0]


def save(name: str, folder: Path, *, is_fused: bool) -> Path:
    if name == "mixtral":
        return save_model(random_model("mixtral"), folder, is_fused=is_fused)
    return save_deepseek(random_deepseek("v3_groups"), folder, is_fused=is_fused)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("model", "is_fused"), [("mixtral", False), ("mixtral", True), ("deepseek", False), ("deepseek", True)]
)
def test_logits_are_those_of_one_worker_to_the_bit(
    model: str, is_fused: bool, mode: DispatchMode, tmp_path: Path
) -> None:
    """Two data-parallel ranks with sequences of their own, then one of them alone."""
    folder = save(model, tmp_path, is_fused=is_fused)
    alone = load(folder)
    expected = [logits_of(alone, seed) for seed in range(2)]

    def rank(number: int) -> list[np.ndarray]:
        runner = load(folder, experts=AllToAllDispatch(group.groups[number]))
        runner.set_dispatch_mode(mode, NUM_TOKENS)
        both = logits_of(runner, number)
        runner.clear()
        if number == 0:
            assert runner.forward([]) == []
            return [both]
        return [both, logits_of(runner, 0)]

    with closing(ThreadGroup(2)) as group:
        (first,), (second, again) = group.run(rank)
    assert np.array_equal(first, expected[0]) and np.array_equal(second, expected[1])
    assert np.array_equal(again, expected[0])


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_rank_gets_what_local_experts_give(data: st.DataObject) -> None:
    """Any numbers of rows and any picks, none too, in either mode."""
    size = data.draw(st.integers(2, 4))
    num_experts = data.draw(st.integers(size, 9))
    num_picks = data.draw(st.integers(1, 3).filter(lambda number: number <= num_experts))
    mode = data.draw(st.sampled_from(MODES))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    num_redundant = data.draw(st.integers(0, 4))
    is_moved = data.draw(st.booleans())
    num_rows = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    seed = data.draw(st.integers(0, 1000))
    x_of, picks_of = [], []
    for rank, number in enumerate(num_rows):
        generator = torch.Generator().manual_seed(seed + rank)
        x_of.append(torch.randn(number, 5, generator=generator).to(dtype))
        scores = torch.randn(number, num_experts, generator=generator)
        picks_of.append(scores.topk(num_picks, dim=1).indices.flatten())

    def computed(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return x.float() * (experts[:, None] + 1)

    def placed(dispatch: AllToAllDispatch, number: int) -> ExpertSlots:
        """As loaded, or anywhere, with copies."""
        first = dispatch.first_slots(num_experts)
        if not is_moved:
            return first
        generator = torch.Generator().manual_seed(seed)
        more = torch.randint(num_experts, (len(first.experts_S) - num_experts,), generator=generator)
        experts = torch.cat((torch.arange(num_experts), more))
        return first.replaced(experts[torch.randperm(len(experts), generator=generator)], size)

    def rank_of(number: int) -> torch.Tensor:
        dispatch = AllToAllDispatch(group.groups[number], num_redundant)
        dispatch.set_dispatch_mode(mode, max(num_rows))
        rows = torch.arange(num_rows[number]).repeat_interleave(num_picks)
        slots = placed(dispatch, number)
        got = dispatch.dispatch(x_of[number], rows, picks_of[number], slots, num_picks)
        own_S = slots.experts_S[number * slots.per_rank : (number + 1) * slots.per_rank]
        assert slots.picks_E.sum() == len(rows)
        return dispatch.combine(got, computed(got.x_XD[got.rows_R], own_S[got.held_R]))

    with closing(ThreadGroup(size)) as group:
        results = group.run(rank_of)
    for number, result in enumerate(results):
        rows = torch.arange(num_rows[number]).repeat_interleave(num_picks)
        local = LocalDispatch()
        got = local.dispatch(x_of[number], rows, picks_of[number], local.first_slots(num_experts), num_picks)
        assert torch.equal(result, local.combine(got, computed(got.x_XD[got.rows_R], got.held_R)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [NUM_TOKENS, 1])
def test_ranks_that_share_batch_and_experts_agree_to_the_bit(
    num_tokens: int, mode: DispatchMode, tmp_path: Path
) -> None:
    """Tensor parallel attention; each rank brings half of the rows to the experts, which are placed over both. Of one
    row, a decode's, the second rank brings none, and computes its experts all the same."""
    folder = save("deepseek", tmp_path, is_fused=False)
    alone = logits_of(load(folder), 0, num_tokens)

    def rank(number: int) -> np.ndarray:
        experts = AllToAllDispatch(expert_group.groups[number])
        runner = load(folder, group=group.groups[number], experts=experts)
        runner.formed()
        runner.set_dispatch_mode(mode, num_tokens)
        return logits_of(runner, 0, num_tokens)

    with closing(ThreadGroup(2)) as group, closing(ThreadGroup(2)) as expert_group:
        first, second = group.run(rank)
    assert np.array_equal(first, second)
    assert np.abs(first - alone).max() < 1e-4 * max(1.0, np.abs(alone).max())


def refusal(folder: Path, size: int) -> str:
    with closing(ThreadGroup(size)) as group, pytest.raises(MeshError) as caught:
        load(folder, experts=AllToAllDispatch(group.groups[0]))
    return caught.value.message


def test_models_without_enough_experts_are_refused(tmp_path: Path) -> None:
    dense = save_model(random_model("llama"), tmp_path / "dense")
    assert "--ep-size is 2 for a model of 0 routed experts" in refusal(dense, 2)
    routed = save_model(random_model("mixtral"), tmp_path / "routed")
    assert "choose at most as many" in refusal(routed, 64)
