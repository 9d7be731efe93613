"""Made-up tokens: pure functions of a hash of everything before them.

The KV of position p is h_p = h_(p-1) + mix(token_p, p) modulo 2^64, so it stands for the whole prefix. The token after
position p is a function of h_p, of the KV of four positions up to p that h_p picks, of the seed where temperature > 0,
and of p + 1. A page that was lost, overwritten, swapped or read at a wrong offset changes what follows: at once where
it is the last one, else as soon as a token picks it.
mix is SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.plans.slots.slot_table import BoolArray

HashArray = npt.NDArray[np.uint64]

EMPTY_PREFIX = np.uint64(0x243F6A8885A308D3)
"""h before position 0."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_PICKS = np.arange(1, 5, dtype=np.uint64)
_RATE_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Alphabet:
    """Ids that are sampled: int32 `ordinary` (not empty), and of `eos_ids` (may be empty) the share `eos_rate`."""

    ordinary: IntArray
    eos_ids: IntArray
    eos_rate: float = 0.0

    @classmethod
    def of(
        cls, vocab_size: int, *, special_ids: Sequence[int] = (), eos_ids: Sequence[int] = (), eos_rate: float = 0.0
    ) -> Alphabet:
        """All ids below `vocab_size` but special and EOS ones; all of them if that leaves none."""
        if not 0.0 <= eos_rate <= 1.0:
            raise ValueError(f"the EOS rate is a probability in [0, 1], not {eos_rate}")
        ordinary = np.setdiff1d(np.arange(vocab_size), np.array([*special_ids, *eos_ids], np.int64))
        if len(ordinary) == 0:
            ordinary = np.arange(vocab_size)
        inside = [i for i in eos_ids if 0 <= i < vocab_size]
        return cls(ordinary=ordinary.astype(np.int32), eos_ids=np.array(inside, np.int32), eos_rate=eos_rate)

    def sample(self, noise: HashArray) -> IntArray:
        """One id per noise value."""
        tokens: IntArray = self.ordinary[noise % np.uint64(len(self.ordinary))]
        if self.eos_rate > 0.0 and len(self.eos_ids):
            second = mix(noise)
            is_eos = (second >> np.uint64(11)) * _RATE_UNIT < self.eos_rate
            tokens = np.where(is_eos, self.eos_ids[second % np.uint64(len(self.eos_ids))], tokens)
        return tokens

    def sample_unsuppressed(self, noise: int, suppressed: frozenset[int]) -> int:
        """As sample() for one value, but for ids in `suppressed`: the next ordinary one that is free comes instead."""
        token = int(self.sample(np.array([noise], np.uint64))[0])
        if token not in suppressed:
            return token
        size = len(self.ordinary)
        for step in range(size):
            token = int(self.ordinary[(noise + step) % size])
            if token not in suppressed:
                return token
        return token


def mix(values: HashArray) -> HashArray:
    """SplitMix64's finaliser, elementwise."""
    z = values + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: HashArray = z ^ (z >> np.uint64(31))
    return mixed


def token_hashes(ids: IntArray, positions: IntArray) -> HashArray:
    """mix(token, position), to be summed up."""
    return mix((ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64))


def witness_positions(prefix: HashArray, positions: IntArray) -> IntArray:
    """Positions [4, rows], each <= its row's own, whose KV the token after `positions` reads beside `prefix`."""
    picks = mix(prefix[None, :] ^ _PICKS[:, None])
    return (picks % (positions.astype(np.uint64) + np.uint64(1))).astype(np.int32)


def noise_of(
    prefix: HashArray, witnesses: HashArray, seeds: HashArray, is_sampled: BoolArray, positions: IntArray
) -> HashArray:
    """The noise that the tokens at `positions` are sampled from. witnesses: [4, rows]. Greedy rows ignore the seed."""
    witness = mix(witnesses + _PICKS[:, None]).sum(axis=0, dtype=np.uint64)
    keys = np.where(is_sampled, mix(seeds ^ _GAMMA), np.uint64(0))
    return mix(prefix ^ mix(witness + positions.astype(np.uint64)) ^ keys)


def simulated_continuation(
    ids: Sequence[int],
    num_tokens: int,
    *,
    alphabet: Alphabet,
    temperature: float = 0.0,
    seed: int = 0,
    suppressed_ids: Sequence[int] = (),
    num_suppressed: int = 0,
) -> list[int]:
    """Continuation of `ids` (prompt, then output so far) that a simulated worker must give: the oracle of tests.

    The first `num_suppressed` tokens are sampled outside `suppressed_ids`.
    """
    tokens = list(ids)
    contents = (
        np.cumsum(token_hashes(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32))) + EMPTY_PREFIX
    )
    kv = [int(value) for value in contents]
    suppressed = frozenset(suppressed_ids)
    for step in range(num_tokens):
        last = np.array([len(tokens) - 1], np.int32)
        prefix = np.array([kv[-1]], np.uint64)
        witness = np.array([[kv[at]] for at in witness_positions(prefix, last)[:, 0].tolist()], np.uint64)
        seeds, is_sampled = np.array([seed], np.uint64), np.array([temperature > 0.0])
        noise = noise_of(prefix, witness, seeds, is_sampled, last + 1)
        is_suppressed = step < num_suppressed
        token = alphabet.sample_unsuppressed(int(noise[0]), suppressed if is_suppressed else frozenset())
        kv.append(int((prefix + token_hashes(np.array([token], np.int32), last + 1))[0]))
        tokens.append(token)
    return tokens[len(ids) :]
