"""Embed tasks from a planner through a real model: chunks, cached prefixes, lost epochs, neighbours change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.llama_folders import TINY_LLAMA
from support.planner_world import World

from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.plans.executor import StepExecutor


class EmbedWorld(World):
    """The tiny trained model instead of made-up tokens; keeps the vectors by handle."""

    def __init__(self, *, num_pages: int = 256, chunk_tokens: int = 16) -> None:
        self.vectors: dict[int, np.ndarray] = {}
        super().__init__(num_pages=num_pages, chunk_tokens=chunk_tokens)
        runner = load_cpu_runner(TINY_LLAMA, num_pages=num_pages, threads=1, max_total_len=200)
        runner.clear()
        self.executor = StepExecutor(runner, num_slots=8, max_tokens_per_step=64)
        self.group = replace(self.group, vocab_size=runner.vocab_size, tasks=frozenset(runner.tasks))
        self.begin_epoch()

    def take(self, outputs: Outputs) -> None:
        for vector in outputs.vectors:
            assert vector.handle not in self.vectors, "one vector a request"
            self.vectors[vector.handle] = vector.values
        super().take(outputs)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 700, length).tolist()


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    """Vectors of the first tokens of a prompt, each alone and whole."""
    vectors = {}
    for length in (1, 16, 50, 90):
        world = EmbedWorld(chunk_tokens=100)
        world.submit(_prompt(90)[:length], task=Task.EMBED)
        world.run(depth=0)
        (vectors[length],) = world.vectors.values()
    return vectors


@pytest.mark.parametrize("chunk_tokens", [16, 7])
def test_vectors_come_once_and_the_same_with_and_without_a_cached_prefix(
    expected: dict[int, np.ndarray], chunk_tokens: int
) -> None:
    world = EmbedWorld(chunk_tokens=chunk_tokens)
    generated = world.submit(_prompt(90))
    world.run()
    for _ in range(2):  # The prompt is a prefix of cached tokens, the second time exactly.
        records = {length: world.submit(_prompt(90)[:length], task=Task.EMBED) for length in expected}
        generating = world.submit(_prompt(90))
        world.run(depth=2)
        for length, record in records.items():
            assert np.array_equal(world.vectors[record.submission.handle], expected[length])
            assert record.finished is not None and not record.tokens
        assert generating.tokens == generated.tokens
    world.check_clean()


def test_a_pool_too_small_for_all_at_once_costs_no_vector(expected: dict[int, np.ndarray]) -> None:
    world = EmbedWorld(num_pages=130)
    embed = world.submit(_prompt(90), task=Task.EMBED)
    others = [world.submit(_prompt(30, seed=i + 1)) for i in range(3)]
    world.run(depth=1)
    assert np.array_equal(world.vectors[embed.submission.handle], expected[90])
    assert all(other.finished is not None for other in others)
    world.check_clean()


def test_an_epoch_that_ends_within_a_prompt_costs_no_vector(expected: dict[int, np.ndarray]) -> None:
    world = EmbedWorld()
    embed = world.submit(_prompt(90), task=Task.EMBED)
    for _ in range(2):
        assert world.plan() and world.execute()
    world.begin_epoch()
    assert not world.vectors
    world.run()
    assert np.array_equal(world.vectors[embed.submission.handle], expected[90])
    world.check_clean()
