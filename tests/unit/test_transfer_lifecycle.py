"""The lifecycle of a KV transfer under lost, repeated and late messages: no writer ever finds its memory given away."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.kv_transfer.lifecycle import Emission, Failure, ReceiveState, Reception, SendState
from radixmesh.daemons.worker.kv_transfer.staging import (
    STAMP_BYTES,
    RegionKey,
    StagingPool,
    chunks_of,
    has_stamps,
    region_bytes,
)
from radixmesh.worker.v1 import worker_pb2


class _Slot:
    """A piece of memory as a remote writer sees it: whoever was told of it can write there at any time."""

    def __init__(self, lease_until: float, *, is_seen: bool) -> None:
        self.reception = Reception(lease_until, writes_are_seen=is_seen)
        self.is_seen = is_seen
        self.alive: set[str] = set()
        self.is_scattering = False


class TransferMachine(RuleBasedStateMachine):
    """Writers begin, stop, wake up late, die and repeat themselves in any order, with leases that run out meanwhile."""

    slots = Bundle("slots")

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.all: list[_Slot] = []

    @rule(target=slots, lease=st.integers(1, 5), is_seen=st.booleans())
    def prepare(self, lease: int, is_seen: bool) -> _Slot:
        slot = _Slot(self.now + lease, is_seen=is_seen)
        if not is_seen:
            slot.alive.add("a")  # It was told of the region, and may write without a word.
        self.all.append(slot)
        return slot

    @rule(slot=slots, writer=st.sampled_from("ab"))
    def write(self, slot: _Slot, writer: str) -> None:
        if not slot.is_seen and writer == "b":
            return
        is_new = slot.reception.state is ReceiveState.PREPARED
        if slot.reception.begin_write(writer):
            assert is_new
            slot.alive.add(writer)
        assert not slot.reception.may_write(writer) or writer in slot.alive

    @rule(slot=slots, writer=st.sampled_from("ab"), is_done=st.booleans())
    def last_word(self, slot: _Slot, writer: str, is_done: bool) -> None:
        if writer != slot.reception.writer:
            slot.reception.last_word(writer, is_done=is_done)  # A word of somebody who never began.
            return
        slot.alive.discard(writer)
        slot.reception.last_word(writer, is_done=is_done)

    @rule(slot=slots, writer=st.sampled_from("ab"))
    def die(self, slot: _Slot, writer: str) -> None:
        if writer == slot.reception.writer:
            slot.alive.discard(writer)
        slot.reception.writer_gone(writer)

    @rule(slot=slots)
    def break_contract(self, slot: _Slot) -> None:
        slot.reception.bad_write("a")

    @rule(slot=slots)
    def copy_a_piece(self, slot: _Slot) -> None:
        """Ahead of the last word."""
        may_begin = slot.reception.state is ReceiveState.WRITING and not slot.is_scattering
        assert slot.reception.begin_piece() == may_begin
        slot.is_scattering |= may_begin

    @rule(slot=slots)
    def give_a_commit_up(self, slot: _Slot) -> None:
        """Its copies have run; the rest will not be asked for."""
        if slot.is_scattering and slot.reception.state is not ReceiveState.SCATTERING:
            slot.is_scattering = False
            slot.reception.scattered(Failure.ABORTED)
            assert slot.reception.is_over

    @rule(slot=slots)
    def commit(self, slot: _Slot) -> None:
        if slot.reception.begin_scatter(has_pieces=slot.is_scattering):
            slot.is_scattering = True
            assert slot.reception.failure is Failure.NONE

    @rule(slot=slots, failure=st.sampled_from([Failure.NONE, Failure.STAMP]))
    def scattered(self, slot: _Slot, failure: Failure) -> None:
        if slot.is_scattering and slot.reception.state not in (ReceiveState.WRITING, ReceiveState.WRITTEN):
            slot.is_scattering = False
            slot.reception.scattered(failure)

    @rule(slot=slots, failure=st.sampled_from([Failure.ABORTED, Failure.EPOCH_ENDED]))
    def abort(self, slot: _Slot, failure: Failure) -> None:
        slot.reception.abort(failure)

    @rule(slot=slots, lease=st.integers(-3, 5))
    def renew(self, slot: _Slot, lease: int) -> None:
        before = slot.reception.lease_until
        slot.reception.renew(self.now + lease)
        assert slot.reception.lease_until >= before

    @rule(step=st.integers(1, 4))
    def pass_time(self, step: int) -> None:
        self.now += step
        for slot in self.all:
            slot.reception.expire(self.now)

    @rule(slot=consumes(slots))
    def forget(self, slot: _Slot) -> None:
        """Nothing more comes for it: what is quarantined stays so."""

    @invariant()
    def memory_is_free_only_when_nobody_uses_it(self) -> None:
        for slot in self.all:
            reception = slot.reception
            if reception.is_memory_free:
                assert not slot.alive and not slot.is_scattering, "somebody may still write or read there"
            if reception.is_over and not slot.alive and not slot.is_scattering:
                assert reception.is_memory_free, "leaked"
            assert (reception.failure is Failure.NONE) == (reception.state is not ReceiveState.FAILED)
            if reception.state in (ReceiveState.WRITTEN, ReceiveState.VALIDATED):
                assert not slot.alive


TransferMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestTransfers = TransferMachine.TestCase


def test_a_writer_that_comes_back_late_finds_its_region_given_up_and_held() -> None:
    seen = Reception(10.0, writes_are_seen=True)
    assert not seen.expire(9.9) and seen.expire(10.0) and not seen.expire(11.0)
    assert seen.is_memory_free, "nobody has begun, and nobody can"
    assert not seen.begin_write("a")
    remote = Reception(10.0, writes_are_seen=False)
    assert remote.expire(11.0) and remote.is_quarantined
    written = Reception(10.0, writes_are_seen=True)
    assert written.begin_write("a") and written.expire(12.0)
    assert written.is_quarantined and not written.may_write("a")
    written.last_word("a", is_done=True)
    assert written.is_memory_free and written.failure is Failure.LEASE_EXPIRED


@pytest.mark.parametrize("failure", [Failure.NONE, Failure.STAMP])
def test_a_region_is_free_again_once_it_was_scattered(failure: Failure) -> None:
    reception = Reception(10.0, writes_are_seen=True)
    assert reception.begin_write("a")
    reception.last_word("a", is_done=True)
    assert reception.begin_scatter() and not reception.is_memory_free
    reception.scattered(failure)
    assert reception.is_over and reception.is_memory_free and not reception.is_quarantined


def test_the_first_failure_is_the_one_that_is_told() -> None:
    reception = Reception(10.0, writes_are_seen=True)
    reception.begin_write("a")
    reception.writer_gone("a")
    reception.abort()
    assert (reception.state, reception.failure) == (ReceiveState.FAILED, Failure.WRITER_GONE)


def test_a_region_is_nobody_elses_while_a_piece_of_it_is_copied() -> None:
    reception = Reception(10.0, writes_are_seen=True)
    assert not reception.begin_piece(), "nothing has come"
    reception.begin_write("a")
    assert reception.begin_piece() and reception.is_read and not reception.begin_piece(), "another commit's"
    assert reception.expire(10.0), "it is on its way yet, and its lease has to be renewed"
    reception.writer_gone("a")
    assert reception.is_quarantined and not reception.begin_piece()
    reception.scattered(Failure.ABORTED)
    assert reception.is_memory_free and reception.failure is Failure.LEASE_EXPIRED


def test_an_abort_during_the_scatter_waits_for_it() -> None:
    reception = Reception(10.0, writes_are_seen=True)
    reception.begin_write("a")
    reception.last_word("a", is_done=True)
    assert reception.begin_scatter()
    reception.abort()
    assert reception.is_quarantined
    reception.scattered(Failure.NONE)
    assert reception.is_memory_free and reception.state is ReceiveState.FAILED


def test_a_send_buffer_stays_while_the_transport_reads_it() -> None:
    emission = Emission()
    assert emission.holds_pages and emission.is_buffer_free
    assert emission.gathered() and not emission.holds_pages
    emission.abort()
    assert not emission.is_buffer_free
    emission.handle_over(is_sent=True)
    assert emission.is_buffer_free and emission.state is SendState.FAILED
    late = Emission()
    late.abort()
    assert not late.gathered() and late.is_buffer_free


def test_names_are_those_of_the_contract() -> None:
    for failure in Failure:
        name = worker_pb2.TransferFailure.Name(int(failure))  # type: ignore[arg-type]
        assert name in (f"TRANSFER_FAILURE_{failure.name}", "TRANSFER_FAILURE_UNSPECIFIED")
    for state in ReceiveState:
        if state is not ReceiveState.SCATTERING:
            assert worker_pb2.TransferState.Name(int(state)) == f"TRANSFER_STATE_{state.name}"  # type: ignore[arg-type]


def test_staging_is_bounded_and_given_back() -> None:
    pool = StagingPool(1000)
    pool.take(600)
    with pytest.raises(MeshError, match="600 of 1000"):
        pool.take(600)
    with pytest.raises(MeshError, match="1001 bytes"):
        pool.take(1001)
    pool.give_back(600)
    pool.take(1000)
    assert pool.num_bytes == 1000


def test_stamps_tell_regions_apart_and_chunks_cover_all_tokens() -> None:
    key = RegionKey(transfer_id="t", incarnation=1, instance_id="w", epoch=3)
    others = [
        RegionKey(transfer_id="u", incarnation=1, instance_id="w", epoch=3),
        RegionKey(transfer_id="t", incarnation=2, instance_id="w", epoch=3),
        RegionKey(transfer_id="t", incarnation=1, instance_id="x", epoch=3),
        RegionKey(transfer_id="t", incarnation=1, instance_id="w", epoch=4),
    ]
    memory = np.zeros(region_bytes(600, 8), np.uint8)
    assert not has_stamps(memory, key.stamp())
    memory[:STAMP_BYTES] = memory[-STAMP_BYTES:] = np.frombuffer(key.stamp(), np.uint8)
    assert has_stamps(memory, key.stamp())
    assert not any(has_stamps(memory, other.stamp()) for other in others)
    chunks = list(chunks_of(600, 8))
    assert [(chunk.first, chunk.num) for chunk in chunks] == [(0, 256), (256, 256), (512, 88)]
    assert chunks[-1].offset + chunks[-1].num * 8 + STAMP_BYTES == len(memory)
