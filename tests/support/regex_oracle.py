"""A naive matcher: expressions as trees, followed by their derivatives, byte by byte (Brzozowski 1964).

Slow and plain: the oracle of what a backend's masks allow. Trees are written out as regular expressions or as EBNF.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from radixmesh.daemons.runtime.guided.backend import (
    GrammarMatcher,
    GuidedVocabulary,
    MaskWords,
)


class Tree:
    """One expression. Equal trees are equal values."""


@dataclass(frozen=True, slots=True)
class Nothing(Tree):
    """No text at all."""


@dataclass(frozen=True, slots=True)
class Bytes(Tree):
    """One text; empty: the end."""

    text: bytes


@dataclass(frozen=True, slots=True)
class OneOf(Tree):
    """One byte of several."""

    values: frozenset[int]


@dataclass(frozen=True, slots=True)
class Then(Tree):
    first: Tree
    second: Tree


@dataclass(frozen=True, slots=True)
class Or(Tree):
    branches: frozenset[Tree]


@dataclass(frozen=True, slots=True)
class Repeat(Tree):
    """most: None = any number."""

    inner: Tree
    least: int
    most: int | None


EMPTY = Bytes(b"")


def then(first: Tree, second: Tree) -> Tree:
    if isinstance(first, Nothing) or isinstance(second, Nothing):
        return Nothing()
    if first == EMPTY:
        return second
    return first if second == EMPTY else Then(first, second)


def either(branches: Iterable[Tree]) -> Tree:
    flat: set[Tree] = set()
    for branch in branches:
        flat |= branch.branches if isinstance(branch, Or) else {branch}
    flat.discard(Nothing())
    if not flat:
        return Nothing()
    return next(iter(flat)) if len(flat) == 1 else Or(frozenset(flat))


@cache
def may_end(tree: Tree) -> bool:
    match tree:
        case Bytes(text):
            return not text
        case Then(first, second):
            return may_end(first) and may_end(second)
        case Or(branches):
            return any(map(may_end, branches))
        case Repeat(inner, least, _):
            return least == 0 or may_end(inner)
    return False


@cache
def derivative(tree: Tree, byte: int) -> Tree:
    """The expression of what may follow this byte."""
    match tree:
        case Bytes(text) if text and text[0] == byte:
            return Bytes(text[1:])
        case OneOf(values) if byte in values:
            return EMPTY
        case Then(first, second):
            after = then(derivative(first, byte), second)
            return either((after, derivative(second, byte))) if may_end(first) else after
        case Or(branches):
            return either(derivative(branch, byte) for branch in branches)
        case Repeat(inner, least, most) if most != 0:
            rest = Repeat(inner, max(0, least - 1), None if most is None else most - 1)
            return then(derivative(inner, byte), EMPTY if rest.most == 0 else rest)
    return Nothing()


def as_regex(tree: Tree) -> str:
    match tree:
        case Bytes(text):
            return "".join(f"\\{c}" if c in "\\^$.*+?()[]{}|/" else c for c in text.decode())
        case OneOf(values):
            # A hyphen stands last, where it needs no escape: EBNF has none for it.
            last = "-" if ord("-") in values else ""
            return "[" + "".join(chr(value) for value in sorted(values - {ord("-")})) + last + "]"
        case Then(first, second):
            return f"{as_regex(first)}{as_regex(second)}"
        case Or(branches):
            return f"({'|'.join(sorted(map(as_regex, branches)))})"
        case Repeat(inner, least, most):
            return f"({as_regex(inner)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(tree)


def as_ebnf(tree: Tree) -> str:
    """An expression of GBNF; `root ::=` goes before it."""
    match tree:
        case Bytes(text):
            return '"' + text.decode().replace("\\", "\\\\").replace('"', '\\"') + '"'
        case OneOf(_):
            return as_regex(tree)
        case Then(first, second):
            return f"{as_ebnf(first)} {as_ebnf(second)}"
        case Or(branches):
            return f"({' | '.join(sorted(map(as_ebnf, branches)))})"
        case Repeat(inner, least, most):
            return f"({as_ebnf(inner)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(tree)


class NaiveMatcher(GrammarMatcher):
    """Every token is tried at every step."""

    def __init__(self, tree: Tree, vocabulary: GuidedVocabulary) -> None:
        self._states: list[Tree | None] = [tree]
        self._texts = vocabulary.token_bytes
        self._eos_ids = vocabulary.eos_ids

    def allowed(self) -> set[int]:
        state = self._states[-1]
        if state is None:
            return set()
        found = {
            token for token, text in enumerate(self._texts) if text and not isinstance(_after(state, text), Nothing)
        }
        return found | set(self._eos_ids) if may_end(state) else found

    def fill(self, words: MaskWords) -> None:
        bits = np.zeros(32 * len(words), np.bool_)
        bits[list(self.allowed())] = True
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        state = self._states[-1]
        assert state is not None
        self._states.append(None if token in self._eos_ids else _after(state, self._texts[token]))
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._states[-num_tokens:]

    @property
    def is_over(self) -> bool:
        return self._states[-1] is None

    def forced_text(self) -> bytes:
        forced, state = bytearray(), self._states[-1]
        while state is not None and not may_end(state):
            nexts = [byte for byte in range(256) if not isinstance(derivative(state, byte), Nothing)]
            if len(nexts) != 1:
                break
            forced.append(nexts[0])
            state = derivative(state, nexts[0])
        return bytes(forced)


def _after(state: Tree, text: Sequence[int]) -> Tree:
    for byte in text:
        state = derivative(state, byte)
    return state
