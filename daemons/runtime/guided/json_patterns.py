r"""Patterns of JSON schemas as expressions over the text of a JSON string.

xgrammar takes a pattern for the string's text as it stands in JSON: a quote of the pattern would end the string. Here
such characters become their escapes (`"` -> `\"`). Character classes need nothing: the library leaves quotes,
backslashes and control characters out of them. It matches whole strings and skips anchors, so an anchor may only stand
where it says nothing new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPES = {'"': r"\\\"", "\\": r"\\\\", "\n": r"\\n", "\r": r"\\r", "\t": r"\\t", "\f": r"\\f", "\b": r"\\b"}
# White space beyond ASCII, which the library's \\S takes.
_SPACES = "\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
# An escape, a class, the head of a group, or one character.
_PARTS = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?(?:[:=!>]|<[=!]|P?<[A-Za-z_]\w*>)|.",
    re.DOTALL,
)
_QUANTIFIER = re.compile(r"[*+?]|\{\d*,?\d*\}")


def json_pattern(pattern: str) -> str:
    """Raises ValueError for what the library would take for something else."""
    parts = _PARTS.findall(pattern)
    _check_anchors(parts)
    return "".join(_rewritten(parts))


def is_quickly_matched(pattern: str) -> bool:
    """True without groups and with one repetition at most: `re` takes a time that grows with the square of the text."""
    parts = _PARTS.findall(pattern)
    return sum(part in "*+?{" for part in parts) <= 1 and not any(part.startswith("(") for part in parts)


def other_names(names: list[str]) -> str:
    """An expression for every non-empty name but these, written without escapes."""
    branches = _others(sorted({name for name in names if name}))
    return f"^({'|'.join(branches)})$"


def _rewritten(parts: list[str]) -> Iterator[str]:
    for part in parts:
        if part.startswith("["):
            yield _class(part)
            continue
        if part in "^$":
            continue
        if part.startswith("(?") and part != "(?:":
            if "<" not in part or part[2:4] in ("<=", "<!"):
                raise ValueError(f"the group {part!r}: use (...) or (?:...)")
            yield "("
            continue
        character = _character(part)
        if part == r"\S":
            yield rf"[^\s{_SPACES}]"
        elif character is None:
            yield part
        elif character in _ESCAPES:
            yield f"(?:{_ESCAPES[character]})"
        elif ord(character) < 0x20:
            yield f"(?:\\\\u{ord(character):04x})"
        else:
            yield part


def _character(part: str) -> str | None:
    """The one character that a part stands for; None for classes, operators and anchors."""
    if part[0] != "\\":
        return part if part == '"' or part < " " else None
    letter = part[1]
    if letter in "xu":
        if len(part) == 2:
            raise ValueError(f"the escape {part!r} without digits")
        return chr(int(part[2:], 16))
    if letter in "dDwWsS":
        return None
    if letter in _LETTERS:
        return _LETTERS[letter]
    if letter.isalnum():
        raise ValueError(f"the escape {part!r}")
    return letter if letter in '"\\' else None


def _class(part: str) -> str:
    """With the brackets in it escaped: the library knows names of classes like [:alpha:]."""
    head = 2 if part.startswith("[^") else 1
    # The library takes the quotes themselves where nothing else is left.
    if not part[head:-1] or (head == 1 and not _has_plain(part[1:-1])):
        raise ValueError(f"the character class {part[:40]!r}")
    if r"\S" in part or (head == 1 and (r"\D" in part or r"\W" in part)):
        raise ValueError(f"the character class {part[:40]!r}")
    spaces = _SPACES if head == 2 and r"\s" in part else ""
    return (
        part[:head]
        + spaces
        + re.sub(r"(\\.)|\[", lambda found: found[1] or "\\[", part[head:-1], flags=re.DOTALL)
        + "]"
    )


def _has_plain(members: str) -> bool:
    """True if a character of a class stands for itself in a JSON string. "-" between two others does not count."""
    if members[0] == "-" or members[-1] == "-":
        return True
    characters = (_character(member) for member in _PARTS.findall(members.replace("[", "\\[")) if member != "-")
    return any(character is None or (character >= " " and character not in _ESCAPES) for character in characters)


def _check_anchors(parts: list[str]) -> None:
    """`^` may have nothing before it that takes a character, `$` nothing behind it. One pass each way: routers check
    patterns of clients on their event loop."""
    repeated = _repeated(parts)
    size = len(parts)
    for anchor, opening, closing, order in (("^", "(", ")", range(size)), ("$", ")", "(", range(size - 1, -1, -1))):
        is_edge, around = True, [True]
        for index in order:
            part = parts[index]
            if part.startswith(opening):
                is_edge = is_edge and index not in repeated
                around.append(is_edge)
            elif part.startswith(closing):
                if len(around) > 1:
                    around.pop()
                is_edge = False
            elif part == "|":
                is_edge = around[-1]
            elif part not in "^$":
                is_edge = False
            elif index in repeated:
                raise ValueError(f"{part!r} repeated")
            elif part == anchor and not is_edge:
                raise ValueError(f"{part!r} within the expression")


def _repeated(parts: list[str]) -> set[int]:
    """Indices of anchors and of both parentheses of groups that a quantifier follows."""
    found: set[int] = set()
    open_groups: list[int] = []
    for index, part in enumerate(parts):
        # A quantifier is cut into single characters; bounds have a few digits.
        is_repeated = part in ")^$" and bool(_QUANTIFIER.match("".join(parts[index + 1 : index + 32])))
        opening = open_groups.pop() if part == ")" and open_groups else index
        if part.startswith("("):
            open_groups.append(index)
        elif is_repeated:
            found.update((opening, index))
    return found


def _others(names: list[str]) -> list[str]:
    """Branches for all non-empty texts but these, which share what came before. names: sorted, each once."""
    heads = sorted({name[0] for name in names})
    branches = [_other_heads(heads)]
    for head in heads:
        if not _is_plain(head):
            continue
        rest = [name[1:] for name in names if name.startswith(head)]
        inner = _others([name for name in rest if name])
        if "" not in rest:
            inner.append("")
        branches.append(f"{_literal(head)}({'|'.join(inner)})")
    return branches


def _other_heads(heads: list[str]) -> str:
    """Texts that begin with none of these characters."""
    if all(head.isascii() for head in heads):
        inside = "".join(_in_class(head) for head in heads if _is_plain(head))
        return f"[^{inside}].*" if inside else ".+"
    # The library's complement of a class with characters beyond ASCII takes others for them.
    kept = "".join(
        _in_class(chr(code)) for code in range(0x20, 0x7F) if chr(code) not in heads and _is_plain(chr(code))
    )
    return f"[{kept}].*"


def _is_plain(character: str) -> bool:
    """It stands for itself in a JSON string, and the library follows it in an expression."""
    return " " <= character < "\x7f" and character not in '"\\'


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[" else character


def _literal(character: str) -> str:
    return f"\\{character}" if character in r"\^$.*+?()[]{}|/" else character
