"""Masks of processes beside a worker are those of its own threads, whatever ends a process and whenever."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.guided_runs import MODEL, backend, vocabulary

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.guided.backend import GuidedVocabulary, MaskWords
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.worker.guided import guide as guide_module
from radixmesh.daemons.worker.guided import mask_link, mask_part, process_guides
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller
from radixmesh.daemons.worker.guided.mask_frames import HEAD, Admission, FrameReader, Kind, frame, ints
from radixmesh.daemons.worker.guided.mask_part import MaskPart, OutputRows, PartState, Shared
from radixmesh.daemons.worker.guided.mask_server import MaskServer, ReportedMasks, Reports
from radixmesh.daemons.worker.guided.mask_warm_up import warm_server

pytest.importorskip("xgrammar")
pytest.importorskip("torch")
from support.mask_outputs import NUM_SLOTS, SOURCES, TIMEOUT_S, Outputs, until


@pytest.fixture(scope="module")
def processes() -> Iterator[Outputs]:
    outputs = Outputs()
    yield outputs
    outputs.guides.close()


@pytest.fixture
def outputs(processes: Outputs) -> Outputs:
    """Without any; starting the processes takes seconds."""
    for slot in list(processes.tokens):
        processes.release(slot)
    processes.slots = None
    for part in processes.guides._parts:
        part._ends.clear()
    assert processes.guides.wait_ready(TIMEOUT_S)
    return processes


def test_masks_are_those_of_one_process_and_rows_come_back(outputs: Outputs) -> None:
    outputs.step_amid_changes(30)
    assert len(outputs.guides) == 0


def test_processes_that_end_with_outputs_open_have_successors(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills come at any time, between tokens that are on their way. One that stands still is found by its silence."""
    monkeypatch.setattr(mask_part, "_SILENT_S", 3.0)
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    outputs.step()
    ended = outputs.guides.pids
    for pid, how in zip(ended, (signal.SIGKILL, signal.SIGSTOP), strict=True):
        os.kill(pid, how)
    for _ in range(5):
        outputs.step()
    # Outputs may leave and come meanwhile.
    for slot in range(2):
        outputs.release(slot)
        outputs.admit(slot)
    until(lambda: not set(ended) & set(outputs.guides.pids), "they are replaced")
    outputs.check()
    for _ in range(3):
        outputs.step()
        outputs.check()
    for slot in range(NUM_SLOTS):
        outputs.release(slot)
    until(lambda: outputs.are_rows_free, "no row is lost")


