"""Samples tokens from rows of logits, of which a row may stand behind drafts of its output."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.worker.guided.guide import mask_row
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.penalties import is_adjusted
from radixmesh.daemons.worker.sampling.sampler import sample_tokens


def input_after(sample: SampleInput, drafts: IntArray) -> SampleInput:
    """The input of the position behind some drafts."""
    if not len(drafts):
        return sample
    output_ids = np.concatenate((sample.output_ids, drafts))
    return replace(sample, position=sample.position + len(drafts), output_ids=output_ids)


def masked_rows(
    rows: FloatArray, inputs: Sequence[SampleInput], num_drafts: Sequence[int]
) -> tuple[FloatArray, Sequence[SampleInput], Set[int], Set[int]]:
    """Rows and inputs as they are sampled: of outputs that follow a grammar, what it forbids cannot be. And the rows in
    which one token is left, and those in which none is.

    num_drafts: how many of an input's last output ids are drafts. Logprobs are those of the rows as they were.
    """
    if all(sample.guide is None for sample in inputs):
        return rows, inputs, frozenset(), frozenset()
    masked, adjusted, single_rows, stuck_rows = rows.copy(), list(inputs), set(), set()
    for index, (sample, number) in enumerate(zip(inputs, num_drafts, strict=True)):
        drafts = sample.output_ids[len(sample.output_ids) - number :].tolist()
        allowed = None if sample.guide is None else sample.guide.allowed(drafts)
        if allowed is None:
            continue
        if not allowed.any():
            stuck_rows.add(index)
            continue
        masked[index], keeps_suppression = mask_row(rows[index], allowed, sample.suppressed_ids)
        if not keeps_suppression:
            adjusted[index] = replace(sample, suppressed_ids=sample.suppressed_ids[:0])
        if np.count_nonzero(allowed) == 1:
            single_rows.add(index)
    return masked, adjusted, single_rows, stuck_rows


def sample_rows(rows: FloatArray, inputs: Sequence[SampleInput], single_rows: Set[int] = frozenset()) -> list[int]:
    """A token of each row of logits. single_rows: those in which a mask has left one token."""
    # NaN would win an argmax; those rows go through the sampler.
    tokens: list[int] = rows.argmax(axis=1).tolist()
    is_plain = np.isfinite(rows.max(axis=1)).tolist()
    by_sampler = [
        row
        for row, sample in enumerate(inputs)
        # A mask of one token leaves nothing to sample.
        if row not in single_rows
        and not (
            is_plain[row] and sample.sampling.is_greedy and not is_adjusted(sample.sampling, sample.suppressed_ids)
        )
    ]
    if by_sampler:
        sampled = sample_tokens(rows[by_sampler], [inputs[row] for row in by_sampler])
        for row, token in zip(by_sampler, sampled, strict=True):
            tokens[row] = token
    return tokens
