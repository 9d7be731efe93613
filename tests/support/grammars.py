"""Grammars for tests that need no library: one that allows anything, and masks computed from a regular expression."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.guided.backend import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    GreedyTokens,
    GuidedVocabulary,
    MaskWords,
)
from radixmesh.daemons.runtime.guided.source import GrammarSource
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore


class AnyText(GrammarMatcher, CompiledGrammar):
    num_bytes = 1

    def matcher(self) -> GrammarMatcher:
        return self

    def fill(self, words: MaskWords) -> None:
        words[:] = -1

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        return

    @property
    def is_over(self) -> bool:
        return False


class AnyTextBackend(GrammarBackend):
    format = "any/1"
    tokens = GreedyTokens(GuidedVocabulary([b"a"], (), 1))

    def compile(self, source: GrammarSource) -> bytes:
        return b"any/1\n"

    def _read(self, data: bytes) -> CompiledGrammar:
        return AnyText()


def any_text_store() -> GrammarStore:
    return GrammarStore("any/1", AnyTextBackend)


def allowed_ids(words: MaskWords) -> list[int]:
    return np.flatnonzero(as_bools(words)).tolist()


def as_bools(words: MaskWords) -> npt.NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
