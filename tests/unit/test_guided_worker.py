"""Outputs of the CPU worker that follow a grammar: every text fits, whatever is sampled, resumed or drafted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import Steps, admit, chunk, grant

from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GrammarMatcher, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import NoToken, Release
from radixmesh.daemons.worker.backends import load_model
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import mask_row
from radixmesh.daemons.worker.guided.guides import jump_forward
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.speculation.drafter import EachRow

pytest.importorskip("xgrammar")
MODEL = Path(__file__).parents[2] / "compose/models/tiny-llama"
PAGES = 160
# A seed whose output ends soon.
ENDS = 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bob"]},
        "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
ENDLESS = '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}'
SOURCES = {
    "schema": GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": GrammarSource(GrammarForm.REGEX, "(ab|c[0-9]{2}){1,6}"),
    "ebnf": GrammarSource(GrammarForm.EBNF, 'root ::= "x" root "y" | "z"'),
}


def blob_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fits(kind: str, text: str) -> bool:
    if kind == "schema":
        value = json.loads(text)
        return value["name"] in ("ada", "bob") and set(value) == {"name", "ages"} and set(value["ages"]) <= {1, 22}
    if kind == "regex":
        return re.fullmatch("(ab|c[0-9]{2}){1,6}", text) is not None
    x, _, y = text.partition("z")
    return set(x) <= {"x"} and y == "y" * len(x)


class Guided:
    """One slot of a CPU worker that writes until its output ends."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary.load(MODEL)
        self.backend: GrammarBackend = load_backend("xgrammar", GuidedVocabulary.of(self.vocabulary))
        runner = load_cpu_runner(MODEL, num_pages=4 * PAGES, threads=1)
        assert isinstance(runner, CpuRunner)
        self.runner = runner
        # Every step waits for its masks, as long as it takes: with a bound nobody waits for an output of which one mask
        # took a thread more than 5 ms of CPU, as on a busy machine, and its steps yield nothing.
        runner.mask_wait_s = None
        self.generation = 0
        self.num_steps = 0

    def steps(self) -> Steps:
        self.blobs = BlobStore(max_bytes=1 << 24, max_blob_bytes=1 << 23)
        grammars = GrammarStore(self.backend.format, lambda: self.backend)
        executor = StepExecutor(self.runner, num_slots=4, max_tokens_per_step=256, blobs=self.blobs, grammars=grammars)
        executor.begin_epoch(1)
        return Steps(executor)

    def write(
        self, steps: Steps, source: GrammarSource, sampling: Sampling, output: Sequence[int] = (), **fields: object
    ) -> tuple[list[int], bool]:
        """Tokens until the end, and whether it came within the limit."""
        artefact = self.backend.compile(source)
        name = blob_hash(artefact)
        self.blobs.put(name, artefact)
        self.generation += 1
        prompt, size = [5, 6, 7], self.runner.page_size
        total = len(prompt) + len(output)
        asked = admit(0, prompt, generation=self.generation, sampling=sampling, output_ids=list(output), **fields)
        result = steps.run(
            admits=(replace(asked, grammar_hash=name, max_total_len=PAGES * size),),
            grants=(grant(0, range(PAGES)),),
            chunks=(chunk(0, total),),
        )
        tokens = [*output, *result.ids.tolist()]
        eos = set(self.vocabulary.identity.eos_ids)
        while len(tokens) < 150 and tokens[-1] not in eos:
            tokens += steps.run(decodes=[0]).ids.tolist()
            self.num_steps += 1
            tokens = tokens[: next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))]
        steps.run(decodes=[], releases=(Release(slot=0, generation=self.generation),))
        is_over = tokens[-1] in eos
        return tokens[:-1] if is_over else tokens, is_over

    def text(self, tokens: Sequence[int]) -> str:
        return self.vocabulary.tokenizer.decode(list(tokens), skip_special_tokens=False)


@pytest.fixture(scope="module")
def guided() -> Guided:
    return Guided()


@pytest.mark.parametrize("kind", SOURCES)
def test_every_text_fits_its_grammar(guided: Guided, kind: str) -> None:
    steps, num_over = guided.steps(), 0
    for seed in range(10):
        sampling = Sampling(temperature=1.0, seed=seed) if seed else Sampling(temperature=0.0)
        tokens, is_over = guided.write(steps, SOURCES[kind], sampling)
        num_over += is_over
        assert not is_over or fits(kind, guided.text(tokens)), guided.text(tokens)
    assert num_over >= 6


