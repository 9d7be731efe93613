"""Grammars by xgrammar (Dong et al. 2024, arXiv:2411.15100). Imports torch and transformers, as xgrammar does."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    GreedyTokens,
    GuidedVocabulary,
    MaskWords,
    installed_format,
)
from radixmesh.daemons.runtime.guided.json_schemas import followable
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource, invalid_grammar

# A model that may write any number of blanks between two keys can write nothing else for ever.
_MAX_WHITESPACE = 16
_MAX_REASON_CHARS = 500
_MAX_WARNING_BYTES = 64 << 10
_MAX_WARNING_CHARS = 300


def make_backend(vocabulary: GuidedVocabulary) -> GrammarBackend:
    return XGrammarBackend(vocabulary)


class XGrammarBackend(GrammarBackend):
    """Compiles on one thread: several compilations are several processes."""

    format = installed_format("xgrammar")

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self._eos_ids = list(vocabulary.eos_ids)
        self.tokens = GreedyTokens(vocabulary)
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.token_bytes),
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=self._eos_ids,
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        self._head = f"{self.format}\n".encode()

    def compile(self, source: GrammarSource) -> bytes:
        try:
            with _Warnings() as warnings:
                compiled = self._compile(source)
            artefact = self._head + compiled.serialize_json().encode()
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _reason(error)
            if "bad_alloc" in reason:
                raise MemoryError from error
            raise invalid_grammar(f"the {source.form.value} cannot be compiled: {reason}", "") from error
        if warnings.text:
            # The library leaves out what it warns of: its grammar would let wrong texts through.
            message = f"the {source.form.value} asks for what a grammar cannot follow: {warnings.text}"
            raise invalid_grammar(message, "keyword")
        return artefact

    def use_one_thread(self) -> None:
        _Matcher.fill_threads = 1

    def _read(self, data: bytes) -> CompiledGrammar:
        try:
            compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info)
        except (RuntimeError, ValueError) as error:
            message = f"the grammar's bytes cannot be read ({_reason(error)}): compile it anew for this model"
            raise invalid_grammar(message, "format") from error
        return _Compiled(compiled, self._eos_ids)

    def _compile(self, source: GrammarSource) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, source.text
        if source.thought is not None:
            return compiler.compile_structural_tag(_behind_thought(source))
        if source.form is GrammarForm.JSON_SCHEMA:
            schema = followable(text)
            # strict_mode would close objects that say nothing of further properties: the schema's author decides.
            return compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE)
        if source.form is GrammarForm.ANY_JSON:
            return compiler.compile_json_schema("true", strict_mode=False, max_whitespace_cnt=_MAX_WHITESPACE)
        if source.form is GrammarForm.REGEX:
            return compiler.compile_regex(text)
        if source.form is GrammarForm.EBNF:
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(text)


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: xgrammar.CompiledGrammar, eos_ids: list[int]) -> None:
        self._compiled = compiled
        self._eos_ids = eos_ids
        self.num_bytes = compiled.memory_size_bytes

    def matcher(self) -> GrammarMatcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._eos_ids), self._eos_ids)


def _num_cores() -> int:
    """Those that this process may use: the library warns on standard error where it is told of more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_MOST_FILL_THREADS = 16


class _Matcher(GrammarMatcher):
    fill_threads = max(1, min(_MOST_FILL_THREADS, _num_cores() // 2, _num_cores() - 4))

    def __init__(self, matcher: xgrammar.GrammarMatcher, eos_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids

    def fill(self, words: MaskWords) -> None:
        self._matcher.fill_next_token_bitmask(words[None], 0)

    def accept(self, token: int) -> bool:
        if self._matcher.is_terminated():  # It would warn on the process's standard error.
            return False
        return bool(self._matcher.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    # One call releases the interpreter's lock once; a call a matcher hands it to another thread each time.
    @staticmethod
    def accept_all(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        return xgrammar.BatchGrammarMatcher.batch_accept_token(_inner(matchers), list(tokens))

    @staticmethod
    def over_among(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[int]:
        # A text ends by one of these alone; asking the library for each of hundreds takes longer than this.
        first = matchers[0]
        assert isinstance(first, _Matcher)
        ends = first._eos_ids
        return [index for index, token in enumerate(tokens) if token in ends and matchers[index].is_over]

    @staticmethod
    def fill_all(matchers: Sequence[GrammarMatcher], words: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
        batch = _ALONE
        if len(matchers) >= _LEAST_SHARED and _Matcher.fill_threads > 1:
            # A pool of threads for each caller: one pool's waits are for all that was given to it.
            batch = getattr(_own, "batch", None) or xgrammar.BatchGrammarMatcher(max_threads=_Matcher.fill_threads)
            _own.batch = batch
        batch.batch_fill_next_token_bitmask(_inner(matchers), words, list(rows))


_ALONE = xgrammar.BatchGrammarMatcher(max_threads=1)
_LEAST_SHARED = 16  # Masks of a call from which on the library's own threads are worth waking.
_own = threading.local()


def _inner(matchers: Sequence[GrammarMatcher]) -> list[xgrammar.GrammarMatcher]:
    return [matcher._matcher for matcher in matchers if isinstance(matcher, _Matcher)]


def _behind_thought(source: GrammarSource) -> str:
    """The constraint as a structural tag, with the thought and some blanks before it."""
    assert source.thought is not None
    begin, end, is_open = source.thought
    thought: object = {"type": "tag", "begin": "" if is_open else begin, "content": {"type": "any_text"}, "end": end}
    thought = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"[ \n]{0,4}"}]}
    if not is_open:
        thought = {"type": "optional", "content": thought}
    elements = [thought, _as_format(source)]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def _as_format(source: GrammarSource) -> object:
    if source.form is GrammarForm.JSON_SCHEMA:
        return _json_format(json.loads(followable(source.text)))
    if source.form is GrammarForm.ANY_JSON:
        return _json_format(True)
    if source.form is GrammarForm.REGEX:
        return {"type": "regex", "pattern": source.text}
    if source.form is GrammarForm.EBNF:
        return {"type": "grammar", "grammar": source.text}
    tag = json.loads(source.text)
    if not isinstance(tag, dict) or "format" not in tag:
        raise invalid_grammar("the structural_tag has no format, which it needs behind a thought: set it", "")
    return tag["format"]


def _json_format(schema: object) -> object:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}


class _Warnings:
    """Warnings that the library writes to the process's standard error while this is entered: text, "" = none."""

    text = ""

    def __enter__(self) -> _Warnings:
        self._file = tempfile.TemporaryFile()
        self._stderr = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *error: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._file.seek(0)
        written = self._file.read(_MAX_WARNING_BYTES).decode(errors="replace")
        self._file.close()
        found = [line.partition("Warning: ")[2] for line in written.splitlines() if "Warning: " in line]
        self.text = found[0][:_MAX_WARNING_CHARS] if found else ""


def _reason(error: Exception) -> str:
    """The library's words without its time stamp and source line."""
    if isinstance(error, MeshError):
        return error.message
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.rpartition(".cc:")[2].partition(": ")[2][:_MAX_REASON_CHARS] or text[:_MAX_REASON_CHARS]
