"""Grammars that slots name: pinned as long as the slot has its request, and one that is missing fails its slot once."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from support.plans import admit

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.plans.slots.slot_blobs import SlotBlobs

DATA = b"grammar"
HASH = hashlib.sha256(DATA).hexdigest()


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.store = BlobStore(max_bytes=64, max_blob_bytes=64, ttl_s=1.0, clock=lambda: self.now)
        self.blobs = SlotBlobs(self.store)
        self.store.put(HASH, DATA)

    def is_pinned(self) -> bool:
        """True if it stays, though its time is over and another one needs the room."""
        self.now += 2.0
        other = bytes(60)
        try:
            self.store.put(hashlib.sha256(other).hexdigest(), other)
        except MeshError:
            return True
        return False


def test_a_slots_grammar_is_pinned_until_its_release() -> None:
    world = World()
    assert world.blobs.admitted(replace(admit(3, [5]), grammar_hash=HASH)) == DATA
    assert world.is_pinned()
    world.blobs.released(3)
    assert not world.is_pinned() and world.blobs.take_errors() == ()


def test_an_epoch_that_begins_frees_all_grammars() -> None:
    world = World()
    world.blobs.admitted(replace(admit(3, [5]), grammar_hash=HASH))
    world.blobs.fail(4, 1, MeshError(ErrorReason.ERROR_REASON_UNKNOWN_BLOB, "gone"))
    world.blobs.begin_epoch()
    assert not world.is_pinned() and not world.blobs.failed and world.blobs.take_errors() == ()


def test_a_missing_grammar_fails_its_slot_once() -> None:
    world = World()
    asked = replace(admit(3, [5], generation=7), grammar_hash="0" * 64)
    assert world.blobs.admitted(asked) == b"" and list(world.blobs.failed) == [3]
    world.blobs.fail(3, 7, MeshError(ErrorReason.ERROR_REASON_INTERNAL, "again"))
    (error,) = world.blobs.take_errors()
    assert (error.slot, error.generation, error.error.reason_name) == (3, 7, "UNKNOWN_BLOB")
    assert world.blobs.take_errors() == ()
    world.blobs.released(3)
    assert not world.blobs.failed


def test_no_slot_names_a_grammar_where_there_is_no_store() -> None:
    blobs = SlotBlobs(None)
    assert blobs.admitted(replace(admit(3, [5]), grammar_hash=HASH)) == b""
    blobs.released(3)
    blobs.begin_epoch()
    assert World().blobs.admitted(admit(3, [5])) == b"", "it names none"