def test_a_resumed_output_goes_on_as_if_it_had_never_stopped(guided: Guided) -> None:
    steps, sampling = guided.steps(), Sampling(temperature=1.0, seed=ENDS)
    whole, is_over = guided.write(steps, SOURCES["schema"], sampling)
    assert is_over and len(whole) > 4
    for cut in range(1, len(whole), 1 + len(whole) // 6):
        assert guided.write(steps, SOURCES["schema"], sampling, whole[:cut]) == (whole, True)


def test_drafts_change_no_token(guided: Guided) -> None:
    plain, _ = guided.write(guided.steps(), SOURCES["schema"], Sampling(temperature=1.0, seed=ENDS))
    rng = np.random.default_rng(0)

    def draft(sample, most):
        """Right, wrong in the middle, or against the grammar."""
        known = len(sample.output_ids)
        right = plain[known : known + most]
        return [int(t) if rng.random() < 0.7 else int(rng.integers(0, 200)) for t in right]

    guided.runner.verify(EachRow(draft), max_drafts=3)
    try:
        drafted, is_over = guided.write(guided.steps(), SOURCES["schema"], Sampling(temperature=1.0, seed=ENDS))
    finally:
        guided.runner.max_tokens_per_row = 1
        guided.runner.drafter = None
    assert is_over and drafted == plain


KEYS = {
    "type": "object",
    "properties": {
        "temperature_measurement": {"enum": [1, 22]},
        "humidity_measurement": {"enum": ["low", "high"]},
        "atmospheric_pressure": {"type": "null"},
    },
    "required": ["temperature_measurement", "humidity_measurement", "atmospheric_pressure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_texts_are_jumped_over_and_change_no_token(guided: Guided, temperature: float) -> None:
    source = GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(KEYS))
    plain, jumped, num_steps = [], [], 0
    steps = guided.steps()
    for seed in range(3):
        plain.append(guided.write(steps, source, Sampling(temperature=temperature, seed=seed)))
    guided.runner.verify(EachRow(jump_forward), max_drafts=7)
    try:
        steps = guided.steps()
        for seed in range(3):
            before = guided.num_steps
            jumped.append(guided.write(steps, source, Sampling(temperature=temperature, seed=seed)))
            num_steps += guided.num_steps - before
    finally:
        guided.runner.max_tokens_per_row = 1
        guided.runner.drafter = None
    assert jumped == plain and all(is_over for _, is_over in plain)
    num_tokens = sum(len(tokens) + 1 for tokens, _ in plain)
    assert num_tokens > 1.3 * num_steps, (num_tokens, num_steps)


def test_min_tokens_yields_where_only_the_end_is_left(guided: Guided) -> None:
    eos = list(guided.vocabulary.identity.eos_ids)
    source = GrammarSource(GrammarForm.REGEX, "[ab]{2,8}")
    tokens, is_over = guided.write(guided.steps(), source, Sampling(temperature=0.0), min_tokens=50, suppressed_ids=eos)
    assert is_over and len(guided.text(tokens)) == 8, "the grammar's longest text, though 50 tokens were asked for"


def test_what_cannot_be_followed_fails_its_slot_alone(guided: Guided) -> None:
    steps = guided.steps()
    source = GrammarSource(GrammarForm.REGEX, "[ab]+")
    artefact = guided.backend.compile(source)
    other = artefact.replace(b"xgrammar/", b"xgrammar/9", 1)
    # No text of this schema is finite.
    endless = guided.backend.compile(
        GrammarSource(
            GrammarForm.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}'
        )
    )
    names = []
    for blob in (other, endless, artefact):
        guided.blobs.put(blob_hash(blob), blob)
        names.append(blob_hash(blob))
    wrong = guided.vocabulary.tokenizer.encode("z", add_special_tokens=False).ids
    admits = [replace(admit(slot, [5, 6, 7]), grammar_hash=name) for slot, name in enumerate(names)]
    admits.append(replace(admit(3, [5, 6, 7], output_ids=wrong), grammar_hash=names[2]))
    result = steps.run(
        admits=tuple(admits),
        grants=tuple(grant(slot, range(8 * slot, 8 * slot + 8)) for slot in range(4)),
        chunks=tuple(chunk(slot, 3 + len(wrong) * (slot == 3)) for slot in range(4)),
    )
    assert result.counts.tolist() == [0, 0, 1, 0]
    assert result.no_token_reasons.tolist() == [
        NoToken.SLOT_ERROR,
        NoToken.SLOT_ERROR,
        NoToken.HAS_TOKENS,
        NoToken.SLOT_ERROR,
    ]
    assert {error.slot: error.error.reason_name for error in result.slot_errors} == dict.fromkeys(
        (0, 1, 3), "INVALID_GRAMMAR"
    )


def start(guided: Guided, steps: Steps, sources: Sequence[GrammarSource]) -> list[int]:
    """Admits an output a source, greedy; the first tokens."""
    admits = []
    for slot, source in enumerate(sources):
        artefact = guided.backend.compile(source)
        guided.blobs.put(blob_hash(artefact), artefact)
        admits.append(replace(admit(slot, [5, 6, 7], max_total_len=64), grammar_hash=blob_hash(artefact)))
    grants = tuple(grant(slot, range(64 * slot, 64 * slot + 64)) for slot in range(len(sources)))
    chunks = tuple(chunk(slot, 3) for slot in range(len(sources)))
    return steps.run(admits=tuple(admits), grants=grants, chunks=chunks).ids.tolist()


def test_a_draft_that_leaves_no_token_ends_its_output_alone(guided: Guided) -> None:
    dead = GrammarSource(GrammarForm.EBNF, 'root ::= "abcdefgh" dead\ndead ::= dead "x"')
    alive = GrammarSource(GrammarForm.REGEX, "abcdefghijklmnop")
    guided.runner.verify(EachRow(jump_forward), max_drafts=7)
    try:
        steps = guided.steps()
        texts: list[list[int]] = [[token] for token in start(guided, steps, [dead, alive])]
        errors = []
        for _ in range(16):
            result = steps.run(decodes=[0, 1])
            errors += result.slot_errors
            for text, ids in zip(texts, np.split(result.ids, result.counts[:1]), strict=True):
                text += ids.tolist()
    finally:
        guided.runner.max_tokens_per_row = 1
        guided.runner.drafter = None
    assert [(error.slot, error.error.reason_name) for error in errors] == [(0, "INVALID_GRAMMAR")]
    assert guided.text(texts[0]) == "abcdefgh"
    eos = set(guided.vocabulary.identity.eos_ids)
    end = next(index for index, token in enumerate(texts[1]) if token in eos)
    assert guided.text(texts[1][:end]) == "abcdefghijklmnop"


def test_a_matcher_that_takes_no_allowed_token_ends_its_output_alone(
    guided: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llguidance's does beyond its bounds."""
    steps = guided.steps()
    source = GrammarSource(GrammarForm.REGEX, "[ab]{60}")
    start(guided, steps, [source, source])
    broken = steps.executor.table.occupant(0).guide
    assert broken is not None and broken.wait(30.0)
    matcher, accept_all = broken._matcher, broken._matcher.accept_all

    def refuse(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        accepted = accept_all(matchers, tokens)
        return [one is not matcher and is_accepted for one, is_accepted in zip(matchers, accepted, strict=True)]

    monkeypatch.setattr(matcher, "accept", lambda token: False)
    monkeypatch.setattr(type(matcher), "accept_all", staticmethod(refuse))
    results = [steps.run(decodes=[0, 1]) for _ in range(3)]
    assert [result.counts.tolist() for result in results] == [[1, 1], [0, 1], [0, 1]]
    errors = [error for result in results for error in result.slot_errors]
    assert [(error.slot, error.error.reason_name) for error in errors] == [(0, "INVALID_GRAMMAR")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_masked_row_leaves_an_allowed_id(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    values = st.sampled_from([0.0, 1.0, -5.0, float("nan"), float("-inf")])
    row = np.array(data.draw(st.lists(values, min_size=size, max_size=size)), np.float32)
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_)
    allowed[data.draw(st.integers(0, size - 1))] = True
    suppressed = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.int32)
    masked, keeps = mask_row(row, allowed, suppressed)
    chosen = int(np.argmax(masked))
    assert allowed[chosen] and not np.isnan(masked).any()
    assert keeps == bool(allowed[~np.isin(np.arange(size), suppressed)].any())
    assert not keeps or chosen not in suppressed


def test_a_worker_that_serves_has_its_library_of_grammars_ready() -> None:
    """An output that moves to a fresh worker does not wait for an import."""
    loaded = load_model(WorkerSettings(model=MODEL, backend=Backend.CPU, num_pages=PAGES, cpu_threads=1))
    assert loaded.grammars is not None
    assert loaded.grammars.tokens.encode(b"tiger")  # There once the vocabulary was read.


def test_a_library_of_grammars_that_cannot_be_imported_leaves_a_worker_that_serves_all_others() -> None:
    def broken() -> GrammarBackend:
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, "its shared object does not load")

    store = GrammarStore("xgrammar/1", broken)
    store.prepare()
    with pytest.raises(MeshError, match="shared object"):
        store.get("any", b"xgrammar/1\nx")
