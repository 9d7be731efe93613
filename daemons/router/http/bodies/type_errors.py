"""Errors of msgspec's decoders as sentences for the client: the value that came, and what to send instead."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

_WRONG_TYPE = re.compile(r"Expected `([\w| ]+)`, got `(\w+)`")
_BOUND = re.compile(r"Expected `(?:int|float)` (>=|<=) (-?[\d.e+]+)")
_LENGTH = re.compile(r"Expected `(str|array)` of length <= (\d+)")
_PATTERN = re.compile(r"Expected `str` matching regex (.+?)(?: - at|$)")
_LOCATION = re.compile(r" - at `\$(.*)`$")
_GOT = {"str": "a text", "bool": "true or false", "array": "a list", "object": "an object", "null": "null"}
_GOT |= {"int": "a number", "float": "a number with a fraction"}
_WANTED = {**_GOT, "int": "a whole number", "float": "a number"}


def in_words(where: str, error: str, kind: object) -> str:
    """where: the field. error: the decoder's message. kind: the type that it decodes."""
    location = _LOCATION.search(error)
    # `[0].name` is written 0.name, and `[...]`, any value of an object, is left out.
    inner = re.sub(r"\[(\d+)\]", r".\1", location[1]).replace("[...]", "") if location else ""
    name = f"{where}{inner}"
    if found := _WRONG_TYPE.search(error):
        wanted = [_WANTED.get(each, each) for each in found[1].split(" | ") if each != "null"]
        return f"{name} is {_GOT.get(found[2], found[2])}: send {' or '.join(wanted)}"
    if found := _BOUND.search(error):
        if found[1] == ">=":
            return f"{name} is below {found[2]}: send a whole number from there on"
        return f"{name} is too large: send at most {found[2]}"
    if found := _LENGTH.search(error):
        return f"{name} is too long: send at most {found[2]} {'characters' if found[1] == 'str' else 'entries'}"
    if found := _PATTERN.search(error):
        return f"{name} has characters or a length that it may not have: send a text that matches {found[1]}"
    choices = list(_choices(kind))
    if "enum value" in error and choices:
        return f"{name} is none of its values: send {' or '.join(choices)}"
    if "out of range" in error:
        return f"{name} is beyond all numbers here: send one of 64 bits"
    return f"{name}: {error}"


def _choices(kind: object) -> Iterator[str]:
    """The texts that a type lists, also inside of a union."""
    for each in typing.get_args(kind):
        if isinstance(each, str):
            yield each
        else:
            yield from _choices(each)
