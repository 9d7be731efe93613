"""Batches of items, cut into groups that a medium takes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def groups(items: Iterable[T], size_of: Callable[[T], int], *, max_bytes: int, max_items: int) -> Iterator[list[T]]:
    """Groups of at most so many bytes and items, in order; an item that is larger is a group of its own."""
    group: list[T] = []
    num_bytes = 0
    for item in items:
        size = size_of(item)
        if group and (num_bytes + size > max_bytes or len(group) == max_items):
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size
    if group:
        yield group
