"""Segments for model runners: sequences that live on pages of their own and are computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import ModelRunner, SampleInput, Segment

GREEDY = Sampling(temperature=0.0)


class Stream:
    """One request as an executor would hold it: known ids, computed length, pages."""

    def __init__(self, slot: int, prompt: Sequence[int], pages: IntArray, sampling: Sampling = GREEDY) -> None:
        self.slot = slot
        self.prompt = as_ints(prompt)
        self.output: list[int] = []
        self.pages = as_ints(pages)
        self.sampling = sampling
        self.computed = 0

    @property
    def ids(self) -> IntArray:
        return np.concatenate((self.prompt, as_ints(self.output)))

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.computed

    def segment(self, length: int, page_size: int, *, samples: bool = True) -> Segment:
        """The next `length` tokens; samples one if they reach the last."""
        end = self.computed + length
        sample = None
        if samples and end == len(self.ids):
            sample = SampleInput(
                sampling=self.sampling, prompt_ids=self.prompt, output_ids=as_ints(self.output), position=end
            )
        return Segment(
            slot=self.slot,
            ids=self.ids[self.computed : end],
            start=self.computed,
            pages=self.pages[: -(-end // page_size)],
            sample=sample,
        )


def generate(runner: ModelRunner, sequences: Sequence[Stream], num_tokens: int, chunk: int = 1 << 30) -> None:
    """Runs all sequences together, in chunks of at most `chunk`, until each has `num_tokens` of output."""
    while running := [s for s in sequences if len(s.output) < num_tokens]:
        lengths = [min(chunk, s.remaining) for s in running]
        segments = [s.segment(n, runner.page_size) for s, n in zip(running, lengths, strict=True)]
        for sequence, length, output in zip(running, lengths, runner.forward(segments), strict=True):
            sequence.computed += length
            if output.token is not None:
                sequence.output.append(output.token)


def scattered_pages(runner: ModelRunner, lengths: Sequence[int], seed: int = 0) -> list[IntArray]:
    """Disjoint random pages of the pool for sequences of these lengths."""
    order = np.random.default_rng(seed).permutation(runner.num_pages).astype(np.int32)
    counts = [-(-length // runner.page_size) for length in lengths]
    assert sum(counts) <= runner.num_pages, (counts, runner.num_pages)
    return [order[end - count : end] for count, end in zip(counts, np.cumsum(counts).tolist(), strict=True)]
