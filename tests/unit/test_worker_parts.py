"""The worker's smaller parts, each alone."""

import asyncio
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.page_records import PageRecordTable
from radixmesh.daemons.worker.profile import NoProfiler, TorchProfiler
from radixmesh.daemons.worker.simulated.clock import RealClock, VirtualClock
from radixmesh.daemons.worker.simulated.faults import Fault, FaultInjector, FaultKind
from radixmesh.daemons.worker.simulated.latency import LatencyModel, StepShape
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.daemons.worker.speculation.settings import Speculation, SpeculativeAlgorithm
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle
from radixmesh.daemons.worker.stream.epochs import EpochLedger
from radixmesh.daemons.worker.stream.step_queue import StepQueue
from radixmesh.worker.v1 import worker_pb2


def _limits(**changes):
    defaults = {
        "page_size": 4,
        "num_pages": 16,
        "num_slots": 2,
        "vocab_size": 100,
        "max_total_len": 64,
        "max_tokens_per_step": 64,
    }
    return Limits(**(defaults | changes))


def _grant(records, pages, previous=-1, namespace=""):
    records.grant(
        as_ints(pages),
        np.array([len(pages)]),
        previous_pages=as_ints([previous]),
        namespaces=[namespace],
        weights_version=1,
    )


# Claims


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("abc")), min_size=1, max_size=12))
def test_the_highest_claim_holds_whatever_the_order(claims):
    ledger = EpochLedger()
    for epoch, instance in claims:
        is_higher = (epoch, instance) > (ledger.highest_epoch, ledger.holder_instance_id)
        if is_higher:
            ledger.claim(epoch, instance, 0)
        else:
            with pytest.raises(MeshError) as caught:
                ledger.claim(epoch, instance, 0)
            assert caught.value.reason_name == "EPOCH_FENCED"
    assert (ledger.highest_epoch, ledger.holder_instance_id) == max(claims)


def test_a_claim_for_another_group_generation_is_refused():
    with pytest.raises(MeshError) as caught:
        EpochLedger(group_generation=3).claim(1, "a", 2)
    assert (caught.value.reason_name, caught.value.metadata) == ("GROUP_GENERATION", {"group_generation": "3"})


def test_silence_of_the_holder_is_measured_while_it_is_connected():
    now = [10.0]
    ledger = EpochLedger(clock=lambda: now[0])
    ledger.claim(1, "a", 0)
    now[0] = 12.5
    assert ledger.holder_silent_ms == 2500
    ledger.heard()
    assert ledger.holder_silent_ms == 0
    ledger.disconnected()
    assert ledger.holder_silent_ms == 0
    ledger.check_holder(1, "a")
    for epoch, instance in ((1, "b"), (2, "a"), (0, "")):
        with pytest.raises(MeshError):
            ledger.check_holder(epoch, instance)


def test_nobody_holds_a_worker_that_was_never_claimed():
    with pytest.raises(MeshError):
        EpochLedger().check_holder(0, "")


# Page records


def test_a_snapshot_comes_in_ranges_and_lists_what_is_filled():
    records = PageRecordTable(_limits(num_pages=200_000))
    _grant(records, [5, 70_000])
    _grant(records, [199_999], previous=70_000, namespace="salt")
    records.extend(as_ints([5, 5, 70_000, 199_999]), as_ints([0, 1, 0, 0]), as_ints([11, 12, 13, 14]))
    ranges = list(records.snapshot())
    assert [part.first_page for part in ranges] == [0, 65_536, 131_072, 196_608]
    assert sum(len(part.filled) for part in ranges) == 200_000
    assert [part.ids.tolist() for part in ranges] == [[11, 12], [13], [], [14]]
    last = ranges[-1]
    at = 199_999 - last.first_page
    assert records.namespaces[last.namespace_indexes[at]] == "salt"
    assert (last.previous_pages[at], last.previous_generations[at]) == (70_000, 1)


