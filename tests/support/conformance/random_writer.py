"""Texts sampled at temperature 1 from made-up logits under a grammar's masks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GuidedVocabulary

# Past this share of the length, tokens that close what is open become likely, as a model's are that has said all.
_LATE = 0.4
_CLOSERS = b'"}]'
_STRUCTURE = b'"}],:{[ 0123456789'


class Written(NamedTuple):
    """is_finished: the text ended with EOS. is_stuck: no token was allowed."""

    text: bytes
    num_tokens: int
    is_finished: bool
    is_stuck: bool = False


class RandomWriter:
    """Logits are noise, larger for tokens of JSON's structure: else a string of a large vocabulary never ends."""

    def __init__(self, vocabulary: GuidedVocabulary, max_tokens: int = 400) -> None:
        self._texts = list(vocabulary.token_bytes)
        self._size = vocabulary.vocab_size
        self._eos_ids = set(vocabulary.eos_ids)
        self._max_tokens = max_tokens
        self._structure = np.zeros(self._size, np.float32)
        self._closers = np.zeros(self._size, np.float32)
        for token, text in enumerate(self._texts):
            if text and not text.strip(_STRUCTURE):
                self._structure[token] = 5.0
            if len(text) == 1 and text >= b"\x80":
                # Parts of characters, which no model strings together at random: xgrammar takes sequences of them
                # that are no UTF-8 (overlong forms, surrogates), and clients read U+FFFD.
                self._structure[token] = -20.0
            if text and not text.strip(_CLOSERS):
                self._closers[token] = 1.0
        self._closers[list(self._eos_ids)] = 2.0

    def write(self, grammar: CompiledGrammar, seed: int) -> Written:
        rng, matcher = np.random.default_rng(seed), grammar.matcher()
        words = np.zeros(-(-self._size // 32), np.int32)
        text = bytearray()
        late = int(self._max_tokens * _LATE)
        for num_tokens in range(self._max_tokens):
            matcher.fill(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=self._size)
            allowed = np.flatnonzero(bits)
            if not len(allowed):
                return Written(bytes(text), num_tokens, False, True)
            logits = rng.gumbel(0.0, 1.0, len(allowed)) + self._structure[allowed]
            logits += rng.normal(0.0, 1.0, len(allowed))
            if num_tokens > late:
                logits += self._closers[allowed] * 0.5 * (num_tokens - late)
            token = int(allowed[int(logits.argmax())])
            assert matcher.accept(token), f"token {token} is in the mask and not accepted behind {bytes(text)!r}"
            if token in self._eos_ids:
                return Written(bytes(text), num_tokens + 1, True)
            text += self._texts[token]
        return Written(bytes(text), self._max_tokens, False)


class TextCheck:
    """Gives a grammar a whole text byte by byte."""

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self._byte_ids = {text[0]: token for token, text in enumerate(vocabulary.token_bytes) if len(text) == 1}
        self._eos = vocabulary.eos_ids[0]

    def takes(self, grammar: CompiledGrammar, text: bytes) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept(self._byte_ids[byte]) for byte in text) and matcher.accept(self._eos)
