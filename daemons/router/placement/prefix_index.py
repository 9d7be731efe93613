"""The prefixes that replicas hold, as one table for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.router.placement.prompt_keys import BLOCK


class PrefixIndex:
    """Key of a prefix -> the set of replicas that hold it, a bit each. A replica holds all shorter ones, too."""

    def __init__(self) -> None:
        self._sets: dict[int, int] = {}
        # One object for each set of replicas there is: a set of its own for each key would double the table's memory.
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def add(self, replica: int, keys: Iterable[int]) -> list[int]:
        """The replica (>= 0) holds these prefixes. Returns those that it held before."""
        sets, shared, bit = self._sets, self._shared, 1 << replica
        known: list[int] = []
        for key in keys:
            before = sets.get(key, 0)
            if before & bit:
                known.append(key)
                continue
            held = before | bit
            sets[key] = shared.setdefault(held, held)
        if len(shared) > 65_536:
            self._shared = {}
        return known

    def remove(self, replica: int, keys: Iterable[int]) -> None:
        """The replica holds these prefixes no more. Keys that it never held are ignored."""
        sets, shared, others = self._sets, self._shared, ~(1 << replica)
        for key in keys:
            held = sets.get(key, 0) & others
            if held:
                sets[key] = shared.setdefault(held, held)
            else:
                sets.pop(key, None)

    def match(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(replicas as a set of bits, tokens that each of them holds of the prompt), for all that hold some.

        keys: of the prompt's prefixes, in ascending length. Sets shrink along them, so few of them are looked up.
        """
        if not keys:
            return []
        get = self._sets.get
        first = get(keys[0], 0)
        if not first:
            return []
        found: list[tuple[int, int]] = []
        # (low, its set, high, its set): prefixes of low and high blocks; those of len(keys) + 1 blocks nobody holds.
        spans = [(1, first, len(keys) + 1, 0)]
        while spans:
            low, low_set, high, high_set = spans.pop()
            if low_set == high_set:
                continue
            if high == low + 1:
                found.append((low_set & ~high_set, low * BLOCK))
                continue
            middle = (low + high) // 2
            middle_set = get(keys[middle - 1], 0) & low_set
            spans.append((low, low_set, middle, middle_set))
            spans.append((middle, middle_set, high, high_set))
        return found


def matched_tokens(found: Sequence[tuple[int, int]], num_replicas: int) -> npt.NDArray[np.int64]:
    """Tokens held by replica, an array of num_replicas, from what PrefixIndex.match() found."""
    tokens = np.zeros(num_replicas, dtype=np.int64)
    for replicas, num_tokens in found:
        if replicas.bit_count() <= 8:
            while replicas:
                lowest = replicas & -replicas
                index = lowest.bit_length() - 1
                if index < num_replicas:
                    tokens[index] = num_tokens
                replicas ^= lowest
            continue
        packed = np.frombuffer(replicas.to_bytes((replicas.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[:num_replicas]
        tokens[: len(bits)][bits.astype(bool)] = num_tokens
    return tokens
