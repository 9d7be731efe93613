"""Outputs that go on in one step share the library's calls; time that nobody computes makes none of them a slow one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from support.grammars import AnyText, AnyTextBackend

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, MaskWords
from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit
from radixmesh.daemons.worker.guided import guide as guide_module
from radixmesh.daemons.worker.guided import mask_filler, shared_calls
from radixmesh.daemons.worker.guided.guide import SLOW_S, Guide
from radixmesh.daemons.worker.guided.guides import SlotGuides
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.shared_calls import run_together

VOCAB_SIZE = 8192


class Counted(AnyText):
    """Allows the last token that came and id 8000. Every call is noted; waiting and computing take their seconds."""

    def __init__(self, calls: list[int], wait_s: float = 0.0, compute_s: float = 0.0) -> None:
        self.calls, self.wait_s, self.compute_s = calls, wait_s, compute_s
        self.token = 0
        self.is_empty = False
        self.memory: MaskWords | None = None

    def accept(self, token: int) -> bool:
        self.token = token
        return True

    def fill(self, words: MaskWords) -> None:
        self.calls.append(1)
        self._fill(words)

    def _fill(self, words: MaskWords) -> None:
        time.sleep(self.wait_s)
        ends_s = time.thread_time() + self.compute_s
        while time.thread_time() < ends_s:
            pass
        assert self.memory is None or np.shares_memory(words, self.memory), "filled where it is copied from"
        words[:] = 0
        if not self.is_empty:
            for token in (self.token, 8000):
                words[token // 32] |= 1 << (token % 32)

    @staticmethod
    def fill_all(matchers: Sequence[GrammarMatcher], words: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
        for number, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            assert isinstance(matcher, Counted)
            if not number:
                matcher.calls.append(len(matchers))
            matcher._fill(words[row])


def _guide(matcher: Counted) -> Guide:
    guide = Guide(lambda: (matcher, AnyTextBackend.tokens), VOCAB_SIZE, position=1, output_ids=np.zeros(0, np.int32))
    guide.run()
    return guide


def _run(guides: Sequence[Guide]) -> None:
    shared, alone = Guide.begin([(guide, [3]) for guide in guides])
    assert len(shared) + len(alone) == len(guides) and not run_together(shared, alone).slow


def test_waiting_makes_no_output_slow_and_calls_stay_shared() -> None:
    calls: list[int] = []
    guides = [_guide(Counted(calls, wait_s=2 * SLOW_S)) for _ in range(8)]
    calls.clear()
    for _ in range(3):
        _run(guides)
    assert calls == [8, 8, 8]
    assert not any(guide.is_slow or guide.is_suspect for guide in guides)


def test_an_output_that_computes_long_is_found_among_others() -> None:
    calls: list[int] = []
    matchers = [Counted(calls) for _ in range(8)]
    guides = [_guide(matcher) for matcher in matchers]
    matchers[5].compute_s = 10 * SLOW_S
    _run(guides)
    assert all(guide.is_suspect for guide in guides)
    _run(guides)
    assert [index for index, guide in enumerate(guides) if guide.is_slow] == [5]


def test_heavy_masks_that_are_none_of_them_slow_stay_together() -> None:
    calls: list[int] = []
    guides = [_guide(Counted(calls, compute_s=SLOW_S / 4)) for _ in range(16)]
    assert not any(guide.is_slow for guide in guides)
    calls.clear()
    for _ in range(3):
        _run(guides)
    assert calls == [16, 16, 16]


def _in_slot(slot: int) -> Admit:
    ids = np.ones(1, np.int32)
    return Admit(slot=slot, generation=1, request_id=str(slot), prompt_ids=ids, max_total_len=64, sampling=Sampling())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_masks_of_a_device_are_written_where_it_reads_them(num_threads: int) -> None:
    """A few calls a step; a mask without a token ends its own output, whose position is not told."""
    pytest.importorskip("torch")
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks

    calls: list[int] = []
    num = 24
    masks = SlotMasks(HostDevice(), num_slots=num, max_rows=num, vocab_size=VOCAB_SIZE)
    matchers = [Counted(calls) for _ in range(num)]
    for matcher in matchers:
        matcher.memory = masks.words
    sinks = [masks.sink(_in_slot(slot)) for slot in range(num)]
    guides = [
        Guide(
            lambda matcher=matcher: (matcher, AnyTextBackend.tokens),  # type: ignore[misc]
            VOCAB_SIZE,
            position=1,
            output_ids=np.zeros(0, np.int32),
            sink=sink,
        )
        for matcher, sink in zip(matchers, sinks, strict=True)
    ]
    filler = MaskFiller(num_threads)
    for guide in guides:
        filler.begin(guide)
    assert all(guide.wait(60) for guide in guides)
    calls.clear()
    matchers[7].is_empty = True
    filler.follow([(guide, (100 + slot,)) for slot, guide in enumerate(guides)])
    assert all(guide.wait(60) for guide in guides)
    assert calls == num_threads * [num // num_threads]
    assert [slot for slot, guide in enumerate(guides) if guide.error is not None] == [7]
    for slot, sink in enumerate(sinks):
        bits = np.flatnonzero(np.unpackbits(masks.words[sink.row].view(np.uint8), bitorder="little"))
        assert bits.tolist() == ([] if slot == 7 else [100 + slot, 8000])
        assert masks.positions[sink.row] == (1 if slot == 7 else 2)
    # The lowest id of a mask may be far behind the first words.
    filler.follow([(guide, (7000,)) for guide in guides])
    assert all(guide.wait(60) for guide in guides)
    assert [int(masks.positions[sink.row]) for sink in sinks] == [1 if slot == 7 else 3 for slot in range(num)]


def test_masks_of_a_first_group_are_there_before_those_of_the_next_are_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each time another group is the last one, whose masks may be late."""
    pytest.importorskip("torch")
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks

    for module in (guide_module, shared_calls):
        monkeypatch.setattr(module, "SLOW_S", 60.0)
    monkeypatch.setattr(mask_filler, "_GROUP_THREADS", 0)
    num = 300
    calls: list[int] = []
    groups: list[tuple[int, ...]] = []
    masks = SlotMasks(HostDevice(), num_slots=num, max_rows=num, vocab_size=VOCAB_SIZE)
    guides = []
    for slot in range(num):
        sink, matcher = masks.sink(_in_slot(slot)), Counted(calls)
        start = lambda matcher=matcher: (matcher, AnyTextBackend.tokens)  # noqa: E731
        guides.append(Guide(start, VOCAB_SIZE, position=1, output_ids=np.zeros(0, np.int32), sink=sink))
        guides[-1].run()
    filler, publish = MaskFiller(1), masks.publish

    def note(rows: Sequence[int], positions: Sequence[int]) -> None:
        groups.append(tuple(rows))
        assert len(calls) == len(groups), "no further masks have been begun"
        publish(rows, positions)

    masks.publish = note  # type: ignore[method-assign]
    last_rows = []
    for step in range(3):
        calls.clear()
        groups.clear()
        filler.follow_here([(guide, (step,)) for guide in guides])
        assert calls == [100, 100, 100]
        assert sorted(row for rows in groups for row in rows) == list(range(num))
        assert (masks.positions[:num] == 2 + step).all()
        last_rows.append(groups[-1])
    assert len(set(last_rows)) == 3


