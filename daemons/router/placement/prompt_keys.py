"""Keys of the prefixes of a prompt: equal for equal prefixes, and nearly never otherwise."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

BLOCK = 32
"""Tokens a key: a prefix counts in whole blocks."""
_MAX_NAMESPACES = 4096


class PromptKeys:
    """Multilinear hashing: a prefix's sum is that of its namespace plus id x weight of every position, modulo 2^64.

    The weights are random and secret to this process, so that nobody who does not see them can make prompts collide
    (D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2012). A collision sends a request to the
    wrong replica; it changes no token.
    """

    def __init__(self, seed: int | None = None) -> None:
        """seed: for tests and benchmarks; a secret one by default."""
        self._random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self._secret = self._random.bytes(16)
        self._weights = self._random.integers(0, 1 << 64, size=4096, dtype=np.uint64)
        self._namespaces: OrderedDict[tuple[str, int], int] = OrderedDict()

    def root(self, namespace: str, weights_version: int) -> int:
        """The sum of the empty prefix."""
        name = (namespace, weights_version)
        known = self._namespaces.get(name)
        if known is None:
            text = f"{weights_version}/{namespace}".encode()
            known = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._secret).digest(), "little")
            self._namespaces[name] = known
            if len(self._namespaces) > _MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
        return known

    def sums(self, ids: bytes, start: int, before: int) -> UInt64Array:
        """Sums of the prefixes that end behind each of `ids` (i32 array), the first of which is at position `start`.

        before: the sum of the prefix of `start` tokens. Returns one u64 a token.
        """
        values = np.frombuffer(ids, dtype="<i4").astype(np.uint64)
        end = start + len(values)
        if end > len(self._weights):
            self._grow(end)
        values += np.uint64(1)  # A token 0 counts as well: prefixes that differ by it alone have other sums.
        values *= self._weights[start:end]
        values.cumsum(out=values)
        values += np.uint64(before)
        return values

    def of_prompt(self, ids: bytes, root: int) -> list[int]:
        """Keys of the prompt's prefixes of 1, 2, ... whole blocks."""
        keys: list[int] = self.sums(ids, 0, root)[BLOCK - 1 :: BLOCK].tolist()
        return keys

    def _grow(self, size: int) -> None:
        more = self._random.integers(0, 1 << 64, size=max(size, 2 * len(self._weights)), dtype=np.uint64)
        more[: len(self._weights)] = self._weights
        self._weights = more


def block_ends(start: int, num: int) -> slice:
    """The tokens of start ... start + num - 1 that end a block, as a slice."""
    return slice((-start - 1) % BLOCK, num, BLOCK)
