"""Filters of the ids that may be sampled: top-k, top-p and min-p over scaled logits.

All three rank ids by (score descending, id ascending): equal scores are decided by the lower id, never by the order in
which a sort happened to leave them. An id with score -inf is never kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def kept_ids(scores: Scores, *, top_k: int, top_p: float, min_p: float) -> Ids:
    """Ids that pass all three filters, ascending; at least the first in rank if any score is above -inf.

    scores float64 [vocabulary], maximum 0. The filters apply in the order top-k, top-p, min-p, each to what the one
    before left: top_k keeps the first k in rank (0 = all); top_p the shortest start of the ranking whose share of the
    probability reaches top_p; min_p what has at least min_p times the probability of the first.
    """
    finite = np.flatnonzero(scores > -np.inf)
    if 0 < top_k < len(finite):
        finite = _first_in_rank(scores, finite, top_k)
    if top_p < 1.0:
        ranked = _ranked(scores, finite)
        weights = np.exp(scores[ranked])
        before = np.cumsum(weights) - weights
        # The first is kept whatever rounding does to a tiny top_p.
        is_kept = before < top_p * weights.sum()
        is_kept[:1] = True
        finite = np.sort(ranked[is_kept])
    if min_p > 0.0:
        # Shares of the largest probability are exp of the distance to the maximum, which is 0.
        finite = finite[np.exp(scores[finite] - scores[finite].max(initial=-np.inf)) >= min_p]
    return finite


def _first_in_rank(scores: Scores, ids: Ids, count: int) -> Ids:
    """The `count` first of ids (ascending) in rank, ascending: O(n) where a sort would be O(n log n)."""
    values = scores[ids]
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = ids[values > threshold], ids[values == threshold]
    return np.sort(np.concatenate((above, equal[: count - len(above)])))


def _ranked(scores: Scores, ids: Ids) -> Ids:
    # Stable: ids come ascending, and equal scores stay so.
    return ids[np.argsort(-scores[ids], kind="stable")]
