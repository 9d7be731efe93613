"""Blobs: pinned by slots, kept for a while after a put, bounded; one that is missing fails its slot alone."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.grammars import AnyText, AnyTextBackend, any_text_store
from support.planner_world import World
from support.plans import Steps, admit, chunk, grant, simulated_executor

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import CompiledGrammar
from radixmesh.daemons.runtime.sampling import Stop
from radixmesh.daemons.runtime.steps.step import Admit, NoToken, Release, SlotError
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: BlobStore, data: bytes) -> str:
    name = hash_of(data)
    store.put(name, data)
    return name


def refusal(store: BlobStore, data: bytes) -> str:
    with pytest.raises(MeshError) as caught:
        store.put(hash_of(data), data)
    return caught.value.reason_name


def has(store: BlobStore, name: str) -> bool:
    try:
        store.pin(name)
    except MeshError as error:
        assert (error.reason_name, error.metadata) == ("UNKNOWN_BLOB", {"hash": name})
        return False
    store.unpin(name)
    return True


def test_a_blob_that_no_slot_has_named_yet_is_kept_for_its_time_within_the_epoch() -> None:
    clock = Clock()
    store = BlobStore(max_bytes=20, max_blob_bytes=10, ttl_s=30.0, clock=clock)
    a, b = put(store, b"a" * 10), put(store, b"b" * 10)
    assert refusal(store, b"c" * 10) == "OVERLOADED"
    clock.now += 20
    assert store.put(a, b"a" * 10), "it was there: its time begins anew"
    clock.now += 11
    c = put(store, b"c" * 10)
    assert store.num_bytes == 20 and has(store, a) and has(store, c) and not has(store, b)
    put_again = BlobStore(max_bytes=10, max_blob_bytes=10, clock=clock)
    put(put_again, b"a" * 10)
    put_again.begin_epoch()
    put(put_again, b"b" * 10)


def test_what_a_slot_names_stays_and_of_the_others_the_least_recently_named_goes() -> None:
    clock = Clock()
    store = BlobStore(max_bytes=30, max_blob_bytes=10, ttl_s=1.0, clock=clock)
    a, b, c = (put(store, bytes([64 + i]) * 10) for i in range(3))
    clock.now += 60
    assert store.pin(a) == store.pin(a) == b"@" * 10 and has(store, b)
    d = put(store, b"d" * 10)
    assert not has(store, c)
    clock.now += 60
    store.unpin(a)
    e, f = put(store, b"e" * 10), put(store, b"f" * 10)
    assert has(store, a) and has(store, e) and has(store, f) and not has(store, b) and not has(store, d)


def test_the_store_is_bounded_in_bytes_and_number() -> None:
    store = BlobStore(max_bytes=1000, max_blob_bytes=500, max_blobs=3)
    for i in range(3):
        put(store, bytes([i]))
    assert refusal(store, b"four") == "OVERLOADED" and refusal(store, b"x" * 501) == "BLOB_TOO_LARGE"
    store.begin_epoch()
    put(store, b"four")
    assert store.num_bytes == 2 + 4


class GrammarRunner(SimulatedRunner):
    takes_grammars = True


def guided(slot: int, blob_hash: str, **fields: object) -> Admit:
    return replace(admit(slot, [5, 6, 7], **fields), grammar_hash=blob_hash)


def test_a_slot_pins_its_blob_and_one_without_it_fails_alone() -> None:
    clock = Clock()
    store = BlobStore(max_bytes=10, max_blob_bytes=10, ttl_s=1.0, clock=clock)
    steps = Steps(simulated_executor(runner_class=GrammarRunner, blobs=store, grammars=any_text_store()))
    here, gone = put(store, b"any/1\n0123"), hash_of(b"elsewhere")
    first = steps.run(
        admits=(guided(0, here), guided(1, gone), admit(2, [5, 6, 7])),
        grants=tuple(grant(slot, range(8 * slot, 8 * slot + 8)) for slot in range(3)),
        chunks=tuple(chunk(slot, 3) for slot in range(3)),
    )
    assert first.counts.tolist() == [1, 0, 1] and len(first.ids) == 2
    assert first.no_token_reasons.tolist() == [NoToken.HAS_TOKENS, NoToken.SLOT_ERROR, NoToken.HAS_TOKENS]
    assert [(e.slot, e.generation, e.error.reason_name) for e in first.slot_errors] == [(1, 1, "UNKNOWN_BLOB")]
    second = steps.run(decodes=[0, 1, 2])
    assert second.counts.tolist() == [1, 0, 1] and not second.slot_errors, "told once"
    assert second.ids[0] == second.ids[1], "rows beside it go on as ever"
    clock.now += 60
    assert refusal(store, b"other") == "OVERLOADED", "slot 0 holds it"
    steps.run(releases=(Release(slot=0, generation=1), Release(slot=1, generation=1)), decodes=[2])
    put(store, b"other")


def test_a_new_epoch_lets_go_of_what_slots_held() -> None:
    store = BlobStore(max_bytes=10, max_blob_bytes=10)
    executor = simulated_executor(runner_class=GrammarRunner, blobs=store, grammars=any_text_store())
    here = put(store, b"any/1\n0123")
    Steps(executor).run(admits=(guided(0, here),), has_forward=False)
    executor.begin_epoch(2)
    put(store, b"other")


def test_a_runner_without_grammars_refuses_the_plan() -> None:
    steps = Steps(simulated_executor(blobs=BlobStore(max_bytes=10, max_blob_bytes=10)))
    with pytest.raises(MeshError) as caught:
        steps.run(admits=(guided(0, hash_of(b"any")),), has_forward=False)
    assert caught.value.reason_name == "UNSUPPORTED"


@pytest.mark.parametrize("num_misses", [1, 3, 4])
def test_a_request_whose_blob_was_dropped_is_admitted_again_a_few_times(num_misses: int) -> None:
    world = World(eos_rate=0.0)
    records = [world.submit([2, 3, 4 + i], stop=Stop(max_tokens=20)) for i in range(3)]
    missing, count = records[1], 0
    error = MeshError(common_pb2.ERROR_REASON_UNKNOWN_BLOB, "put it again", {"hash": "ab"})
    while world.plan():
        world.execute()
        for admitted in world.log[-1].admits:
            if admitted.request_id == missing.submission.key.request_id and count < num_misses:
                count += 1
                failed = SlotError(slot=admitted.slot, generation=admitted.generation, error=error)
                world.results[-1] = replace(world.results[-1], slot_errors=(failed,))
        world.process()
    assert count == num_misses and world.epoch == 1
    for record in records:
        if record is missing and num_misses > 3:
            assert record.finished is not None and record.finished.error is error
        else:
            assert record.tokens == world.expected(record.submission)
    world.check_clean()


def test_a_grammar_that_is_there_is_had_while_another_one_is_read() -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    class SlowBackend(AnyTextBackend):
        def _read(self, data: bytes) -> CompiledGrammar:
            if data == b"slow":
                is_reading.set()
                assert may_end.wait(60)
            return AnyText()

    store = GrammarStore("any/1", SlowBackend)
    known = store.get("known", b"any/1\nx")
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(store.get, "slow", b"any/1\nslow")
        assert is_reading.wait(60)
        try:
            assert threads.submit(store.get, "known", b"").result(timeout=10) is known
        finally:
            may_end.set()
        assert slow.result(timeout=60) is store.get("slow", b"")
