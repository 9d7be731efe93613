"""Latent attention and routed experts keep the promise: a row's bits depend on its own sequence alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.deepseek_folders import TINY_DEEPSEEK, random_deepseek, save_deepseek
from support.lone_sequences import Load, LongAlone, have_same_bits, long_alone_of, one_by_one, random_ids
from support.segments import Stream, scattered_pages

from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

_NUM_TOKENS = 768
_MODELS = ("tiny", "v2_groups_yarn", "v3_odd_sizes", "v3_yarn_plain_query")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Runners by (model, page size), each loaded once."""
    torch.set_num_threads(1)
    folders: dict[str, Path] = {"tiny": TINY_DEEPSEEK}
    runners: dict[tuple[str, int], CpuRunner] = {}

    def get(model: str, page_size: int) -> CpuRunner:
        if model not in folders:
            folders[model] = save_deepseek(random_deepseek(model), tmp_path_factory.mktemp(model))
        if (model, page_size) not in runners:
            runner = load_cpu_runner(folders[model], page_size=page_size, num_pages=_NUM_TOKENS // page_size, threads=1)
            assert isinstance(runner, CpuRunner) and runner.is_deterministic
            runners[model, page_size] = runner
        runners[model, page_size].clear()
        return runners[model, page_size]

    return get


@pytest.fixture(scope="module")
def long_alone(load: Load) -> LongAlone:
    return long_alone_of(load)


@pytest.mark.parametrize("model", _MODELS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_prefill_has_the_bits_of_decode(load: Load, long_alone: LongAlone, model: str, page_size: int) -> None:
    ids, expected = long_alone(model)
    for chunk in (1000, 64, 7):
        runner = load(model, page_size)
        stream = Stream(0, ids, scattered_pages(runner, [len(ids)], seed=chunk)[0])
        rows = []
        while stream.remaining:
            length = min(chunk, stream.remaining)
            rows += runner.logits([stream.segment(length, page_size, samples=False)])
            stream.computed += length
        assert have_same_bits(np.concatenate(rows), expected), chunk


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), model=st.sampled_from(_MODELS), page_size=st.sampled_from([1, 16]), seed=st.integers(0, 1000))
def test_any_schedule_gives_thehave_same_bits(
    load: Load, data: st.DataObject, model: str, page_size: int, seed: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5), label="lengths")
    prompts = [random_ids(load(model, page_size), seed + i, length) for i, length in enumerate(lengths)]
    expected = [one_by_one(load(model, 1), ids) for ids in prompts]
    runner = load(model, page_size)
    pages = scattered_pages(runner, lengths, seed)
    streams = [Stream(i, ids, pages[i]) for i, ids in enumerate(prompts)]
    rows: list[list[np.ndarray]] = [[] for _ in streams]
    while waiting := [s for s in streams if s.remaining]:
        chosen = data.draw(st.permutations(waiting), label="order")[: data.draw(st.integers(1, len(waiting)))]
        chunks = [data.draw(st.sampled_from([1, 2, 7, 33, 64, 90]), label="chunk") for _ in chosen]
        chunks = [min(chunk, s.remaining) for chunk, s in zip(chunks, chosen, strict=True)]
        segments = [s.segment(n, page_size, samples=False) for s, n in zip(chosen, chunks, strict=True)]
        for stream, length, logits in zip(chosen, chunks, runner.logits(segments), strict=True):
            rows[stream.slot].append(logits)
            stream.computed += length
    for parts, alone in zip(rows, expected, strict=True):
        assert have_same_bits(np.concatenate(parts), alone)
