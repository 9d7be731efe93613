"""The tokenizer's grammar compiler: what it makes, its cache, its limits, and processes that die."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from support.small_tokenizers import byte_level, write_folder

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource, grammar_source
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarCompiler, GrammarLimits
from radixmesh.daemons.tokenizer.grammar.tenant_turns import TenantTurns

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
# An alternation of counted repetitions: minutes of compilation.
BOMB = json.dumps({"type": "string", "pattern": "^(" + "|".join(f"(a{{{n},{n + 500}}}b?)+" for n in range(400)) + ")$"})
pytest.importorskip("xgrammar")
MakeCompiler = Callable[[GrammarLimits], GrammarCompiler]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(path, byte_level())
    return path


@pytest.fixture
async def compiler(folder: Path) -> AsyncIterator[GrammarCompiler]:
    made = GrammarCompiler(folder, "xgrammar", GrammarLimits(timeout_s=20.0))
    yield made
    made.close()


@pytest.fixture
async def light_compiler(folder: Path) -> AsyncIterator[MakeCompiler]:
    """Makes compilers with the library whose processes start in a tenth of a second: xgrammar's import torch."""
    pytest.importorskip("llguidance")
    made: list[GrammarCompiler] = []

    def make(limits: GrammarLimits) -> GrammarCompiler:
        made.append(GrammarCompiler(folder, "llguidance", limits))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


