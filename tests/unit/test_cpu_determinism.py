"""A row's bits depend on its own sequence alone: not on the batch, the chunks, the pages, nor prefill or decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.llama_folders import TINY_LLAMA, random_llama, save_llama
from support.lone_sequences import Load, LongAlone, have_same_bits, long_alone_of, one_by_one, random_ids
from support.segments import Stream, generate, scattered_pages

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.tiles import RowTiles, Tensors, agreeing_sizes

_NUM_TOKENS = 768
_MODELS = ("tiny", "llama3_rope", "odd_sizes", "biases")
_POOL = st.sampled_from([1, 16])
_SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Runners by (model, page size), each loaded once."""
    torch.set_num_threads(1)
    folders: dict[str, Path] = {"tiny": TINY_LLAMA}
    runners: dict[tuple[str, int], CpuRunner] = {}

    def get(model: str, page_size: int) -> CpuRunner:
        if model not in folders:
            folders[model] = save_llama(random_llama(model), tmp_path_factory.mktemp(model))
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
@pytest.mark.parametrize("chunk", [1000, 64, 7])
def test_chunked_prefill_has_the_bits_of_decode(
    load: Load, long_alone: LongAlone, model: str, page_size: int, chunk: int
) -> None:
    ids, expected = long_alone(model)
    runner = load(model, page_size)
    stream = Stream(0, ids, scattered_pages(runner, [len(ids)], seed=chunk)[0])
    rows = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        rows += runner.logits([stream.segment(length, page_size, samples=False)])
        stream.computed += length
    assert have_same_bits(np.concatenate(rows), expected)


@_SETTINGS
@given(data=st.data(), model=st.sampled_from(_MODELS), page_size=_POOL, seed=st.integers(0, 1000))
def test_any_schedule_gives_thehave_same_bits(
    load: Load, data: st.DataObject, model: str, page_size: int, seed: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=6), label="lengths")
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


@_SETTINGS
@given(others=st.lists(st.integers(1, 60), max_size=20), page_size=_POOL, chunk=st.sampled_from([1, 7, 64, 1000]))
def test_sampled_output_is_the_same_alone_and_in_any_batch(
    load: Load, others: list[int], page_size: int, chunk: int
) -> None:
    sampling = Sampling(temperature=1.3, top_p=0.95, seed=2**63 + 5, repetition_penalty=1.1, frequency_penalty=0.2)
    outputs = []
    for companions in ([], others):
        runner = load("tiny", page_size)
        lengths = [20, *companions]
        num_pages = sum(-(-(length + 12) // page_size) for length in lengths)
        if num_pages > runner.num_pages:
            return
        pages = scattered_pages(runner, [length + 12 for length in lengths], seed=len(companions))
        streams = [
            Stream(i, random_ids(runner, i, length), pages[i], sampling if i == 0 else Sampling(seed=i))
            for i, length in enumerate(lengths)
        ]
        generate(runner, streams, 12, chunk=chunk if companions else 1000)
        outputs.append(streams[0].output)
    assert outputs[0] == outputs[1]


def test_resumed_output_continues_with_the_same_draws(load: Load) -> None:
    sampling = Sampling(temperature=1.5, seed=99, presence_penalty=0.5)
    runner = load("tiny", 1)
    prompt = random_ids(runner, 1, 25)
    whole = Stream(0, prompt, scattered_pages(runner, [60])[0], sampling)
    generate(runner, [whole], 30)
    for cut in (0, 1, 13, 29):
        resumed = Stream(0, prompt, scattered_pages(load("tiny", 1), [60], seed=cut)[0], sampling)
        resumed.output = whole.output[:cut]
        generate(runner, [resumed], 30, chunk=9)
        assert resumed.output == whole.output


def test_sizes_that_add_in_another_order_are_left_out() -> None:
    weights = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))

    def product(inputs: Tensors) -> Tensors:
        (x,) = inputs
        if len(x) == 8:  # Another order of additions, as some kernels have.
            return (x[:, :32] @ weights[:32] + x[:, 32:] @ weights[32:],)
        return (torch.stack([(row[:, None] * weights).sum(0) for row in x]),)

    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    assert agreeing_sizes(product, (rows,), (2, 4, 8, 16, 32)) == (2, 4, 16, 32)


def test_a_function_that_depends_on_the_index_or_the_neighbours_has_no_sizes() -> None:
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))

    def by_index(inputs: Tensors) -> Tensors:
        return (inputs[0] + torch.arange(len(inputs[0]))[:, None] * 1e-6,)

    def by_neighbours(inputs: Tensors) -> Tensors:
        return (inputs[0] - inputs[0].mean(0),)

    assert agreeing_sizes(by_index, (rows,), (2, 16, 64)) == ()
    assert agreeing_sizes(by_neighbours, (rows,), (2, 16)) == ()


@given(st.sets(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 200))
def test_tiles_cover_all_rows_with_their_sizes_only(sizes: set[int], num_rows: int) -> None:
    tiles = RowTiles(tuple(sizes))
    cover = tiles.cover(num_rows)
    assert set(cover) <= sizes
    assert num_rows <= sum(cover) < num_rows + max(sizes)
    x = torch.arange(tiles.padded(num_rows))
    (mapped,) = tiles.map(lambda inputs: (inputs[0] * 2,), (x,))
    assert torch.equal(mapped, x * 2)
