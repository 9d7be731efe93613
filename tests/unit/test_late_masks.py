"""A grammar whose masks take long holds up its own output alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
from support.grammars import AnyText, AnyTextBackend
from support.guided_runs import MODEL, GuidedRun
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GrammarBackend, GrammarMatcher, MaskWords
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.guides import Guides, jump_forward
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_memory import MaskSink
from radixmesh.daemons.worker.speculation.drafter import EachRow

GREEDY = Sampling(temperature=0.0)
SLOW, QUICK = (GrammarSource(GrammarForm.REGEX, text) for text in ("slow", "quick"))


class Gate:
    """Masks of the slow grammar are filled while it is open; `began`: one is being filled."""

    def __init__(self) -> None:
        self.opened, self.began = threading.Event(), threading.Event()


class Backend(AnyTextBackend):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def compile(self, source: GrammarSource) -> bytes:
        return f"any/1\n{source.text}".encode()

    def _read(self, data: bytes) -> CompiledGrammar:
        return Gated(self._gate) if data == b"slow" else AnyText()


class Gated(AnyText):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def matcher(self) -> GrammarMatcher:
        return self

    def fill(self, words: MaskWords) -> None:
        self._gate.began.set()
        assert self._gate.opened.wait(60)
        words[:] = -1


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def _run(runner: CpuRunner, gate: Gate) -> GuidedRun:
    backend = Backend(gate)

    def make_backend() -> GrammarBackend:
        return backend

    return GuidedRun(runner, [SLOW, None, QUICK], [GREEDY] * 3, make_backend=make_backend)


def _run_until(run: GuidedRun, num_tokens: int) -> None:
    """Steps until the first output has so many. Its thread has the lowest priority, and steps do not wait for it."""
    ends_s = time.monotonic() + 60
    while len(run.tokens[0]) < num_tokens and time.monotonic() < ends_s:
        run.run(1, lag=0)
        time.sleep(0.005)


@pytest.mark.parametrize("max_drafts", [0, 3])
def test_a_late_mask_holds_up_its_own_output_alone(gate: Gate, max_drafts: int) -> None:
    runner = load_cpu_runner(MODEL, num_pages=512, threads=1)
    assert isinstance(runner, CpuRunner)
    if max_drafts:
        runner.verify(EachRow(jump_forward), max_drafts=max_drafts)
    gate.opened.set()
    run = _run(runner, gate)
    while not run.tokens[0]:
        run.run(1, lag=0)
    # From here on no mask of the first output is filled.
    gate.began.clear()
    gate.opened.clear()
    while not gate.began.is_set():
        run.run(1, lag=0)
    stuck_at, free_at = len(run.tokens[0]), len(run.tokens[1])
    run.late_by_slot = [0, 0, 0]
    run.run(20, lag=0)
    assert run.tokens[0][stuck_at:] == [] and run.late_by_slot[0] == 20
    assert len(run.tokens[1]) == free_at + 20 and run.late_by_slot[1] == 0
    gate.opened.set()
    _run_until(run, stuck_at + 6)
    # The same grammar lets everything through: what came late is what comes without one.
    length = min(len(run.tokens[0]), len(run.tokens[1]))
    assert length > stuck_at + 5 and run.tokens[0][:length] == run.tokens[1][:length]


def test_a_first_mask_that_is_late_leaves_the_prompt_to_the_next_steps(gate: Gate) -> None:
    runner = load_cpu_runner(MODEL, num_pages=512, threads=1)
    runner.mask_wait_s = 0.01
    run = _run(runner, gate)  # type: ignore[arg-type]
    run.run(5, lag=0)
    assert run.tokens[0] == [] and len(run.tokens[1]) == 6, run.tokens
    gate.opened.set()
    _run_until(run, 4)
    assert run.tokens[0][:4] == run.tokens[1][:4]


class FirstMasksLate(Guides):
    """The mask behind each prompt is not there when its last chunk is launched, as on a GPU, which waits 2 ms for a
    process that reads the grammar first."""

    def __len__(self) -> int:
        return 1

    def is_late(self, slot: int) -> bool:
        return True

    def wait(self, slots: Iterable[int], seconds: float | None) -> None:
        return

    def admitted(self, admit: Admit, blob: bytes, store: GrammarStore, sink: MaskSink | None) -> None:
        raise AssertionError("no output names a grammar")

    def launched(self, slots: IntArray, tokens: Callable[[], IntArray]) -> threading.Lock:
        raise AssertionError("the runner tells no tokens ahead of its result")

    def follow(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        return

    def released(self, slot: int) -> None:
        return

    def clear(self) -> None:
        return

    @property
    def has_errors(self) -> bool:
        return False

    def errors(self) -> Iterator[tuple[int, MeshError]]:
        yield from ()

    def close(self) -> None:
        return


@pytest.mark.parametrize("most", [1, 2, 9])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_outputs_whose_first_mask_is_late_come_to_their_end(most: int, depth: int) -> None:
    """Of one token too, which the scheduler took for sampled with the prompt's last chunk."""
    world = World(max_tokens_per_row=most, row_seed=most)
    world.executor.guides = FirstMasksLate()
    records = [world.submit([2 + num, 3, 4], stop=Stop(max_tokens=num)) for num in (1, 2, 3, 20)]
    resumed = np.array(world.expected(records[-1].submission)[:2], np.int32)
    records.append(world.submit([22, 3, 4], stop=Stop(max_tokens=3), resumed_output_ids=resumed))
    world.run(depth)
    for record in records:
        assert record.tokens == world.expected(record.submission)
        assert record.finished is not None
    world.check_clean()


class SlowlyFollowed(AnyText):
    """An ambiguous grammar: a millisecond a token, and from the 300th on as long as the gate is closed."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.num_accepted = 0

    def matcher(self) -> GrammarMatcher:
        return self

    def accept(self, token: int) -> bool:
        self.num_accepted += 1
        time.sleep(0.001)
        if self.num_accepted >= 300:
            self._gate.began.set()
            assert self._gate.opened.wait(60)
        return True


def _guide(matcher: AnyText, num_output_ids: int) -> Guide:
    output_ids = np.zeros(num_output_ids, np.int32)
    return Guide(lambda: (matcher, AnyTextBackend.tokens), 64, position=num_output_ids + 1, output_ids=output_ids)


def test_a_long_output_that_is_resumed_holds_up_no_other(gate: Gate) -> None:
    filler = MaskFiller(num_threads=1)
    followed = SlowlyFollowed(gate)
    resumed, other, left = _guide(followed, 1000), _guide(AnyText(), 0), _guide(SlowlyFollowed(gate), 1000)
    filler.begin(resumed)
    filler.begin(left)
    filler.begin(other)
    assert other.wait(30)
    assert gate.began.wait(30) and followed.num_accepted < 1000
    # Nobody waits for this one any more: it is not gone over to its end.
    left.close()
    gate.opened.set()
    assert resumed.wait(60) and followed.num_accepted == 1000
    assert left.wait(60)
