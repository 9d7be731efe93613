"""A schema compiled, written under and held against jsonschema."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jsonschema

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from support.conformance.mutations import mutations, names_of
from support.conformance.random_writer import RandomWriter, TextCheck

Compile = Callable[[GrammarSource], bytes]


@dataclass(slots=True)
class Outcome:
    """Of one schema. refusal: the error's text, "" = it compiled. wrong: texts let through that do not fit."""

    refusal: str = ""
    compile_s: float = 0.0
    num_tokens: int = 0
    num_finished: int = 0
    num_unfinished: int = 0
    num_stuck: int = 0
    num_mutations: int = 0
    wrong: list[str] = field(default_factory=list)


class SchemaCheck:
    """With one backend and vocabulary. compile_source: the backend's own, or a compiler's with limits."""

    def __init__(
        self, compile_source: Compile, backend: GrammarBackend, vocabulary: GuidedVocabulary, max_tokens: int = 400
    ) -> None:
        self._compile = compile_source
        self._backend = backend
        self._writer = RandomWriter(vocabulary, max_tokens)
        self._texts = TextCheck(vocabulary)

    def run(self, schema: object, *, num_texts: int, num_mutations: int, seed: int = 0) -> Outcome:
        outcome = Outcome()
        try:
            source = GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(schema))
            since_s = time.perf_counter()
            artefact = self._compile(source)
            outcome.compile_s = time.perf_counter() - since_s
            grammar = self._backend.load(artefact)
        except MeshError as error:
            outcome.refusal = error.message
            return outcome
        finished: list[str] = []
        for number in range(num_texts):
            written = self._writer.write(grammar, seed + number)
            outcome.num_tokens += written.num_tokens
            outcome.num_stuck += written.is_stuck
            outcome.num_unfinished += not written.is_finished
            if written.is_finished:
                outcome.num_finished += 1
                finished.append(written.text.decode(errors="replace"))
                if why := misfit(schema, written.text):
                    outcome.wrong.append(f"{finished[-1]!r}: {why}")
        rng, names = random.Random(seed), names_of(schema)
        for text in finished[:2]:
            for mutated in mutations(_value(text), names, rng, num_mutations // 2):
                outcome.num_mutations += 1
                data = mutated.encode(errors="surrogatepass")
                if self._texts.takes(grammar, data) and (why := misfit(schema, data)):
                    outcome.wrong.append(f"{mutated!r}: {why}")
        return outcome


def misfit(schema: object, text: bytes) -> str:
    """Why a text is no value of a schema, by the draft that it names (2020-12 where it names none); "" = it is one."""
    try:
        value = json.loads(text.decode(errors="replace"))
    except ValueError as error:
        return f"no JSON: {error}"
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = jsonschema.validators.extend(validator, {"pattern": _pattern})
    try:
        error = jsonschema.exceptions.best_match(validator(schema).iter_errors(value))
    except Exception as broken:  # A regular expression that Python has not, a reference that is not there.
        return f"jsonschema: {type(broken).__name__}: {str(broken)[:200]}"
    return "" if error is None else f"{error.json_path}: {error.message[:200]}"


def _pattern(validator: object, pattern: str, value: object, schema: object) -> Iterator[jsonschema.ValidationError]:
    """As ECMA-262, which JSON schema names, has it: \\d, \\w and \\b are ASCII's."""
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
