"""Sequences that a CPU worker computes alone, token by token: the bits that any batch, chunk and page has to give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from radixmesh.daemons.worker.cpu.runner import CpuRunner
from support.segments import Stream

Load = Callable[[str, int], CpuRunner]
"""A runner, emptied, by model and page size."""
LongAlone = Callable[[str], tuple[list[int], np.ndarray]]
"""By model, 200 tokens and their logits."""


def random_ids(runner: CpuRunner, seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, runner.vocab_size, length).tolist()


def one_by_one(runner: CpuRunner, ids: list[int]) -> np.ndarray:
    """The reference: every token alone, as a decode, on pages in order."""
    runner.clear()
    stream = Stream(0, ids, np.arange(-(-len(ids) // runner.page_size), dtype=np.int32))
    rows = []
    for _ in ids:
        rows += runner.logits([stream.segment(1, runner.page_size, samples=False)])
        stream.computed += 1
    return np.concatenate(rows)


def long_alone_of(load: Load) -> LongAlone:
    """Each model's computed once."""

    @functools.cache
    def get(model: str) -> tuple[list[int], np.ndarray]:
        ids = random_ids(load(model, 1), 3, 200)
        return ids, one_by_one(load(model, 1), ids)

    return get


def have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """float32, of any shape."""
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))