def test_namespaces_that_no_page_is_in_are_forgotten():
    records = PageRecordTable(_limits())
    _grant(records, [0], namespace="kept")
    for number in range(5000):
        _grant(records, [1], namespace=f"salt-{number}")
        assert records.namespaces[records.namespace_indexes[1]] == f"salt-{number}"
    assert len(records.namespaces) <= 1025
    assert records.namespaces[records.namespace_indexes[0]] == "kept"


def test_a_million_pages_are_listed_at_once():
    records = PageRecordTable(_limits(page_size=1, num_pages=1_000_000))
    pages = np.arange(1_000_000, dtype=np.int32)
    _grant(records, pages)
    records.extend(pages, np.zeros_like(pages), pages % 100)
    start = time.process_time()
    ranges = list(records.snapshot())
    # 0.2 s where it was written; a busy machine shares its caches too.
    assert time.process_time() - start < 2
    assert sum(len(part.ids) for part in ranges) == 1_000_000


# Faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("refuse@7", Fault(kind=FaultKind.REFUSE, step=7)),
        ("delay%0.25:20", Fault(kind=FaultKind.DELAY, probability=0.25, ms=20.0)),
        (" hang@1 ", Fault(kind=FaultKind.HANG, step=1)),
    ],
)
def test_faults_are_read(text, fault):
    assert Fault.parse(text) == fault


@pytest.mark.parametrize("text", ["", "hang", "boom@1", "delay@", "delay%2", "delay@1:", "refuse@1.5"])
def test_faults_that_are_none_are_told_apart(text):
    with pytest.raises(ValueError, match="fault"):
        Fault.parse(text)


def test_a_step_fault_hits_once_and_a_likely_one_by_its_seed():
    injector = FaultInjector([Fault(kind=FaultKind.DUPLICATE, step=3), Fault(kind=FaultKind.REFUSE, step=3)])
    assert injector.hit(2) is None
    assert injector.hit(3).kind is FaultKind.DUPLICATE
    assert injector.hit(3) is None
    assert [injector.strikes(3), injector.strikes(3)] == [FaultKind.REFUSE, None]

    def hits(seed):
        often = FaultInjector([Fault(kind=FaultKind.DELAY, probability=0.5)], seed)
        return [often.hit(step) is not None for step in range(200)]

    assert hits(1) == hits(1) != hits(2)
    assert 60 < sum(hits(1)) < 140


# The simulated model


def test_latency_is_base_and_slopes():
    model = LatencyModel(
        base=100, per_decode_row=2, per_decode_context=0.5, per_prefill_token=3, per_prefill_context=0.25
    )
    assert model.step_us(StepShape()) == 0
    assert model.step_us(StepShape(decode_rows=4, decode_context=10)) == 100 + 8 + 5
    assert model.step_us(StepShape(prefill_tokens=5, prefill_context=8)) == 100 + 15 + 2
    with pytest.raises(ValueError, match="per_decode_row"):
        LatencyModel(per_decode_row=-1)


def test_virtual_steps_follow_each_other_or_wait_for_their_plan():
    clock = VirtualClock()
    assert clock.run(100, 0) == (0, 100)
    assert clock.run(50, 20) == (100, 150)
    assert clock.run(50, 500) == (500, 550)
    assert clock.now_ns() == 550


class HandTime:
    """Stands for `time`: it passes when somebody sleeps, or the test says so."""

    def __init__(self):
        self.ns = 5_000_000_000

    def monotonic_ns(self):
        return self.ns

    def sleep(self, seconds):
        self.ns += round(seconds * 1e9)


