"""The CPU runner against transformers in float32: logits in prefill, chunks and decode; greedy ids; prompt logprobs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.llama_folders import SHAPES, TINY_LLAMA, random_llama, save_llama
from support.rounding import model_tolerance, sum_tolerance, typical_model_error
from support.segments import Stream, generate, scattered_pages
from transformers import LlamaForCausalLM

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.runner import SampleInput, Segment

_LENGTH = 150


@pytest.fixture(scope="module", params=SHAPES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.set_num_threads(1)
    model = random_llama(request.param)
    return model, save_llama(model, tmp_path_factory.mktemp(request.param))


def _load(folder: Path, **settings: object) -> CpuRunner:
    runner = load_cpu_runner(folder, **{"num_pages": 640, "threads": 1, **settings})
    assert isinstance(runner, CpuRunner)
    runner.clear()
    return runner


def _prompt(runner: CpuRunner, length: int = _LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, length).astype(np.int32)


def _logits_in_chunks(runner: CpuRunner, ids: np.ndarray, chunk: int) -> np.ndarray:
    stream = Stream(0, ids.tolist(), scattered_pages(runner, [len(ids)])[0])
    parts = []
    while stream.remaining:
        length = min(chunk, stream.remaining)
        parts += runner.logits([stream.segment(length, runner.page_size, samples=False)])
        stream.computed += length
    return np.concatenate(parts)


# Every pair of a backend's pages and a kind of chunk that differ in their code; the rest is in the full matrix.
_DAILY = [("paged_torch", 1, _LENGTH), ("paged_torch", 1, 7), ("paged_torch", 16, 64), ("paged_torch", 16, 1)]
_DAILY += [("naive", 4, 7)]
_FULL = [
    (*pages, chunk)
    for pages in (("paged_torch", 1), ("paged_torch", 16), ("naive", 4))
    for chunk in (_LENGTH, 64, 7, 1)
    if (*pages, chunk) not in _DAILY
]


@pytest.mark.parametrize(
    ("backend", "page_size", "chunk"), [*_DAILY, *(pytest.param(*case, marks=pytest.mark.full) for case in _FULL)]
)
def test_logits_equal_those_of_transformers(
    oracle: tuple[LlamaForCausalLM, Path], backend: str, page_size: int, chunk: int
) -> None:
    model, folder = oracle
    runner = _load(folder, attention_backend=backend, page_size=page_size)
    ids = _prompt(runner)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    assert expected.std() > 0.5, "a test on flat logits would show nothing"
    tolerance = model_tolerance(model.config, len(ids), np.abs(expected).max())
    assert np.abs(_logits_in_chunks(runner, ids, chunk) - expected).max() <= tolerance


def test_greedy_ids_equal_those_of_transformers(oracle: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = oracle
    runner = _load(folder, page_size=16)
    prompts = [_prompt(runner, length, seed) for seed, length in enumerate((5, 1, 90, 17))]
    pages = scattered_pages(runner, [len(prompt) + 64 for prompt in prompts])
    streams = [Stream(i, prompt.tolist(), pages[i]) for i, prompt in enumerate(prompts)]
    generate(runner, streams, 64, chunk=11)
    for stream, prompt in zip(streams, prompts, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        with torch.inference_mode():
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        assert stream.output == expected[0, len(prompt) :].tolist()


def test_fast_mode_is_as_near(oracle: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = oracle
    runner = _load(folder, is_deterministic=False)
    assert not runner.is_deterministic
    ids = _prompt(runner)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    tolerance = model_tolerance(model.config, len(ids), np.abs(expected).max())
    assert np.abs(_logits_in_chunks(runner, ids, 50) - expected).max() <= tolerance


def test_bfloat16_is_near_float32(oracle: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = oracle
    ids = _prompt(exact := _load(folder))
    logits, expected = (_logits_in_chunks(runner, ids, 64) for runner in (_load(folder, dtype="bfloat16"), exact))
    assert np.abs(logits - expected).mean() < typical_model_error(model.config, expected.std(), torch.bfloat16)


def test_the_trained_model_recites_word_for_word() -> None:
    runner = _load(TINY_LLAMA, num_pages=4096)
    recitations = json.loads((TINY_LLAMA / "recitations.json").read_text())
    recitations = [r for r in recitations if len(r["expected_ids"]) <= 200][:12]
    assert len(recitations) >= 6
    lengths = [len(r["prompt_ids"]) + len(r["expected_ids"]) for r in recitations]
    pages = scattered_pages(runner, lengths)
    streams = [Stream(i, r["prompt_ids"], pages[i]) for i, r in enumerate(recitations)]
    for stream, recitation in zip(streams, recitations, strict=True):
        generate(runner, [stream], 1, chunk=7)
        assert stream.output[0] == recitation["expected_ids"][0]
    generate(runner, streams, min(len(r["expected_ids"]) for r in recitations))
    for stream, recitation in zip(streams, recitations, strict=True):
        generate(runner, [stream], len(recitation["expected_ids"]))
        assert stream.output == recitation["expected_ids"], recitation["name"]


def test_a_context_beyond_one_block_of_angles_equals_transformers() -> None:
    torch.set_num_threads(1)
    runner = _load(TINY_LLAMA, num_pages=1300)
    ids = _prompt(runner, 1200)
    model = LlamaForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0].numpy()
    tolerance = model_tolerance(model.config, len(ids), np.abs(expected).max())
    assert np.abs(_logits_in_chunks(runner, ids, 500) - expected).max() <= tolerance


def test_prompt_logprobs_equal_a_log_softmax(oracle: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = oracle
    runner = _load(folder)
    ids = _prompt(runner)
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1).numpy()
    pages = scattered_pages(runner, [len(ids)])[0]
    own, top_ids, top = [], [], []
    for start, end in ((0, 3), (3, 4), (4, _LENGTH)):
        (output,) = runner.forward(
            [
                Segment(
                    slot=0,
                    ids=ids[start:end],
                    start=start,
                    pages=pages[:end],
                    prompt_logprobs=range(start + 1, min(end + 1, _LENGTH)),
                    prompt_ids=ids,
                    prompt_num_top=3,
                )
            ]
        )
        assert output.token is None and output.logprobs is None and output.prompt_logprobs is not None
        own.append(output.prompt_logprobs.own)
        top_ids.append(output.prompt_logprobs.top_ids)
        top.append(output.prompt_logprobs.top)
    predicted = expected[: _LENGTH - 1]
    tolerance = model_tolerance(model.config, _LENGTH, np.abs(expected).max())
    assert np.abs(np.concatenate(own) - predicted[np.arange(_LENGTH - 1), ids[1:]]).max() <= tolerance
    assert np.abs(np.concatenate(top) - np.sort(predicted)[:, :-4:-1]).max() <= tolerance
    assert np.array_equal(np.concatenate(top_ids), np.argsort(-predicted, kind="stable")[:, :3])


def test_output_logprobs_are_of_the_raw_logits() -> None:
    runner = _load(TINY_LLAMA)
    stream = Stream(0, [0, 5, 9], scattered_pages(runner, [4])[0])
    (raw,) = runner.logits([stream.segment(3, 1, samples=False)])
    sampling = Sampling(temperature=0.3, seed=4, logit_bias=((11, 100.0),), num_top_logprobs=2)
    sample = SampleInput(sampling=sampling, prompt_ids=stream.prompt, output_ids=stream.prompt[:0], position=3)
    segment = Segment(slot=0, ids=stream.prompt, start=0, pages=stream.pages[:3], sample=sample)
    (output,) = runner.forward([segment])
    assert output.token == 11 and output.logprobs is not None
    expected = torch.from_numpy(raw[-1]).log_softmax(0).numpy()
    # Two float32 softmaxes over the same logits.
    tolerance = 2 * sum_tolerance(len(expected), float(np.abs(expected).max()))
    assert output.logprobs.own[0] == pytest.approx(expected[11], abs=tolerance)
    assert output.logprobs.top_ids[0].tolist() == np.argsort(-expected, kind="stable")[:2].tolist()


def test_copied_page_serves_like_its_source() -> None:
    runner = _load(TINY_LLAMA, page_size=16, num_pages=8)
    ids = _prompt(runner, 30)
    first = Stream(0, ids.tolist(), np.array([5, 2], np.int32))
    (expected,) = runner.logits([first.segment(30, 16, samples=False)])
    runner.copy_page(2, 7, 10)
    second = Stream(1, ids.tolist(), np.array([5, 7], np.int32))
    second.computed = 26
    (rest,) = runner.logits([second.segment(4, 16, samples=False)])
    assert np.array_equal(rest, expected[26:])


def test_a_read_of_cleared_memory_shows() -> None:
    runner = _load(TINY_LLAMA, num_pages=64)
    stream = Stream(0, list(range(10)), np.arange(10, dtype=np.int32))
    stream.computed = 9
    (logits,) = runner.logits([stream.segment(1, 1, samples=False)])
    assert np.isnan(logits).all()


def test_what_a_runner_says_of_itself() -> None:
    runner = _load(TINY_LLAMA, page_size=8, num_pages=None, max_total_len=100)
    assert (runner.page_size, runner.vocab_size, runner.max_total_len) == (8, 768, 100)
    assert runner.num_pages * 8 >= 100
    assert runner.is_deterministic and runner.tasks == {Task.GENERATE, Task.EMBED}
    assert runner.forward([]) == []
