"""Log probabilities as users are told them: of the model's own logits, before penalties and temperature."""

from __future__ import annotations

import numpy as np

from radixmesh.daemons.runtime.arrays import FloatArray
from radixmesh.daemons.runtime.steps.step import TokenLogprobs


def log_softmax(logits: FloatArray) -> FloatArray:
    """Of one row, float32 [vocabulary]. NaN counts as -inf; +inf shares all of the probability; all -inf stays so."""
    row = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    highest = row.max()
    if highest == -np.inf:
        return row
    if highest == np.inf:
        row = np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
        highest = np.float32(0)
    shifted = row - highest
    # The sum in float64: over a large vocabulary float32 would lose the small terms.
    normaliser = np.log(np.exp(shifted).sum(dtype=np.float64))
    result: FloatArray = (shifted - np.float32(normaliser)).astype(np.float32)
    return result


def token_logprobs(rows: FloatArray, token_ids: list[int], num_top: int) -> TokenLogprobs:
    """Of each row's token, and of its `num_top` most likely ids, ordered by (logprob descending, id ascending).

    rows float32 [tokens, vocabulary]; a smaller vocabulary than num_top gives as many alternatives as there are.
    """
    num_top = min(num_top, rows.shape[1])
    own = np.empty(len(rows), np.float32)
    top_ids = np.empty((len(rows), num_top), np.int32)
    top = np.empty((len(rows), num_top), np.float32)
    for index, token in enumerate(token_ids):
        logprobs = log_softmax(rows[index])
        own[index] = logprobs[token]
        top_ids[index] = _highest(logprobs, num_top)
        top[index] = logprobs[top_ids[index]]
    return TokenLogprobs(own=own, num_top=num_top, top_ids=top_ids, top=top)


def _highest(values: FloatArray, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if count == 0:
        return np.empty(0, np.int64)
    # A partition finds the candidates, ties at its edge included; only those are sorted.
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]
