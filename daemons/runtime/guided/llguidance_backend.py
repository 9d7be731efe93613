"""Grammars by llguidance (derivatives of expressions, Earley's parser): nothing is precomputed over the vocabulary.

An artefact is the library's grammar as text. It is checked where it is compiled and read within the library's own
bounds on each load; JSON schemas with keywords that it does not implement are refused by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from radixmesh.daemons.runtime.guided.backend import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    GreedyTokens,
    GuidedVocabulary,
    MaskWords,
    installed_format,
)
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource, invalid_grammar

# As with xgrammar: a model that may write any number of blanks can write nothing else for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}"}
_MAX_REASON_CHARS = 500
# Bound of a matcher's lexer; about 1.5 kB a state.
_MAX_LEXER_STATES = 50_000
_MIN_BYTES = 64 << 10


def make_backend(vocabulary: GuidedVocabulary) -> GrammarBackend:
    return LLGuidanceBackend(vocabulary)


class LLGuidanceBackend(GrammarBackend):
    format = installed_format("llguidance")

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self._eos_ids = list(vocabulary.eos_ids)
        self.tokens = GreedyTokens(vocabulary)
        texts = _TokenTexts(vocabulary, self.tokens)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(texts), n_vocab=vocabulary.vocab_size, eos_token=self._eos_ids
        )
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._head = f"{self.format}\n".encode()

    def compile(self, source: GrammarSource) -> bytes:
        grammar = ""
        try:
            grammar = _grammar(source)
            reason = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer, limits=self._limits)
        except (ValueError, RuntimeError, LookupError, GbnfToLarkError) as error:
            reason = str(error) or type(error).__name__
        if reason:
            words = " ".join(reason.split())[:_MAX_REASON_CHARS]
            raise invalid_grammar(f"the {source.form.value} cannot be compiled: {words}", "")
        return self._head + grammar.encode()

    def _read(self, data: bytes) -> CompiledGrammar:
        text = data.decode(errors="replace")
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            message = f"the grammar's bytes cannot be read ({matcher.get_error()[:200]}): compile it anew"
            raise invalid_grammar(message, "format")
        return _Compiled(matcher, self._eos_ids, _MIN_BYTES + 8 * len(data))


class _TokenTexts:
    """The vocabulary as the library's tokenizer asks for it. It encodes texts that a grammar forces, greedily."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, vocabulary: GuidedVocabulary, greedy: GreedyTokens) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        padding = [b""] * (vocabulary.vocab_size - len(vocabulary.token_bytes))
        self.tokens = [*vocabulary.token_bytes, *padding]
        self._greedy = greedy

    def __call__(self, text: bytes) -> list[int]:
        return self._greedy.encode(text)


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int], num_bytes: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.num_bytes = num_bytes

    def matcher(self) -> GrammarMatcher:
        return _Matcher(self._matcher.deep_copy(), self._eos_ids)


class _Matcher(GrammarMatcher):
    """The library stops at a text that nothing can follow, before EOS: the end is kept here."""

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._is_over = False

    def fill(self, words: MaskWords) -> None:
        if self._matcher.is_error():
            # Beyond the library's bounds: no token may follow, which ends the output with an error.
            words[:] = 0
            return
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        words[:] = mask[: len(words)]

    def accept(self, token: int) -> bool:
        if self._is_over:
            return False
        if token in self._eos_ids:
            self._is_over = self._matcher.is_accepting() and not self._matcher.is_error()
            return self._is_over
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._is_over:
            self._is_over = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def is_over(self) -> bool:
        return self._is_over


def _grammar(source: GrammarSource) -> str:
    """The library's own form. Raises ValueError, INVALID_GRAMMAR."""
    matcher, text = llguidance.LLMatcher, source.text
    if source.form is GrammarForm.ANY_JSON:
        return str(matcher.grammar_from_json_schema(json.dumps({"x-guidance": _JSON_OPTIONS})))
    if source.form is GrammarForm.JSON_SCHEMA:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise invalid_grammar("the json_schema is neither an object nor true: send a JSON schema", "")
        # The library's own options are not the client's.
        options = {"x-guidance": _JSON_OPTIONS}
        whole = {**schema, **options} if isinstance(schema, dict) else options if schema else {"not": {}}
        return str(matcher.grammar_from_json_schema(json.dumps(whole)))
    if source.form is GrammarForm.REGEX:
        return str(matcher.grammar_from_regex(text))
    if source.form is GrammarForm.EBNF:
        return str(matcher.grammar_from_lark(gbnf_to_lark(text)))
    raise invalid_grammar("structural tags are followed by --grammar-backend xgrammar alone: send another form", "")
