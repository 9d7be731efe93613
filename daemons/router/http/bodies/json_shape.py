"""Counts of a JSON text's structure, taken from its bytes: no value becomes an object before its number is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

Bytes = bytes | bytearray | memoryview | msgspec.Raw

BLOCK_BYTES = 1 << 18
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_IS_OPENING, _IS_CLOSING, _IS_COMMA = (np.zeros(256, np.bool_) for _ in range(3))
_IS_OPENING[list(b"[{")] = _IS_CLOSING[list(b"]}")] = _IS_COMMA[list(b",")] = True
_IS_STRUCTURE = _IS_OPENING | _IS_CLOSING | _IS_COMMA


class Shape(NamedTuple):
    """depth: of the deepest array or object. num_entries: of the outermost one, 1 for an empty one. num_values: at
    least the number of scalars, arrays and objects."""

    depth: int
    num_entries: int
    num_values: int


def bound_of_values(data: Bytes) -> int:
    """No fewer values than are in the text, by one pass that takes texts for structure: cheap, and enough for most."""
    num = 1
    with memoryview(data) as view:
        for start in range(0, len(view), BLOCK_BYTES):
            block = bytes(view[start : start + BLOCK_BYTES])
            num += block.count(b",") + block.count(b"[") + block.count(b"{")
    return num


def shape_of(data: Bytes) -> Shape:
    """Exact for valid JSON, some numbers for any other bytes. Memory: some blocks, whatever the size."""
    depth = deepest = 0
    num_entries = num_values = 1
    for chars in _structure(data):
        opens, closes = _IS_OPENING[chars], _IS_CLOSING[chars]
        depths = depth + np.cumsum(opens.astype(np.int32) - closes)
        commas = _IS_COMMA[chars]
        deepest = max(deepest, int(depths.max()))
        num_entries += int(np.count_nonzero(commas & (depths == 1)))
        num_values += int(np.count_nonzero(commas)) + int(np.count_nonzero(opens))
        depth = int(depths[-1])
    return Shape(deepest, num_entries, num_values)


def _structure(data: Bytes) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Brackets, braces and commas outside of strings, block by block; no block is empty."""
    whole = np.frombuffer(data, np.uint8)
    is_in_string = is_escaped = False
    for start in range(0, len(whole), BLOCK_BYTES):
        block = whole[start : start + BLOCK_BYTES]
        quotes = block == _QUOTE
        if is_escaped or (block == _BACKSLASH).any():
            escaped, is_escaped = _escaped(block, is_escaped)
            quotes &= ~escaped
        # Odd behind an opening quote, even behind a closing one.
        in_string = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(np.bool_) ^ is_in_string
        is_in_string = bool(in_string[-1])
        found = block[_IS_STRUCTURE[block] & ~in_string]
        if len(found):
            yield found


def _escaped(
    block: np.ndarray[tuple[int], np.dtype[np.uint8]], is_first_escaped: bool
) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], bool]:
    """The bytes that a backslash escapes, and True if it escapes the next block's first byte."""
    num = len(block)
    is_plain = block != _BACKSLASH
    # Per byte the index of the last byte before it that is no backslash: the run between has that many.
    indexes = np.where(is_plain, np.arange(num), -1)
    last_plain = np.maximum.accumulate(indexes)
    before = np.concatenate(([-1], last_plain[:-1]))
    runs = np.arange(num) - 1 - before
    # A run that reaches back to the block's start goes on from the block before it.
    if is_first_escaped:
        runs[before == -1] += 1
    trailing = num - 1 - int(last_plain[-1]) + (is_first_escaped and int(last_plain[-1]) == -1)
    return runs % 2 == 1, trailing % 2 == 1
