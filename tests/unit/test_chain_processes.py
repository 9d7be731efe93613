"""Chains of processes beside a worker: what the device reads is right at any moment, whatever ends a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from support.guided_runs import backend, vocabulary

from radixmesh.daemons.worker.guided.chain import HEAD, ChainShape
from radixmesh.daemons.worker.guided.mask_frames import INT, Admission, Kind, ints
from radixmesh.daemons.worker.guided.mask_server import MaskServer, ReportedChains, Reports

pytest.importorskip("xgrammar")
pytest.importorskip("torch")
from support.mask_outputs import FORCING, MAX_DRAFTS, NUM_SLOTS, SOURCES, TIMEOUT_S, ChainOutputs, until


@pytest.fixture(scope="module")
def processes() -> Iterator[ChainOutputs]:
    outputs = ChainOutputs()
    yield outputs
    outputs.guides.close()


@pytest.fixture
def outputs(processes: ChainOutputs) -> ChainOutputs:
    """Without any; starting the processes takes seconds."""
    for slot in list(processes.tokens):
        processes.release(slot)
    processes.most = 0
    assert processes.guides.wait_ready(TIMEOUT_S)
    return processes


def _grown(outputs: ChainOutputs, slot: int) -> bool:
    """A step would draft for the slot as much as it may."""
    return len(outputs.chain_of(slot)[1]) >= MAX_DRAFTS


def test_rows_yield_what_is_forced_at_once_and_come_back(outputs: ChainOutputs) -> None:
    outputs.step_amid_changes(40)


def test_chains_grow_beside_steps_and_are_followed(outputs: ChainOutputs) -> None:
    """Of 26 letters in a row, each step yields as many as it may draft, and one."""
    outputs.admit(1)
    outputs.check()
    outputs.step()
    for _ in range(5):
        until(lambda: _grown(outputs, 1) or len(outputs.tokens[1]) > 20, "it grows while nothing comes")
        outputs.step()
        outputs.check()
    assert outputs.most == 1 + MAX_DRAFTS


def test_a_process_that_ends_in_the_middle_of_chains_has_a_successor(outputs: ChainOutputs) -> None:
    """Killed while chains grow: what is published stays right, and the next process goes on from there."""
    for slot in range(NUM_SLOTS):
        outputs.admit(slot)
    outputs.check()
    outputs.step()
    (killed,) = outputs.guides.pids
    for number in range(4):
        outputs.step()
        if number == 1:
            os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in outputs.guides.pids, "it is replaced")
    outputs.check()
    for _ in range(10):
        outputs.step()
        outputs.check()
    for slot in range(NUM_SLOTS):
        outputs.release(slot)
    until(lambda: outputs.are_rows_free, "no row is lost")


class _Told(Reports):
    def __init__(self) -> None:
        self.frames: list[tuple[Kind, bytes]] = []

    def send(self, kind: Kind, *parts: bytes) -> None:
        self.frames.append((kind, b"".join(parts)))


def _server(num_rows: int = 2) -> tuple[MaskServer, ReportedChains, _Told]:
    told = _Told()
    shape = ChainShape(num_rows, 2 * MAX_DRAFTS + 1, -(-vocabulary().vocab_size // 32))
    chains = ReportedChains(np.zeros(shape.num_ints, np.int32), shape, told)
    return MaskServer(backend(), chains, vocabulary().vocab_size), chains, told


def _heads(chains: ReportedChains, row: int) -> list[int]:
    """Of the chain that is published: position, number of ids, ids."""
    head = chains.heads[2 * row + int(chains.versions[row, 0]) % 2].tolist()
    return head[: HEAD + head[1]]


def test_a_chain_is_moved_where_its_ids_come_and_begun_anew_where_others_do() -> None:
    server, chains, told = _server()
    server.take(Kind.GRAMMAR, ints(1) + backend().compile(FORCING[1]))
    server.take(Kind.ADMIT, ints(*Admission(row=1, serial=7, grammar=1, position=4, has_mask=0)))
    until(lambda: len(told.frames) == 1, "it is there")
    digit = vocabulary().tokenizer.token_to_id("3")
    server.take(Kind.TOKENS, ints(1, 7, digit))
    until(lambda: _heads(chains, 1)[1] == chains.max_forced, "it grows as far as there is room")
    first, second, third, *_ = ids = _heads(chains, 1)[HEAD:]
    server.take(Kind.TOKENS, ints(1, 7, first, 1, 7, second))
    until(lambda: _heads(chains, 1)[0] == 7 and _heads(chains, 1)[1] == chains.max_forced, "it is longer again")
    assert _heads(chains, 1)[HEAD : HEAD + len(ids) - 2] == ids[2:]
    assert [np.frombuffer(payload, np.int32).tolist() for _, payload in told.frames] == [[1, 7, at] for at in (4, 5, 7)]
    # The same text, cut in another way.
    text = vocabulary().tokenizer.decode([third])
    other = vocabulary().tokenizer.token_to_id(text[0])
    if len(text) > 1 and other is not None:
        server.take(Kind.TOKENS, ints(1, 7, other))
        until(lambda: _heads(chains, 1)[0] == 8, "a mask of its own")
        matcher = backend().load(backend().compile(FORCING[1])).matcher()
        assert all(matcher.accept(token) for token in (digit, first, second, other))
        words = np.zeros(chains.words.shape[1], np.int32)
        matcher.fill(words)
        assert (chains.mask(1, 0) == words).all()
    assert not chains.versions[0].any(), "no other row was touched"


def test_chains_that_grow_give_way_to_tokens_of_other_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tokens come for all outputs, and their masks are wanted ahead of what may follow."""
    server, chains, told = _server()
    server.take(Kind.GRAMMAR, ints(1) + backend().compile(FORCING[1]))
    for row in range(2):
        server.take(Kind.ADMIT, ints(*Admission(row=row, serial=1, grammar=1, position=4, has_mask=0)))
    until(lambda: len(told.frames) == 2, "both are there")
    grow, digit = chains.grow, vocabulary().tokenizer.token_to_id("3")

    def grow_and_sample(row: int, number: int, token: int) -> None:
        grow(row, number, token)
        if row == 0 and number == 1:
            server.take(Kind.TOKENS, ints(1, 1, digit))

    monkeypatch.setattr(chains, "grow", grow_and_sample)
    server.take(Kind.TOKENS, ints(0, 1, digit))
    until(lambda: _heads(chains, 1)[1] == chains.max_forced, "the other one grows")
    assert _heads(chains, 0)[:2] == [5, 2], "two ids were there by then"