@pytest.mark.parametrize("num", [100, 300, 600])
def test_groups_are_shared_with_another_thread_and_all_are_through(num: int) -> None:
    pytest.importorskip("torch")
    from radixmesh.daemons.worker.cuda.device import HostDevice
    from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks

    masks, guides = SlotMasks(HostDevice(), num_slots=num, max_rows=num, vocab_size=VOCAB_SIZE), []
    threads: dict[int, set[int]] = {}
    for slot in range(num):
        start = lambda: (Counted([]), AnyTextBackend.tokens)  # noqa: E731
        sink = masks.sink(_in_slot(slot))
        guides.append(Guide(start, VOCAB_SIZE, position=1, output_ids=np.zeros(0, np.int32), sink=sink))
        guides[-1].run()
    filler, publish = MaskFiller(1), masks.publish

    def note(rows: Sequence[int], positions: Sequence[int]) -> None:
        threads.setdefault(threading.get_ident(), set()).update(rows)
        publish(rows, positions)

    masks.publish = note  # type: ignore[method-assign]
    for step in range(3):
        threads.clear()
        filler.follow_here([(guide, (step,)) for guide in guides])
        assert (masks.positions[:num] == 2 + step).all() and all(guide.is_ready for guide in guides)
        assert threading.get_ident() in threads and len(threads) == (1 if num == 100 else 2)


def test_the_step_thread_leaves_the_interpreter_to_the_masks_for_a_part_of_a_step_alone() -> None:
    """It waits until the step's masks are there, and not for a device that is silent."""
    guides, known = SlotGuides(VOCAB_SIZE), threading.Event()

    def tokens() -> IntArray:
        known.wait(60)
        return np.zeros(1, np.int32)

    through = guides.launched([0], tokens)
    guides.let_follow(through)
    assert through.locked(), "it did not wait for what is not known"
    known.set()
    through = guides.launched([0], tokens)
    assert through.acquire(timeout=60)


def test_a_step_that_dies_is_through() -> None:
    guides = SlotGuides(VOCAB_SIZE)

    def tokens() -> IntArray:
        raise RuntimeError("the device failed")

    through = guides.launched([0], tokens)
    assert through.acquire(timeout=60)


@pytest.mark.parametrize("is_here", [False, True])
def test_what_nobody_foresaw_ends_its_outputs_with_a_reason_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    guides = [_guide(Counted([])) for _ in range(4)]
    filler = MaskFiller(num_threads=1)
    follow = filler.follow_here if is_here else filler.follow
    with monkeypatch.context() as patched:
        patched.setattr(shared_calls, "_where_to_fill", lambda *_: 1 // 0)
        follow([(guide, (3,)) for guide in guides[:2]])
        assert all(guide.wait(60) for guide in guides[:2])
    for guide in guides[:2]:
        assert guide.error is not None and guide.error.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR
        assert "division" in guide.error.message and not guide.is_ready
        guide.close()
    follow([(guide, (3,)) for guide in guides[2:]])
    assert all(guide.wait(60) and guide.is_ready for guide in guides[2:])


def test_what_nobody_foresaw_in_a_step_ends_its_outputs_and_the_next_one_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guides = SlotGuides(VOCAB_SIZE)
    matchers = [_guide(Counted([])) for _ in range(2)]
    guides._guides.update(enumerate(matchers))
    for raises in (lambda: 1 // 0, lambda: np.zeros((), np.int32)):  # No tokens, and no row of them.
        assert guides.launched(np.array([0]), raises).acquire(timeout=60)  # type: ignore[arg-type]
    assert [slot for slot, _ in guides.errors()] == [0]
    assert guides.launched(np.array([1]), lambda: np.array([3], np.int32)).acquire(timeout=60)
    assert matchers[1].wait(60) and matchers[1].is_ready and not guides.is_late(1)