def test_real_steps_take_their_time_and_queue_up_without_a_gap(monkeypatch):
    hand = HandTime()
    monkeypatch.setattr("radixmesh.daemons.worker.simulated.clock.time", hand)
    clock, start, ms = RealClock(), hand.ns, 1_000_000
    assert clock.run(20 * ms, start) == (start, start + 20 * ms)
    hand.ns += 5 * ms  # The host is slow, and yet there is no gap.
    assert clock.run(20 * ms, start) == (start + 20 * ms, start + 40 * ms)
    assert hand.ns == start + 40 * ms
    # A step that would be over by now ends now.
    hand.ns += 30 * ms
    assert clock.run(20 * ms, start) == (hand.ns - 20 * ms, hand.ns)


def test_a_real_step_takes_its_time():
    began = time.monotonic_ns()
    RealClock().run(20_000_000, began)
    assert time.monotonic_ns() - began >= 20_000_000


def test_eos_comes_at_its_rate_and_special_ids_never():
    alphabet = Alphabet.of(50, special_ids=(0, 1), eos_ids=(7, 8), eos_rate=0.1)
    tokens = simulated_continuation([3, 4], 2000, alphabet=alphabet)
    num_eos = sum(token in (7, 8) for token in tokens)
    assert 140 < num_eos < 260
    assert not {0, 1} & set(tokens)
    assert not {0, 1, 7, 8} & set(simulated_continuation([3], 500, alphabet=Alphabet.of(50, eos_ids=(0, 1, 7, 8))))


@given(st.lists(st.integers(0, 49), min_size=2, max_size=8), st.data())
def test_every_token_of_the_prefix_counts(ids, data):
    alphabet = Alphabet.of(50)
    index = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:index], (ids[index] + 1) % 50, *ids[index + 1 :]]
    assert simulated_continuation(ids, 12, alphabet=alphabet) != simulated_continuation(other, 12, alphabet=alphabet)


# The step thread


async def test_jobs_run_in_order_and_hand_back_results_and_errors():
    queue, ran = StepQueue(), []
    queue.submit(lambda: StepHandle.of("first"), ran.append)

    def fail():
        raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        await queue.run(fail)
    assert await queue.run(lambda: 3) == 3
    assert ran == ["first"]
    queue.close()


class GatedEvent(DeviceEvent):
    """Done when its gate is set."""

    def __init__(self):
        self.gate = threading.Event()

    @property
    def is_done(self):
        return self.gate.is_set()

    def wait(self):
        self.gate.wait()


async def test_jobs_start_while_earlier_ones_run_and_finish_in_order():
    def step_of(name):
        event = GatedEvent()
        return StepHandle(event, lambda: event.wait() or name)

    def start(name):
        started.append(name)
        return steps[name]

    queue, ran, started = StepQueue(), [], []
    steps = {name: step_of(name) for name in "abc"}
    for name in steps:
        queue.submit(partial(start, name), ran.append)
    while len(started) < 3:
        await asyncio.sleep(0.001)
    steps["b"].event.gate.set()
    await asyncio.sleep(0.02)
    assert ran == [], "b is over, but a is not"
    steps["a"].event.gate.set()
    while len(ran) < 2:
        await asyncio.sleep(0.001)
    assert ran == ["a", "b"]
    # A job that has to come after everything waits for c.
    after = asyncio.ensure_future(queue.run(lambda: list(ran)))
    await asyncio.sleep(0.02)
    assert not after.done()
    steps["c"].event.gate.set()
    await after
    while len(ran) < 3:
        await asyncio.sleep(0.001)
    queue.submit(lambda: StepHandle.of("d"), ran.append)
    while len(ran) < 4:
        await asyncio.sleep(0.001)
    assert ran == ["a", "b", "c", "d"]
    queue.close()


async def test_jobs_of_a_batch_start_at_once_and_their_outcomes_come_together():
    events, started, outcomes = [GatedEvent(), GatedEvent()], [], []

    def start(number):
        started.append(number)
        return StepHandle(events[number], lambda: number)

    queue = StepQueue()
    queue.submit_all([partial(start, 0), partial(start, 1)], outcomes.append)
    while len(started) < 2:
        await asyncio.sleep(0.001)
    events[0].gate.set()
    await asyncio.sleep(0.02)
    assert outcomes == [], "the last of them runs"
    events[1].gate.set()
    while not outcomes:
        await asyncio.sleep(0.001)
    assert outcomes == [[0, 1]]
    queue.close()


