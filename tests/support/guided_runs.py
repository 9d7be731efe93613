"""Outputs that follow grammars, and free ones beside them, through an executor whose steps are launched ahead."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarSource
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import NoToken, StepResult
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guides import Guides
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.step_handle import StepHandle
from support.plans import Steps, admit, chunk, grant

MODEL = Path(__file__).parents[2] / "compose/models/tiny-llama"
PROMPT = [5, 6, 7]
# Greedy and sampled, with logprobs and a penalty, for five outputs side by side.
FIVE_SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.9, seed=4, num_top_logprobs=2),
    Sampling(temperature=0.0, num_top_logprobs=1, repetition_penalty=1.2),
]


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(MODEL)


@cache
def backend() -> GrammarBackend:
    return load_backend("xgrammar", GuidedVocabulary.of(vocabulary()))


def text_of(tokens: Sequence[int]) -> str:
    """Of an output without its end."""
    eos = set(vocabulary().identity.eos_ids)
    ends = [index for index, token in enumerate(tokens) if token in eos]
    return vocabulary().tokenizer.decode(list(tokens[: ends[0]] if ends else tokens), skip_special_tokens=False)


def cut(tokens: Sequence[int], num_tokens: int) -> list[int]:
    """An output up to its end, at most num_tokens of it."""
    eos = set(vocabulary().identity.eos_ids)
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos), len(tokens))
    return list(tokens[: min(end, num_tokens)])


class GuidedRun:
    """An output a slot; sources: None for a free one. tokens by slot; num_late: rows that had no mask."""

    def __init__(
        self,
        runner: ModelRunner,
        sources: Sequence[GrammarSource | None],
        samplings: Sequence[Sampling],
        *,
        num_slots: int = 8,
        pages_a_slot: int = 64,
        make_backend: Callable[[], GrammarBackend] = backend,
        guides: Guides | None = None,
    ) -> None:
        blobs = BlobStore(max_bytes=1 << 24, max_blob_bytes=1 << 23)
        grammars = GrammarStore(make_backend().format, make_backend)
        executor = StepExecutor(
            runner, num_slots=num_slots, max_tokens_per_step=128, blobs=blobs, grammars=grammars, guides=guides
        )
        executor.begin_epoch(1)
        self.steps = Steps(executor)
        self.tokens: list[list[int]] = [[] for _ in sources]
        self.num_late = 0
        self.most_tokens = 0
        """Of a row in one step, by a grammar."""
        self.has_grammar = [source is not None for source in sources]
        self.late_by_slot = [0] * len(sources)
        self._launched: deque[StepHandle[StepResult]] = deque()
        admits = []
        for slot, (source, sampling) in enumerate(zip(sources, samplings, strict=True)):
            name = ""
            if source is not None:
                artefact = make_backend().compile(source)
                name = hashlib.sha256(artefact).hexdigest()
                blobs.put(name, artefact)
            total = pages_a_slot * runner.page_size
            asked = admit(slot, PROMPT, sampling=sampling, max_total_len=min(total, runner.max_total_len))
            admits.append(replace(asked, grammar_hash=name))
        slots = range(len(sources))
        self._launch(
            admits=tuple(admits),
            grants=tuple(grant(slot, range(pages_a_slot * slot, pages_a_slot * (slot + 1))) for slot in slots),
            chunks=tuple(chunk(slot, len(PROMPT)) for slot in slots),
        )

    def run(self, num_steps: int, *, lag: int) -> None:
        """So many steps of all slots, each launched `lag` steps ahead of the one that is asked for."""
        slots = list(range(len(self.tokens)))
        for number in range(num_steps):
            self._launch(decodes=slots if number == 0 else None)
            while len(self._launched) > lag:
                self._take(self._launched.popleft().result())
        while self._launched:
            self._take(self._launched.popleft().result())

    def _launch(self, **parts: object) -> None:
        self._launched.append(self.steps.executor.launch(self.steps.plan(**parts)))  # type: ignore[arg-type]
        self.steps.next_step += 1

    def _take(self, result: StepResult) -> None:
        starts = 0
        assert not result.slot_errors, result.slot_errors
        for slot, count in enumerate(result.counts.tolist()):
            self.tokens[slot] += result.ids[starts : starts + count].tolist()
            starts += count
            if self.has_grammar[slot]:
                self.most_tokens = max(self.most_tokens, count)
            if len(result.no_token_reasons) and result.no_token_reasons[slot] == NoToken.NO_MASK:
                self.num_late += 1
                self.late_by_slot[slot] += 1


def run_amid_kills(
    run: GuidedRun,
    guides: ProcessGuides,
    expected: Sequence[Sequence[int]],
    *,
    kill_behind: Sequence[int],
    num_steps: int,
    lag: int,
) -> None:
    """Runs until no output is shorter than expected, so many steps at a time. Whenever slot 0 has more tokens than the
    next of `kill_behind`, the process of slots 0, 2 and 4 is killed."""
    deadline, left = time.monotonic() + 200, deque(kill_behind)
    while any(len(tokens) < len(wanted) for tokens, wanted in zip(run.tokens, expected, strict=True)):
        assert time.monotonic() < deadline, run.tokens
        run.run(num_steps, lag=lag)
        if left and len(run.tokens[0]) > left[0]:
            os.kill(guides.pids[0], signal.SIGKILL)
            left.popleft()
    assert len(left) < len(kill_behind), "it was over before anything was killed"
