"""The sampler's noise, version 1: a counter-based generator, so that any id's noise can be had without the others'.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    key       (seed & 0xffffffff, seed >> 32)            the request's 64-bit seed
    counter   (token_id >> 2, position, 0, 0)            position: index of the sampled token in prompt + output
    lane      token_id & 3                               which of the four 32-bit results
    u         (x + 0.5) * 2^-32                          in float64, where it is exact: never 0, never 1
    gumbel    -log(-log(u))                              in float64

A sampler elsewhere (a GPU kernel) implements exactly this, or announces another sampler version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Lanes(NamedTuple):
    """The four results of a counter."""

    x0: UintArray
    x1: UintArray
    x2: UintArray
    x3: UintArray


class NoiseKey(NamedTuple):
    """Key of the noise of one row: seed in [0, 2^64), position in [0, 2^32), token ids int64."""

    seed: int
    position: int
    token_ids: npt.NDArray[np.int64]


def philox4x32(counters: tuple[UintArray, UintArray, UintArray, UintArray], key: tuple[UintArray, UintArray]) -> Lanes:
    """The four 32-bit results of each counter under its key, as uint64 arrays; counters and keys have one shape."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = (product1 >> _SHIFT) ^ c1 ^ k0
        c2 = (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return Lanes(c0, c1, c2, c3)


def random_bits(keys: Sequence[NoiseKey]) -> list[UintArray]:
    """32 random bits of each token id of each key, as uint64: integers, so that rows cannot influence each other."""
    parts = [_quads(key.token_ids.astype(np.uint64)) for key in keys]
    sizes = [len(quads) for quads, _ in parts]
    seeds = np.repeat(np.array([key.seed for key in keys], np.uint64), sizes)
    positions = np.repeat(np.array([key.position for key in keys], np.uint64), sizes)
    zeros = np.zeros_like(positions)
    quads = np.concatenate([quads for quads, _ in parts])
    lanes = np.stack(philox4x32((quads, positions, zeros, zeros), (seeds & _LOW, seeds >> _SHIFT)), axis=1)
    bits, first = [], 0
    for key, (_, index), size in zip(keys, parts, sizes, strict=True):
        bits.append(lanes[first + index, key.token_ids & 3])
        first += size
    return bits


def gumbel_noise(keys: Sequence[NoiseKey]) -> list[npt.NDArray[np.float64]]:
    """Standard Gumbel noise of each token id of each key: finite, and independent of the other ids and keys."""
    return [-np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32)) for bits in random_bits(keys)]


def _quads(ids: UintArray) -> tuple[UintArray, npt.NDArray[np.int64]]:
    """Counters of the ids, and the index of each id's counter: neighbours of one quad share it."""
    quads = ids >> np.uint64(2)
    is_new = np.ones(len(quads), np.bool_)
    is_new[1:] = quads[1:] != quads[:-1]
    return quads[is_new], np.cumsum(is_new) - 1
