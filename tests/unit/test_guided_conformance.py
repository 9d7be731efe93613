"""Every text that a schema's grammar lets finish validates, whatever is sampled; what cannot be followed is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.conformance.checks import Outcome, SchemaCheck
from support.conformance.real_schemas import store_schemas, tool_schemas
from support.conformance.schema_generator import SchemaGenerator
from support.conformance.vocabularies import trained_folder, vocabulary_of

from radixmesh.daemons.runtime.guided.backend import load_backend

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")
# Refusals name a keyword, or have the library's own words.
SAID = ("which a grammar cannot follow", "asks for what a grammar cannot follow", "cannot be compiled")


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> SchemaCheck:
    vocabulary = vocabulary_of(trained_folder(tmp_path_factory.mktemp("model"), 4000, 500_000))
    backend = load_backend("xgrammar", vocabulary)
    return SchemaCheck(backend.compile, backend, vocabulary, max_tokens=120)


def run(check: SchemaCheck, schemas: Mapping[str, object], num_texts: int) -> list[Outcome]:
    outcomes = []
    for label, schema in schemas.items():
        outcome = check.run(schema, num_texts=num_texts, num_mutations=20)
        assert not outcome.wrong and not outcome.num_stuck, (label, schema, outcome)
        assert not outcome.refusal or any(words in outcome.refusal for words in SAID), (label, outcome.refusal)
        outcomes.append(outcome)
    return outcomes


def test_generated_schemas(check: SchemaCheck) -> None:
    outcomes = run(check, {str(seed): SchemaGenerator(seed).schema() for seed in range(60)}, 1)
    assert sum(not outcome.refusal for outcome in outcomes) > 30 and sum(o.num_finished for o in outcomes) > 30
    assert sum(outcome.num_mutations for outcome in outcomes) > 300


def test_tools_of_real_servers(check: SchemaCheck) -> None:
    tools = tool_schemas()
    outcomes = run(check, {label: tools[label] for label in list(tools)[::8]}, 1)
    assert all(not outcome.refusal and outcome.num_finished for outcome in outcomes)


@pytest.mark.full
def test_more_schemas(check: SchemaCheck) -> None:
    run(check, {str(seed): SchemaGenerator(seed).schema() for seed in range(1000, 1300)}, 3)
    run(check, tool_schemas(), 2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_schemas_of_schemastore(check: SchemaCheck, tmp_path: Path) -> None:
    try:
        schemas = store_schemas(tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    small = {label: schema for label, schema in schemas.items() if len(str(schema)) < 20_000}
    outcomes = run(check, small, 1)
    assert len(outcomes) > 150
