"""The sampler's noise, version 1: a counter-based generator, so that any id's noise can be had without the others'.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    key       (seed & 0xffffffff, seed >> 32)            the request's 64-bit seed
    counter   (token_id >> 2, position, 0, 0)            position: index of the drawn token in prompt + output
    lane      token_id & 3                               which of the four 32-bit results
    u         (x + 0.5) * 2^-32                          in float64, where it is exact: never 0, never 1
    gumbel    -log(-log(u))                              in float64

Whoever draws elsewhere (a GPU kernel) implements exactly this, or announces another sampler version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UintArray = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MASK32 = 0xFFFFFFFF


def philox4x32(counters: tuple[UintArray, UintArray, UintArray, UintArray], key: tuple[int, int]) -> list[UintArray]:
    """The four 32-bit results of each counter, as uint64 arrays of the counters' common shape."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return [c0, c1, c2, c3]


def random_bits(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> UintArray:
    """32 random bits of each token id, uint64 [ids]; seed in [0, 2^64), position in [0, 2^32)."""
    ids = token_ids.astype(np.uint64)
    # The ids of one quad share a counter: where all ids of a range are wanted, it is computed once.
    quads, index = _quads(ids >> np.uint64(2))
    zeros = np.zeros_like(quads)
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    lanes = np.stack(philox4x32((quads, np.full_like(quads, position), zeros, zeros), key), axis=1)
    bits: UintArray = lanes[index, (ids & np.uint64(3)).astype(np.int64)]
    return bits


def gumbel_noise(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise of each token id, float64 [ids]: finite, and the same whichever other ids are asked for."""
    uniform = (random_bits(seed, position, token_ids).astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _quads(quads: UintArray) -> tuple[UintArray, npt.NDArray[np.int64]]:
    if len(quads) and np.all(quads[1:] >= quads[:-1]):
        is_new = np.concatenate(([True], quads[1:] != quads[:-1]))
        return quads[is_new], np.cumsum(is_new) - 1
    return quads, np.arange(len(quads))
