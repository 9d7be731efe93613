"""Text of others, made safe for a terminal: what would move the cursor, recolour, retitle, erase or forge is shown."""

from __future__ import annotations

import re

# C0 and C1 controls but tab and newline, DEL, line and paragraph separators, what reverses the direction of text (so
# that it reads as something else), and lone surrogates, which cannot be written at all.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINE = re.compile(f"[\n]|{_UNSAFE.pattern}")


def escape_controls(text: str, *, is_line: bool = False) -> str:
    """`text` with each such character as \\xNN or \\uNNNN; newlines stay, unless it is to be one line."""
    return (_UNSAFE_IN_LINE if is_line else _UNSAFE).sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