async def test_an_artefact_is_named_by_its_bytes_and_follows_the_grammar(
    compiler: GrammarCompiler, folder: Path
) -> None:
    source = GrammarSource(GrammarForm.JSON_SCHEMA, SCHEMA)
    first, second = await asyncio.gather(compiler.compile(source), compiler.compile(source))
    assert first == second, "equal sources that come at once are compiled once"
    assert first.hash == hashlib.sha256(first.data).hexdigest()
    assert first.data.startswith(compiler.format.encode() + b"\n")
    assert (await compiler.compile(source)).is_cached
    # The same bytes by another process, as another replica has.
    vocabulary = GuidedVocabulary.of(Vocabulary.load(folder))
    backend = load_backend("xgrammar", vocabulary)
    assert backend.compile(source) == first.data
    matcher = backend.load(first.data).matcher()
    words = np.zeros(-(-vocabulary.vocab_size // 32), np.int32)
    matcher.fill(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert {vocabulary.token_bytes[token][:1] for token in allowed} == {b"{"}


async def test_what_cannot_be_compiled_is_said_by_name(compiler: GrammarCompiler) -> None:
    for form, text, said in (
        (GrammarForm.JSON_SCHEMA, "{", "no JSON"),
        (GrammarForm.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
        (GrammarForm.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        (GrammarForm.REGEX, "(?=a)b", "Lookahead"),
        (GrammarForm.REGEX, "(a", "parenthesis"),
        (GrammarForm.EBNF, "root ::= other", "other"),
        (GrammarForm.STRUCTURAL_TAG, "{}", "format"),
    ):
        with pytest.raises(MeshError, match=said) as caught:
            await compiler.compile(GrammarSource(form, text))
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR


async def test_a_bomb_ends_at_the_time_limit_and_the_next_grammar_compiles(folder: Path) -> None:
    compiler = GrammarCompiler(folder, "xgrammar", GrammarLimits(timeout_s=1.0, memory_bytes=4 << 30))
    try:
        with pytest.raises(MeshError) as caught:
            await compiler.compile(GrammarSource(GrammarForm.JSON_SCHEMA, BOMB))
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR
        assert caught.value.metadata["limit"] in ("time", "memory")
        assert (await compiler.compile(GrammarSource(GrammarForm.REGEX, "[ab]+"))).data
    finally:
        compiler.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no such class of processes here")
async def test_compilations_give_way_to_streams(light_compiler: MakeCompiler) -> None:
    compiler = light_compiler(GrammarLimits())
    await compiler.compile(GrammarSource(GrammarForm.JSON_SCHEMA, SCHEMA))
    (pid,) = compiler.pids
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH


async def test_a_killed_process_costs_no_request(light_compiler: MakeCompiler) -> None:
    compiler = light_compiler(GrammarLimits())
    await compiler.compile(GrammarSource(GrammarForm.REGEX, "a"))
    for pid in compiler.pids:
        os.kill(pid, signal.SIGKILL)
    assert (await compiler.compile(GrammarSource(GrammarForm.REGEX, "b"))).data


async def test_more_than_may_wait_is_refused(light_compiler: MakeCompiler) -> None:
    compiler = light_compiler(GrammarLimits(max_waiting=2))
    calls = [
        asyncio.ensure_future(compiler.compile(GrammarSource(GrammarForm.REGEX, f"a{number}"))) for number in range(4)
    ]
    done = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in done if isinstance(error, MeshError)]
    assert [error.reason for error in refused] == [ErrorReason.ERROR_REASON_OVERLOADED] * 2


async def test_a_tenant_takes_turns_with_a_crowd_of_another(light_compiler: MakeCompiler) -> None:
    compiler = light_compiler(GrammarLimits(max_waiting=8))
    ended: list[str] = []

    async def compiled(name: str, tenant: str) -> None:
        await compiler.compile(GrammarSource(GrammarForm.REGEX, name), tenant=tenant)
        ended.append(name)

    crowd = [asyncio.ensure_future(compiled(f"a{number}", "crowd")) for number in range(7)]
    await asyncio.sleep(0)
    other = asyncio.ensure_future(compiled("b", "other"))
    done = await asyncio.gather(*crowd, other, return_exceptions=True)
    errors = [error.reason for error in done if isinstance(error, MeshError)]
    assert errors == [ErrorReason.ERROR_REASON_OVERLOADED], "a tenant has six places of eight"
    assert sorted(ended) == sorted([*(f"a{number}" for number in range(6)), "b"])
    assert ended.index("b") <= 2, ended


async def test_turns_of_waiters_that_leave_are_passed_on() -> None:
    turns, order = TenantTurns(1), []

    async def take(name: str) -> None:
        async with turns.turn(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    names = ("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    tasks = {name: asyncio.ensure_future(take(name)) for name in names}
    await asyncio.sleep(0)
    tasks["a2"].cancel()
    tasks["c1"].cancel()
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in done] == [name in ("a2", "c1") for name in names]
    assert order == ["a1", "b1", "a3", "b2", "a4"]
    # Its turn has come, and it leaves before it runs.
    tasks = {name: asyncio.ensure_future(take(name)) for name in ("a1", "b1", "c1")}
    while order[-1] != "a1":
        await asyncio.sleep(0)
    turns.pass_on()
    tasks["b1"].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order[-2:] == ["a1", "c1"]


@pytest.mark.parametrize("limit", ["memory", "artefact_bytes"])
async def test_a_process_that_met_a_bound_does_not_keep_what_it_took(folder: Path, limit: str) -> None:
    memory_bytes = (128 if limit == "memory" else 1024) << 20
    compiler = GrammarCompiler(folder, "xgrammar", GrammarLimits(timeout_s=60.0, memory_bytes=memory_bytes))
    try:
        await compiler.compile(GrammarSource(GrammarForm.REGEX, "a"))
        (pid,) = compiler.pids
        with pytest.raises(MeshError) as caught:
            await compiler.compile(GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps({"const": "a" * 60_000})))
        assert caught.value.metadata["limit"] == limit
        assert (await compiler.compile(GrammarSource(GrammarForm.REGEX, "b"))).data
        assert compiler.pids != [pid]
    finally:
        compiler.close()


async def test_a_grammar_that_nobody_waits_for_any_more_leaves_the_queue(light_compiler: MakeCompiler) -> None:
    compiler = light_compiler(GrammarLimits(max_waiting=3))
    letters = [GrammarSource(GrammarForm.REGEX, letter) for letter in "abcd"]
    first, left, left_by_one, stays = (
        asyncio.ensure_future(compiler.compile(letters[number])) for number in (0, 1, 2, 2)
    )
    await asyncio.sleep(0)
    left.cancel()
    left_by_one.cancel()
    await asyncio.wait([left, left_by_one])
    assert left.cancelled() and left_by_one.cancelled()
    done = await asyncio.gather(first, stays, compiler.compile(letters[3]), return_exceptions=True)
    assert [bool(getattr(artefact, "data", b"")) for artefact in done] == [True] * 3, done
    assert (await compiler.compile(letters[1])).data


def test_a_source_is_one_of_five_and_bounded() -> None:
    assert grammar_source(common_pb2.Grammar(any_json=True)) == GrammarSource(GrammarForm.ANY_JSON)
    for message, reason in (
        (common_pb2.Grammar(), ErrorReason.ERROR_REASON_MISSING_FIELD),
        (common_pb2.Grammar(any_json=False), ErrorReason.ERROR_REASON_MISSING_FIELD),
        (common_pb2.Grammar(regex=""), ErrorReason.ERROR_REASON_INVALID_GRAMMAR),
        (common_pb2.Grammar(ebnf="a" * ((1 << 20) + 1)), ErrorReason.ERROR_REASON_INVALID_GRAMMAR),
    ):
        with pytest.raises(MeshError) as caught:
            grammar_source(message)
        assert caught.value.reason == reason