def test_a_report_that_makes_no_sense_ends_its_process_alone(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are another process's."""
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    part, other = outputs.guides._parts
    assert part.link is not None and other.link is not None
    link, ended, others = part.link, part.link.pid, other.link.pid
    data = frame(Kind.PUBLISHED, np.full((3, 1), outputs.memory.rows_a_part, np.int32).tobytes())
    read = link._reader.read
    monkeypatch.setattr(link._reader, "read", lambda _: read(data))
    until(lambda: ended not in outputs.guides.pids, "it is replaced")
    outputs.check()
    assert others in outputs.guides.pids


@pytest.mark.parametrize("data", [frame(Kind.PUBLISHED, b"123"), frame(Kind.FREED, b""), HEAD.pack(8, 1 << 30)])
def test_what_is_no_report_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers without an end, none at all, a frame beyond all bounds: `ProcessGuides` ends the process, as above."""

    class Started:
        pid = 0

        def __init__(self, *_: object, **__: object) -> None:
            return

    monkeypatch.setattr(mask_link.subprocess, "Popen", Started)
    part = MaskPart(Shared(lambda: None), 0, Path(), "xgrammar")
    part.start()
    ours, theirs = socket.socketpair()
    assert part.link is not None
    part.link.socket.close()
    part.link.socket = ours
    with ours, theirs:
        theirs.sendall(data)
        with pytest.raises((ValueError, TypeError)):
            part.take([])


def test_processes_that_keep_ending_fail_their_outputs_alone(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_part, "_REST_S", 0.5)
    # On a loaded machine four processes take longer than that to start, and their ends would be no row.
    monkeypatch.setattr(mask_part, "_ENDS_S", 1e9)
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    part = outputs.guides._parts[0]
    ended = 0
    for _ in range(mask_part.MOST_ENDS + 1):
        assert not outputs.guides.has_errors
        # Those that are not ready yet count too.
        until(lambda ended=ended: part.link is not None and part.link.pid != ended, "it is back")
        assert part.link is not None
        ended = part.link.pid
        os.kill(ended, signal.SIGKILL)
    until(lambda: outputs.guides.has_errors, "they do not wait for ever")
    failed = dict(outputs.guides.errors())
    assert sorted(failed) == [0, 2, 4]
    assert {error.reason for error in failed.values()} == {ErrorReason.ERROR_REASON_NOT_SERVING}
    assert all(outputs.guides.is_late(slot) for slot in failed)
    outputs.guides.wait(failed, None)
    for slot in failed:
        outputs.release(slot)
    outputs.check()
    outputs.step()
    outputs.check()
    until(lambda: part.state is PartState.LIVE, "it is tried again after a rest")
    for slot in failed:
        outputs.admit(slot)
    outputs.check()


def test_a_grammar_that_cannot_be_read_and_a_token_that_is_forbidden_end_their_own_outputs(outputs: Outputs) -> None:
    outputs.admit(0)
    outputs.admit(2)
    outputs.admit(4, blob=b"no artefact")
    outputs.admit(1)
    until(lambda: outputs.guides.has_errors, "it is told")
    assert [(slot, error.reason) for slot, error in outputs.guides.errors()] == [
        (4, ErrorReason.ERROR_REASON_INVALID_GRAMMAR)
    ]
    outputs.release(4)
    outputs.check()
    forbidden = np.full(1, vocabulary().tokenizer.token_to_id("x"), np.int32)
    assert outputs.guides.launched(np.array([0]), lambda: forbidden).acquire(timeout=TIMEOUT_S)
    until(lambda: outputs.guides.has_errors, "it is told")
    assert [slot for slot, _ in outputs.guides.errors()] == [0]
    outputs.release(0)
    outputs.check()


def test_what_nobody_foresaw_ends_the_outputs_of_a_step_and_no_thread(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    with monkeypatch.context() as patched:
        patched.setattr(outputs.guides, "move", lambda *_: 1 // 0)
        ids = np.zeros(2, np.int32)
        assert outputs.guides.launched(np.array([0, 3]), lambda: ids).acquire(timeout=TIMEOUT_S)
    assert sorted(slot for slot, _ in outputs.guides.errors()) == [0, 3]
    for slot in (0, 3):
        outputs.release(slot)
    outputs.step()
    outputs.check()


def test_artefacts_are_sent_once_and_as_many_are_kept_as_have_room(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    until(lambda: outputs.are_rows_free, "nobody has one of the artefacts")
    for part in outputs.guides._parts:
        part._sent.clear()
        assert part.link is not None
        send = part.link.send
        monkeypatch.setattr(
            part.link, "send", lambda data, send=send: (sent.append(HEAD.unpack_from(data)[0]), send(data))
        )
    for _ in range(2):
        for slot in (0, 2, 4):
            outputs.admit(slot)
        outputs.check()
        for slot in (0, 2, 4):
            outputs.release(slot)
    assert sent.count(Kind.GRAMMAR) == 3 and sent.count(Kind.ADMIT) == 6 and Kind.DROP not in sent
    monkeypatch.setattr(mask_part, "_MOST_GRAMMAR_BYTES", 1)
    for slot in (0, 2, 4):
        outputs.admit(slot)
    outputs.check()
    assert sent.count(Kind.GRAMMAR) == 5 and sent.count(Kind.DROP) == 4, sent


class _Watched:
    """A socket; threads: names of those that sent."""

    def __init__(self, inner: socket.socket, threads: set[str]) -> None:
        self._inner, self._threads = inner, threads

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def send(self, data: memoryview) -> int:
        self._threads.add(threading.current_thread().name)
        return self._inner.send(data)


def test_what_is_large_is_sent_by_another_thread_and_in_order(
    outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the steps sends no artefacts of megabytes."""
    monkeypatch.setattr(mask_link, "_MOST_AT_ONCE", 0)
    threads: set[str] = set()
    for part in outputs.guides._parts:
        part._sent.clear()
        link = part.link
        assert link is not None
        monkeypatch.setattr(link, "socket", _Watched(link.socket, threads))
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    for _ in range(4):
        outputs.check()
        outputs.step()
    outputs.check()
    assert threads == {"masks-io"}


def test_masks_of_all_processes_are_copied_at_once(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy asks for the interpreter's lock, which the step thread wants at the same time."""
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    monkeypatch.setattr(process_guides, "_GATHER_S", 1.0)
    published, publish = [], outputs.memory.publish
    monkeypatch.setattr(
        outputs.memory, "publish", lambda rows, positions: (published.append(len(rows)), publish(rows, positions))
    )
    outputs.step()
    outputs.check()
    assert published == [NUM_SLOTS]


def test_a_step_of_the_same_slots_follows_the_outputs_that_have_them_now(outputs: Outputs) -> None:
    """Rows of a step are kept as long as steps have the same array of slots."""
    outputs.admit(0)
    outputs.admit(1)
    slots = np.array([0, 1, 3], np.int32)
    outputs.slots = slots
    for _ in range(3):
        outputs.check()
        outputs.step()
    outputs.check()
    outputs.release(0)
    outputs.admit(0)
    outputs.check()
    outputs.step()
    outputs.check()
    outputs.release(1)
    outputs.admit(3)
    outputs.check()
    for _ in range(3):
        outputs.step()
        outputs.check()


def test_a_server_is_warm_without_outputs_and_one_that_cannot_be_is_none_the_worse() -> None:
    told: list[tuple[Kind, bytes]] = []

    class Told(Reports):
        def send(self, kind: Kind, *parts: bytes) -> None:
            told.append((kind, b"".join(parts)))

    class Broken(type(backend())):  # type: ignore[misc]
        def compile(self, source: GrammarSource) -> bytes:
            raise RuntimeError("no room")

    num_ids = vocabulary().vocab_size
    broken = Broken(GuidedVocabulary.of(vocabulary()))
    artefact = backend().compile(SOURCES[0])
    expected = np.zeros(-(-num_ids // 32), np.int32)
    backend().load(artefact).matcher().fill(expected)
    for library in (backend(), broken):
        server = warm_server(library, num_ids)
        words: MaskWords = np.zeros((2, len(expected)), np.int32)
        server.attach(ReportedMasks(words, Told()))
        told.clear()
        # Row 0 and grammar 1 were those of outputs that nobody asked for.
        server.take(Kind.ADMIT, ints(*Admission(row=0, serial=1, grammar=1, position=4, has_mask=0)))
        until(lambda: bool(told), "it is answered")
        assert [kind for kind, _ in told] == [Kind.FAILED]
        server.take(Kind.GRAMMAR, ints(2) + artefact)
        server.take(Kind.ADMIT, ints(*Admission(row=1, serial=7, grammar=2, position=4, has_mask=0)))
        until(lambda: len(told) > 1, "it is answered")
        assert told[1:] == [(Kind.PUBLISHED, ints(1, 7, 4))]
        assert (words[1] == expected).all() and not words[0].any()


def test_an_output_of_before_that_begins_late_leaves_others_their_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine outputs of the warm-up were still to begin when the worker's came, whose grammar has their
    number."""

    class Nowhere(Reports):
        def send(self, kind: Kind, *parts: bytes) -> None:
            told.append(kind)

    told: list[Kind] = []
    num_words = -(-vocabulary().vocab_size // 32)
    words: MaskWords = np.zeros((2, num_words), np.int32)
    server = MaskServer(backend(), ReportedMasks(words[:1], Nowhere()), vocabulary().vocab_size)
    admit = ints(*Admission(row=0, serial=1, grammar=1, position=1, has_mask=0))
    late: list[Guide] = []
    with monkeypatch.context() as held:
        held.setattr(MaskFiller, "begin", lambda _, guide: late.append(guide))
        server.take(Kind.GRAMMAR, ints(1) + backend().compile(SOURCES[0]))
        server.take(Kind.ADMIT, admit)
    server.attach(ReportedMasks(words[1:], Nowhere()))
    late[0].run()
    artefact = backend().compile(SOURCES[1])
    server.take(Kind.GRAMMAR, ints(1) + artefact)
    server.take(Kind.ADMIT, admit)
    until(lambda: told == [Kind.PUBLISHED] * 2, "both have masks")
    expected: MaskWords = np.zeros(num_words, np.int32)
    backend().load(artefact).matcher().fill(expected)
    assert (words[1] == expected).all() and (words[0] != expected).any()


def test_tokens_that_come_while_a_successor_goes_over_an_output_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before has left the mask behind the output so far: the device samples, however long that takes."""

    class Nowhere(Reports):
        def send(self, kind: Kind, *parts: bytes) -> None:
            told.append((kind, b"".join(parts)))

    told: list[tuple[Kind, bytes]] = []
    num_words = -(-vocabulary().vocab_size // 32)
    words: MaskWords = np.zeros((1, num_words), np.int32)
    server = MaskServer(backend(), ReportedMasks(words, Nowhere()), vocabulary().vocab_size)
    artefact, expected = backend().compile(SOURCES[1]), np.zeros(num_words, np.int32)
    matcher, output_ids = backend().load(artefact).matcher(), []
    for _ in range(6):
        matcher.fill(expected)
        bits = np.unpackbits(expected.view(np.uint8), bitorder="little", count=vocabulary().vocab_size)
        output_ids.append(int(np.flatnonzero(bits)[0]))
        assert matcher.accept(output_ids[-1])
    matcher.fill(expected)
    late: list[Guide] = []
    with monkeypatch.context() as held:
        held.setattr(MaskFiller, "begin", lambda _, guide: late.append(guide))
        server.take(Kind.GRAMMAR, ints(1) + artefact)
        admission = Admission(row=0, serial=1, grammar=1, position=5, has_mask=1)
        server.take(Kind.ADMIT, ints(*admission) + np.array(output_ids[:5], np.int32).tobytes())
        server.take(Kind.TOKENS, ints(0, 1, output_ids[5]))
        # Each look at the clock is one too late.
        held.setattr(guide_module, "_REPLAY_S", -1.0)
        assert late[0].run(), "a slow thread is to go on"
    while late[0].run():
        pass
    assert told == [(Kind.PUBLISHED, ints(0, 1, 6))] and (words[0] == expected).all()


def test_processes_end_with_their_worker(tmp_path: Path) -> None:
    """Killed, it cannot tell them."""
    lines = (
        "import sys, time",
        "from pathlib import Path",
        "from radixmesh.daemons.worker.guided.process_guides import ProcessGuides",
        f"guides = ProcessGuides(2, Path({str(MODEL)!r}), 'xgrammar')",
        "print(*guides.pids, flush=True)",
        "time.sleep(600)",
    )
    worker = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 2
    worker.kill()
    worker.wait()
    until(partial(_are_gone, pids), "nothing survives the worker")


def _are_gone(pids: Sequence[int]) -> bool:
    """Nobody may be there to read their end: the state of such a process is Z."""
    for pid in pids:
        path = Path(f"/proc/{pid}/stat")
        if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z":
            return False
    return True


def test_frames_are_whole_wherever_the_stream_was_cut() -> None:
    data = frame(Kind.READY) + frame(Kind.FREED, b"12345678") + frame(Kind.ALIVE)
    for size in (1, 3, 7, len(data)):
        reader, found = FrameReader(8), []
        for start in range(0, len(data), size):
            found += reader.read(data[start : start + size])
        assert found == [(Kind.READY, b""), (Kind.FREED, b"12345678"), (Kind.ALIVE, b"")]
    with pytest.raises(ValueError, match="9 bytes, 8 at most"):
        list(FrameReader(8).read(frame(Kind.FREED, b"123456789")))


def test_tokens_behind_the_longest_output_change_no_other_row() -> None:
    state = OutputRows(3, 4)
    state.begin(1, 3, np.array([1, 2], np.int32))
    for token in range(5):
        state.add(np.array([1]), np.array([10 + token]))
    assert state.output_of(1).tolist() == [1, 2, 10, 11] and state.output_of(0).tolist() == []
    assert state.known.tolist() == [0, 8, 0]


def test_tokens_behind_the_end_of_an_output_that_a_successor_has_are_read_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process before has left the mask behind the end, which allows all; steps that run already sample by it."""

    class Told(Reports):
        def send(self, kind: Kind, *parts: bytes) -> None:
            told.append((kind, b"".join(parts)))

    told: list[tuple[Kind, bytes]] = []
    words: MaskWords = np.zeros((1, -(-vocabulary().vocab_size // 32)), np.int32)
    server = MaskServer(backend(), ReportedMasks(words, Told()), vocabulary().vocab_size)
    artefact = backend().compile(GrammarSource(GrammarForm.REGEX, "yes"))
    matcher, output_ids = backend().load(artefact).matcher(), []
    while not matcher.is_over:
        matcher.fill(words[0])
        bits = np.unpackbits(words[0].view(np.uint8), bitorder="little", count=vocabulary().vocab_size)
        output_ids.append(int(np.flatnonzero(bits)[-1]))
        assert matcher.accept(output_ids[-1])
    words[0] = -1
    end = 4 + len(output_ids)
    begun: list[Guide] = []
    with monkeypatch.context() as held:
        held.setattr(MaskFiller, "begin", lambda _, guide: begun.append(guide))
        server.take(Kind.GRAMMAR, ints(1) + artefact)
        admission = Admission(row=0, serial=1, grammar=1, position=end, has_mask=1)
        server.take(Kind.ADMIT, ints(*admission) + np.array(output_ids, np.int32).tobytes())
    begun[0].run()
    for number in range(2):
        server.take(Kind.TOKENS, ints(0, 1, 7))
        until(lambda number=number: len(told) > number, "it is answered")
    assert told == [(Kind.PUBLISHED, ints(0, 1, end + 1)), (Kind.PUBLISHED, ints(0, 1, end + 2))]
