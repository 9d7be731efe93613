"""The best hit rate that any prefix cache could have on a workload, and how much cache that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixmesh.cli.bench.workloads import VOCAB_SIZE, IntArray, Turn

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Oracle(NamedTuple):
    """hit_rate: share of prompt tokens that an infinite cache holds when turns are served one at a time, in the order
    of the list. working_set_tokens: what that cache holds in the end. longest: tokens of the longest sequence."""

    hit_rate: float
    working_set_tokens: int
    longest: int
    prompt_tokens: int
    output_tokens: int


def oracle_of(turns: Sequence[Turn]) -> Oracle:
    """Serves every turn in mind, with made-up outputs that differ from turn to turn.

    A prompt's last token is always computed (its logits are needed), and the last sampled token is never written. A
    prefix stands for itself by a 64-bit hash of its tokens and length; that a prefix is known implies that all shorter
    ones are, so the longest known one is found by bisection.
    """
    known: set[int] = set()
    sequences: list[IntArray] = []
    num_hit = num_total = longest = 0
    for index, turn in enumerate(turns):
        prompt = prompt_of(turn, sequences)
        sequence = np.concatenate([prompt, made_up_output(index, turn.out_len)])
        prefixes = _prefix_hashes(sequence).tolist()
        match = _longest_known(prefixes, known)
        num_hit += min(match, len(prompt) - 1)
        num_total += len(prompt)
        known.update(prefixes[match:-1])
        sequences.append(sequence)
        longest = max(longest, len(sequence))
    return Oracle(num_hit / num_total, len(known), longest, num_total, sum(turn.out_len for turn in turns))


def prompt_of(turn: Turn, sequences: Sequence[IntArray]) -> IntArray:
    """A turn's prompt; sequences[i] is prompt and output of turn i."""
    return turn.new_ids if turn.parent is None else np.concatenate([sequences[turn.parent], turn.new_ids])


def made_up_output(index: int, num: int) -> IntArray:
    """Output of turn `index` in the oracle's mind."""
    ids = (np.arange(num, dtype=np.int64) * 7919 + index * 104_729 + 13) % (VOCAB_SIZE - 10) + 10
    return ids.astype(np.int32)


def _prefix_hashes(ids: IntArray) -> npt.NDArray[np.uint64]:
    """Of every prefix, one value."""
    z = (ids.astype(np.uint64) << np.uint64(32)) | np.arange(len(ids), dtype=np.uint64)
    z = (z ^ (z >> np.uint64(29))) * _MIX
    z = (z ^ (z >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.cumsum(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def _longest_known(prefixes: list[int], known: set[int]) -> int:
    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high) // 2
        if prefixes[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
