"""JSON as bytes, for what is written once per event."""

from __future__ import annotations

import json


def dump(value: object) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinities, which are no JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def split_at(value: object, mark: str) -> tuple[bytes, bytes]:
    """Compact JSON of value around the text `mark`, which occurs in it once: write any JSON between the two."""
    before, found, after = dump(value).partition(dump(mark))
    assert found, f"{mark!r} is not in the value"
    return before, after
