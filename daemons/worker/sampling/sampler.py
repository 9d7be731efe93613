"""The sampler, version 1: one token from one row of logits.

Order: repetition, frequency, presence penalty, logit bias, suppressed ids (`penalties.py`); then greedy takes the
lowest id of the highest value and draws nothing; else temperature, top-k, top-p, min-p (`filters.py`), and of what is
kept the id with the largest score + Gumbel noise (`philox.py`), the lowest id of equal ones. By the Gumbel-max trick
(Gumbel 1954; Maddison et al. 2014) that draws from the softmax of the kept scores.

A row's result never depends on another row, and noise belongs to ids: removing ids changes no other id's chance to win.

Broken logits: NaN counts as -inf. With +inf in the row only the ids at +inf are candidates. Where nothing is above
-inf, the lowest id that is not suppressed is taken (0 if all are): a defined token, since a row cannot refuse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.sampling import Sampling

from .filters import kept_ids
from .penalties import adjust_logits
from .philox import gumbel_noise


def sample_token(
    logits: FloatArray,
    sampling: Sampling,
    *,
    position: int,
    prompt_ids: IntArray,
    output_ids: IntArray,
    suppressed_ids: IntArray,
) -> int:
    """The token at `position` (index in prompt + output). logits float32 [vocabulary]; not modified.

    A sampling without seed draws with seed 0.
    """
    row = adjust_logits(logits, sampling, prompt_ids, output_ids, suppressed_ids)
    highest = row.max()
    if highest == -np.inf:
        return _lowest_allowed(len(row), suppressed_ids)
    if sampling.is_greedy:
        return int(np.argmax(row))
    ids, scores = candidates(row, sampling)
    noise = gumbel_noise(sampling.seed or 0, position, ids)
    return int(ids[np.argmax(scores + noise)])


def candidates(row: FloatArray, sampling: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids that may be drawn, ascending, and their scores (adjusted logits over temperature, the maximum 0), float64.

    The row is adjusted, has no NaN and a value above -inf. Distances to the maximum are taken before the division, so
    that no temperature, however small, overflows.
    """
    highest = row.max()
    if highest == np.inf:
        scores = np.where(row == np.inf, 0.0, -np.inf)
    else:
        scores = (row.astype(np.float64) - np.float64(highest)) / sampling.temperature
    ids = kept_ids(scores, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
    return ids, scores[ids]


def _lowest_allowed(vocab_size: int, suppressed_ids: IntArray) -> int:
    allowed = np.ones(vocab_size, np.bool_)
    allowed[suppressed_ids[(suppressed_ids >= 0) & (suppressed_ids < vocab_size)]] = False
    return int(np.argmax(allowed))
