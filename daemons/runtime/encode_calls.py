"""Bounds of an EncodeEach stream, which routers keep and tokenizers hold them to."""

from __future__ import annotations

# Of one call: a longer text takes longer to encode than a call of its own takes to open.
MAX_CALL_BYTES = 16 << 10
# Calls of a stream that are not answered yet.
MAX_CALLS = 64