async def test_what_an_urgent_outcome_leads_to_comes_before_the_next_job():
    queue, seen = StepQueue(loop_s=60.0), []
    loop = asyncio.get_running_loop()
    entered, gate = threading.Event(), threading.Event()

    def first():
        entered.set()
        gate.wait(60)
        return StepHandle.of("first token")

    def written(_):
        # As a stream's task does, which its outbox wakes.
        loop.call_soon(seen.append, "written")

    queue.submit(first, written, is_urgent=True)
    behind = asyncio.ensure_future(queue.run(lambda: seen.append("next step")))
    await asyncio.sleep(0)  # The next job is in the queue.
    entered.wait(60)
    gate.set()
    await behind
    assert seen == ["written", "next step"]
    queue.close()


async def test_a_job_does_not_wait_for_a_loop_that_is_busy_for_long():
    queue, started = StepQueue(), threading.Event()
    entered, gate = threading.Event(), threading.Event()

    def first():
        entered.set()
        gate.wait(60)
        return StepHandle.of("first token")

    outcome = asyncio.get_running_loop().create_future()
    queue.submit(first, lambda _: outcome.set_result(started.wait(60)), is_urgent=True)
    behind = asyncio.ensure_future(queue.run(started.set))
    await asyncio.sleep(0)
    entered.wait(60)
    gate.set()
    assert await outcome, "the loop itself waited for the next job here"
    await behind
    queue.close()


async def test_a_job_that_blocks_leaves_the_loop_free():
    queue = StepQueue()
    gate = threading.Event()
    running = asyncio.ensure_future(queue.run(lambda: gate.wait(60)))
    await asyncio.sleep(0.01)
    gate.set()
    assert await running, "only the loop could open the gate"
    queue.close()


# Dumps and traces


def test_dumps_are_bounded(tmp_path):
    dump = PlanDump(tmp_path, "instance", max_dumps=3)
    for step in range(6):
        plan = worker_pb2.StepPlan(header=worker_pb2.PlanHeader(epoch=1, step_id=step))
        assert dump.write(plan, RuntimeError("lost"))
    assert len(list(tmp_path.glob("*.bin"))) == len(list(tmp_path.glob("*.txt"))) == 3


def test_a_dump_that_cannot_be_written_does_not_hide_the_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert PlanDump(blocked, "instance").write(worker_pb2.StepPlan(), RuntimeError("lost")) == ""


def test_a_torch_trace_is_written_after_its_steps(tmp_path):
    profiler = TorchProfiler(tmp_path, "me")
    with pytest.raises(MeshError, match="no trace runs"):
        profiler.stop()
    profiler.start(2)
    with pytest.raises(MeshError, match="a trace runs"):
        profiler.start(0)
    profiler.on_step()
    assert not list(tmp_path.iterdir())
    profiler.on_step()
    assert "traceEvents" in (tmp_path / "steps-me-1.json").read_text()
    assert profiler.stop() == str(tmp_path / "steps-me-1.json")
    with pytest.raises(MeshError, match="no trace runs"):
        profiler.stop()
    with pytest.raises(MeshError) as caught:
        NoProfiler().start(0)
    assert caught.value.reason_name == "UNSUPPORTED"


def test_a_trace_ends_by_itself_before_writing_it_takes_longer_than_a_worker_may_be_silent(tmp_path):
    profiler = TorchProfiler(tmp_path, "me")
    with pytest.raises(MeshError) as caught:
        profiler.start(1_000_000)
    most = int(caught.value.metadata["max"])
    assert caught.value.metadata["field"] == "num_steps" and most < 1000
    profiler.start(0)
    for _ in range(most):
        assert not list(tmp_path.iterdir())
        profiler.on_step()
    assert profiler.stop() == str(next(tmp_path.iterdir()))


