"""JSON as bytes, for what is written once per event."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

dump: Callable[[object], bytes] = msgspec.json.Encoder().encode
"""Compact JSON of plain Python values; NaN and infinities, which JSON lacks, are null."""


def split_at(value: object, mark: str) -> tuple[bytes, bytes]:
    """Compact JSON of value around the text `mark`, which occurs in it once: write any JSON between the two."""
    before, found, after = dump(value).partition(dump(mark))
    assert found, f"{mark!r} is not in the value"
    return before, after