def test_a_successor_goes_on_from_whatever_the_one_before_has_written() -> None:
    """Ended half-way through a chain; or having written what is none."""
    server, chains, told = _server()
    server.take(Kind.GRAMMAR, ints(1) + backend().compile(FORCING[1]))
    nonsense = ((3, 4), (2**31 - 1, -5), (-7, 0))
    for serial, versions in enumerate(nonsense, 1):
        chains.versions[0] = versions
        chains.heads[:2] = -(10**9)
        told.frames.clear()
        server.take(Kind.ADMIT, ints(*Admission(row=0, serial=serial, grammar=1, position=4, has_mask=1)))
        until(lambda: bool(told.frames), "it is there")
        assert _heads(chains, 0) == [4, 0] and chains.versions[0, 0] > 0
        assert chains.versions[0, 1] == chains.versions[0, 0]
        server.take(Kind.CLOSE, ints(0, serial))


def test_masks_of_many_chains_are_filled_by_one_call() -> None:
    """Of outputs at a choice: a call an output would take the interpreter's lock of the process a few times each."""
    server, _, told = _server(8)
    server.take(Kind.GRAMMAR, ints(1) + backend().compile(SOURCES[1]))
    for row in range(8):
        server.take(Kind.ADMIT, ints(*Admission(row=row, serial=1, grammar=1, position=4, has_mask=0)))
    digit, num_outputs = vocabulary().tokenizer.token_to_id("3"), 0
    until(lambda: len(told.frames) == 8, "all are there")
    # The threads of their first masks may be about to let go of them.
    while num_outputs < 8:
        told.frames.clear()
        server.take(Kind.TOKENS, ints(*(number for row in range(8) for number in (row, 1, digit))))
        until(lambda: sum(len(payload) for _, payload in told.frames) == 8 * 3 * INT, "they go on")
        num_outputs = max(len(payload) // (3 * INT) for _, payload in told.frames)
