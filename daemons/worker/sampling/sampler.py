"""The sampler, version 1: one token from each row of logits.

Order: repetition, frequency, presence penalty, logit bias, suppressed ids (`penalties.py`); then greedy takes the
lowest id of the highest value, without noise; else temperature, top-k, top-p, min-p (`filters.py`), and of what is
kept the id with the largest score + Gumbel noise (`philox.py`), the lowest id of equal ones. By the Gumbel-max trick
(Gumbel 1954; Maddison et al. 2014) that samples from the softmax of the kept scores.

A row's result never depends on another row, and noise belongs to ids: removing ids changes no other id's chance to win.

Broken logits: NaN counts as -inf. With +inf in the row only the ids at +inf are candidates. Where nothing is above
-inf, the lowest id that is not suppressed is taken (0 if all are): a defined token, since a row cannot refuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.sampling.filters import kept_ids
from radixmesh.daemons.worker.sampling.penalties import adjust_logits
from radixmesh.daemons.worker.sampling.philox import NoiseKey, gumbel_noise


def sample_tokens(rows: FloatArray, inputs: Sequence[SampleInput]) -> list[int]:
    """The token of each row of logits, float32 [rows, vocabulary]; nothing is modified.

    Rows come together only so that their noise is computed in one go. A sampling without seed takes seed 0.
    """
    tokens: list[int] = []
    keys: list[NoiseKey] = []
    waiting: list[tuple[int, npt.NDArray[np.float64]]] = []
    for logits, sample in zip(rows, inputs, strict=True):
        row = adjust_logits(logits, sample.sampling, sample.prompt_ids, sample.output_ids, sample.suppressed_ids)
        if row.max() == -np.inf:
            tokens.append(_lowest_allowed(len(row), sample.suppressed_ids))
        elif sample.sampling.is_greedy:
            tokens.append(int(np.argmax(row)))
        else:
            ids, scores = candidates(row, sample.sampling)
            keys.append(NoiseKey(sample.sampling.seed or 0, sample.position, ids))
            waiting.append((len(tokens), scores))
            tokens.append(-1)
    if keys:
        for (index, scores), key, noise in zip(waiting, keys, gumbel_noise(keys), strict=True):
            tokens[index] = int(key.token_ids[np.argmax(scores + noise)])
    return tokens


def candidates(row: FloatArray, sampling: Sampling) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids that may be sampled, ascending, and their scores (adjusted logits over temperature, the maximum 0), float64.

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
