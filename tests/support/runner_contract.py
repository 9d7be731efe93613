"""The contract of every ModelRunner, driven as the worker drives it: plans, through a StepExecutor.

A subclass gives the fixture `runner`, over the tiny model or what passes for it, with NUM_PAGES pages of PAGE_SIZE.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import PageCopy, Task
from radixmesh.daemons.worker.runner import ModelRunner
from support.plan_driver import PlanDriver

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, MAX_TOTAL_LEN = 768, 4, 64, 128
PROMPT = [0, 40, 77, 492, 295, 274, 12, 603, 329, 609, 18, 441]
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, seed=2**64 - 1)


def pages(*of: int) -> np.ndarray:
    return np.array(of, np.int32)


def generate(
    runner: ModelRunner,
    num_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    chunk_len: int = 64,
    lag: int = 0,
    **how: object,
) -> list[int]:
    """The first tokens after PROMPT, from an executor that knows of nothing before."""
    driver = PlanDriver(runner, lag=lag)
    driver.add(0, PROMPT, sampling, chunk_len=chunk_len, num_out=num_tokens + 1, **{"min_tokens": 0, **how})  # type: ignore[arg-type]
    driver.finish(num_tokens - 1)
    return driver.tokens[0][:num_tokens]


class ModelRunnerContract:
    """One test a promise. NUM_LOGPROBS: alternatives asked for."""

    NUM_LOGPROBS = 3

    def test_it_says_what_it_is(self, runner: ModelRunner) -> None:
        assert (runner.page_size, runner.num_pages, runner.vocab_size) == (PAGE_SIZE, NUM_PAGES, VOCAB_SIZE)
        assert runner.max_total_len == MAX_TOTAL_LEN
        assert Task.GENERATE in runner.tasks

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_neither_chunks_nor_pages_nor_lag_change_tokens(self, runner: ModelRunner, sampling: Sampling) -> None:
        expected = generate(runner, 8, sampling)
        assert len(set(expected)) > 2
        lag = 2 if runner.is_asynchronous else 0
        assert generate(runner, 8, sampling, chunk_len=1, pages=np.arange(20, 40, dtype=np.int32)) == expected
        assert generate(runner, 8, sampling, chunk_len=3, lag=lag, pages=pages(59, 7, 31, 3, 58, 1)) == expected

    def test_rows_of_one_step_do_not_touch_each_other(self, runner: ModelRunner) -> None:
        expected = generate(runner, 6)
        driver = PlanDriver(runner, lag=0)
        driver.add(1, [5] * 30, GREEDY, chunk_len=64, num_out=20)
        driver.add(0, PROMPT, GREEDY, chunk_len=4, num_out=10, min_tokens=0)
        driver.add(2, [9, 8, 7], replace(SAMPLED, temperature=1.0, seed=3), chunk_len=64, num_out=10)
        driver.finish(6)
        assert driver.tokens[0][:6] == expected

    def test_a_copied_page_goes_on_like_its_source(self, runner: ModelRunner) -> None:
        expected = generate(runner, 6)
        runner.clear()
        driver = PlanDriver(runner, lag=0)
        driver.add(0, PROMPT, GREEDY, chunk_len=64, num_out=8, pages=pages(0, 1, 2, 3, 4), min_tokens=0)
        # Two full pages are shared; of the third, all but the token that is computed is copied.
        copied = PageCopy(source_page=2, target_page=33, num_tokens=3)
        own = pages(33, 34, 35, 36)
        driver.add(
            1, PROMPT, GREEDY, chunk_len=64, num_out=8, cached=pages(0, 1), copied=copied, pages=own, min_tokens=0
        )
        driver.finish(6)
        assert driver.tokens[0][:6] == driver.tokens[1][:6] == expected

    def test_kv_that_was_read_and_written_goes_on_like_its_source(self, runner: ModelRunner) -> None:
        if not runner.kv_token_bytes:
            pytest.skip("it takes no part in transfers")
        expected = generate(runner, 6)
        runner.clear()
        driver = PlanDriver(runner, lag=0)
        driver.add(0, PROMPT, GREEDY, chunk_len=64, num_out=8, pages=pages(9, 1, 2, 3, 4), min_tokens=0)
        driver.executor.finish_all()
        places = np.concatenate([np.arange(4, dtype=np.int32) + 4 * page for page in (9, 1)])
        whole = runner.read_kv(places)
        assert whole.dtype == np.uint8 and len(whole) == len(places) * runner.kv_token_bytes
        parts = [runner.read_kv(places[:5]), runner.read_kv(places[5:])]
        runner.clear()
        for part, at in zip(parts, (places[:5], places[5:]), strict=True):
            runner.write_kv(at, part)
        assert (runner.read_kv(places) == whole).all()
        driver.add(
            0, PROMPT, GREEDY, chunk_len=64, num_out=8, cached=pages(9, 1), pages=pages(33, 34, 35), min_tokens=0
        )
        driver.finish(6)
        assert driver.tokens[0][:6] == expected

    def test_suppressed_ids_are_never_sampled(self, runner: ModelRunner) -> None:
        usual = generate(runner, 4)
        tokens = generate(runner, 6, min_tokens=4, suppressed=usual)
        assert not set(tokens[:4]) & set(usual)

    def test_logprobs_come_in_the_shape_that_was_asked_for(self, runner: ModelRunner) -> None:
        wanted = Sampling(temperature=0.0, num_top_logprobs=self.NUM_LOGPROBS, prompt_logprobs=True)
        driver = PlanDriver(runner, lag=0)
        driver.add(0, PROMPT, wanted, chunk_len=4, num_out=6, min_tokens=0)
        driver.add(1, PROMPT, GREEDY, chunk_len=64, num_out=6, min_tokens=0)
        driver.finish(3)
        assert driver.tokens[0][:3] == driver.tokens[1][:3]
        of_prompt = [part for result in driver.results for part in result.prompt_logprobs]
        of_tokens = [part for result in driver.results for part in result.logprobs]
        assert {part.slot for part in (*of_prompt, *of_tokens)} == {0}
        assert sum(len(part.logprobs.own) for part in of_prompt) == len(PROMPT) - 1
        assert sum(len(part.logprobs.own) for part in of_tokens) == len(driver.tokens[0])
        for part in (*of_prompt, *of_tokens):
            logprobs = part.logprobs
            assert logprobs.top_ids.shape == logprobs.top.shape == (len(logprobs.own), self.NUM_LOGPROBS)
            assert (np.diff(logprobs.top, axis=1) <= 0).all() and (logprobs.own <= 0).all()
        # Greedy takes the most likely id.
        firsts = np.concatenate([part.logprobs.top_ids[:, 0] for part in of_tokens])
        assert firsts.tolist() == driver.tokens[0]
        for part in of_tokens:
            np.testing.assert_array_equal(part.logprobs.own, part.logprobs.top[:, 0])

    def test_cleared_kv_can_be_computed_anew(self, runner: ModelRunner) -> None:
        expected = generate(runner, 3)
        runner.clear()
        assert generate(runner, 3) == expected
