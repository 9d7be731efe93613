"""Adjustments of a row of logits before sampling: penalties, biases, suppressed ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.sampling import Sampling


def adjust_logits(
    logits: FloatArray, sampling: Sampling, prompt_ids: IntArray, output_ids: IntArray, suppressed_ids: IntArray
) -> FloatArray:
    """A new row, float32 [vocabulary]: repetition, frequency and presence penalty, logit bias, then suppression.

    NaN counts as -inf, so that a broken logit is never sampled. Ids outside the row have no effect. Repetition (Keskar
    et al. 2019: positive logits divided, others multiplied) looks at prompt and output, once an id; frequency and
    presence at the output.
    """
    row = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    if sampling.repetition_penalty != 1.0:
        seen = _valid(np.unique(np.concatenate((prompt_ids, output_ids))), len(row))
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(output_ids):
        ids, counts = np.unique(output_ids, return_counts=True)
        inside = _inside(ids, len(row))
        ids, counts = ids[inside], counts[inside].astype(np.float32)
        row[ids] -= np.float32(sampling.frequency_penalty) * counts
        row[ids] -= np.float32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias:
        if 0 <= token < len(row):
            row[token] += np.float32(bias)
    row[_valid(suppressed_ids, len(row))] = -np.inf
    return row


def is_adjusted(sampling: Sampling, suppressed_ids: IntArray) -> bool:
    """True if `adjust_logits` would change anything but NaN."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
        or len(suppressed_ids)
    )


def _valid(ids: IntArray, size: int) -> IntArray:
    return ids[_inside(ids, size)]


def _inside(ids: IntArray, size: int) -> npt.NDArray[np.bool_]:
    inside: npt.NDArray[np.bool_] = (ids >= 0) & (ids < size)
    return inside