def test_a_trace_that_could_not_be_written_is_refused_as_it_is_asked_for(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    profiler = TorchProfiler(blocked / "folder", "me")
    for _ in range(2):
        with pytest.raises(MeshError, match="--dump-folder") as caught:
            profiler.start(0)
        assert caught.value.metadata == {"field": "dump_folder"}


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_trace_that_was_not_written_has_no_path(tmp_path, num_steps):
    """torch says on stderr alone that it could not write."""
    folder = tmp_path / "traces"
    profiler = TorchProfiler(folder, "me")
    profiler.start(num_steps)
    folder.rmdir()
    profiler.on_step()
    with pytest.raises(MeshError, match="--dump-folder"):
        profiler.stop()
    profiler.start(0)
    assert profiler.stop() == str(folder / "steps-me-2.json")


# Settings


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": Backend.CPU},
        {"page_size": 0},
        {"num_pages": 0},
        {"simulated_base_us": -1.0},
        {"simulated_eos_rate": 1.5},
        {"simulated_eos_ids": ("x",)},
        {"faults": ("boom",)},
        {"max_blob_bytes": 10, "blob_store_bytes": 5},
    ],
)
def test_wrong_settings_say_so(changes):
    with pytest.raises(ValueError, match=r"."):
        WorkerSettings(**({"backend": Backend.SIMULATED} | changes))


_NGRAM = {"backend": Backend.CPU, "model": Path("m"), "speculative_algorithm": SpeculativeAlgorithm.NGRAM}


@pytest.mark.parametrize(
    ("changes", "max_drafts"),
    [
        ({}, 4),
        ({"speculative_num_steps": 7}, 7),
        ({"speculative_num_draft_tokens": 3}, 2),
        ({"speculative_num_steps": 2, "speculative_num_draft_tokens": 3}, 2),
        ({"backend": Backend.CUDA, "dp_size": 1}, 4),
    ],
)
def test_flags_of_speculation_give_the_length_of_drafts(changes, max_drafts):
    assert WorkerSettings(**(_NGRAM | changes)).speculation == Speculation(
        algorithm=SpeculativeAlgorithm.NGRAM, max_drafts=max_drafts
    )
    assert WorkerSettings(backend=Backend.CPU, model=Path("m")).speculation is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"speculative_algorithm": SpeculativeAlgorithm.OFF, "speculative_num_steps": 2},
            "need --speculative-algorithm",
        ),
        ({"speculative_num_steps": 3, "speculative_num_draft_tokens": 8}, "leave one of them out"),
        ({"speculative_num_steps": 0}, r"in \[1, 63\]"),
        ({"speculative_num_steps": 64}, r"in \[1, 63\]"),
        ({"backend": Backend.SIMULATED}, "--simulated-max-tokens-per-row"),
        ({"tp_size": 2}, "use replicas or --dp-size"),
        ({"ep_size": 2, "dp_size": 2}, "use replicas or --dp-size"),
        ({"backend": Backend.CUDA, "attention_backend": "flashinfer"}, "--attention-backend triton"),
    ],
)
def test_speculation_that_does_not_combine_says_what_does(changes, text):
    with pytest.raises(ValueError, match=text):
        WorkerSettings(**(_NGRAM | changes))


async def test_what_is_launched_beside_steps_waits_for_none():
    queue, ran, event = StepQueue(), [], GatedEvent()
    queue.submit(lambda: StepHandle(event, lambda: "step"), ran.append)
    assert await asyncio.wait_for(queue.start(lambda: list(ran)), 10) == [], "the step runs"

    def fail():
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        await asyncio.wait_for(queue.start(fail), 10)
    event.gate.set()
    assert await asyncio.wait_for(queue.run(lambda: 5), 10) == 5 and ran == ["step"]
    queue.close()
