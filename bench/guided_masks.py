"""Speed of the grammar backends: compilation, loading, and filling a mask, over schemas of real tools.

    python bench/guided_masks.py > bench/results/guided-masks.json

Times of one thread: milliseconds to compile and load, microseconds to fill one mask, p50 and p99. Both backends write
their own texts of the same schemas, at random; compare by ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.conformance.random_writer import RandomWriter  # noqa: E402
from support.conformance.real_schemas import tool_schemas  # noqa: E402
from support.conformance.vocabularies import trained_folder, vocabulary_of  # noqa: E402

from radixmesh.daemons.runtime.errors import MeshError  # noqa: E402
from radixmesh.daemons.runtime.guided.backend import (  # noqa: E402
    BACKENDS,
    CompiledGrammar,
    GrammarMatcher,
    GuidedVocabulary,
    MaskWords,
    load_backend,
)
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32_000, help="ids of the trained vocabulary")
    parser.add_argument("--schemas", type=int, default=75, help="tools, evenly taken from all")
    options = parser.parse_args()
    tools = list(tool_schemas().values())
    schemas = tools[:: max(1, len(tools) // options.schemas)]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = vocabulary_of(trained_folder(Path(folder), options.vocabulary, 8_000_000))
        result = {"vocabulary": vocabulary.vocab_size, "schemas": len(schemas)}
        print(json.dumps({**result, **{name: measured(name, vocabulary, schemas) for name in BACKENDS}}, indent=1))


def measured(name: str, vocabulary: GuidedVocabulary, schemas: list[object]) -> dict[str, object]:
    since_s = time.perf_counter()
    backend = load_backend(name, vocabulary)
    start_s = time.perf_counter() - since_s
    compile_s, load_s, sizes, refused = [], [], [], 0
    fill_s: list[float] = []
    writer = RandomWriter(vocabulary, 200)
    for number, schema in enumerate(schemas):
        since_s = time.perf_counter()
        try:
            artefact = backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(schema)))
        except MeshError:
            refused += 1
            continue
        compile_s.append(time.perf_counter() - since_s)
        since_s = time.perf_counter()
        grammar = backend.load(artefact)
        load_s.append(time.perf_counter() - since_s)
        sizes.append(len(artefact))
        writer.write(_Timed(grammar, fill_s), number)
    return {
        "format": backend.format,
        "start_s": round(start_s, 2),
        "refused": refused,
        "compile_ms_p50_p99": percentiles(compile_s, 1e3),
        "load_ms_p50_p99": percentiles(load_s, 1e3),
        "artefact_kb_p50_p99": percentiles(sizes, 1e-3),
        "fill_us_p50_p99": percentiles(fill_s, 1e6),
        "fills": len(fill_s),
    }


def percentiles(values: list[float] | list[int], scale: float) -> list[float]:
    """50 and 99; of nothing, nothing."""
    if not values:
        return []
    return [round(float(value) * scale, 2) for value in np.percentile(values, (50, 99))]


class _Timed(CompiledGrammar):
    """A grammar whose matchers note how long each mask took."""

    def __init__(self, grammar: CompiledGrammar, fill_s: list[float]) -> None:
        self._grammar = grammar
        self._fill_s = fill_s
        self.num_bytes = grammar.num_bytes

    def matcher(self) -> GrammarMatcher:
        return _TimedMatcher(self._grammar.matcher(), self._fill_s)


class _TimedMatcher(GrammarMatcher):
    def __init__(self, matcher: GrammarMatcher, fill_s: list[float]) -> None:
        self._matcher = matcher
        self._fill_s = fill_s

    def fill(self, words: MaskWords) -> None:
        since_s = time.perf_counter()
        self._matcher.fill(words)
        self._fill_s.append(time.perf_counter() - since_s)

    def accept(self, token: int) -> bool:
        return self._matcher.accept(token)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def is_over(self) -> bool:
        return self._matcher.is_over


if __name__ == "__main__":
    main()
