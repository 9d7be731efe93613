"""A simulated device: its tokens are those of any simulated worker, and KV that arrives is ordered with its steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.lagging import LaggingWorld
from support.plans import ALPHABET, VOCAB_SIZE, admit, as_ints, chunk, grant

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import WHOLE_KV
from radixmesh.daemons.runtime.steps.step import StepPlan
from radixmesh.daemons.runtime.steps.step_codec import plan_to_proto
from radixmesh.daemons.worker.config import WorkerSettings
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, Fetched
from radixmesh.daemons.worker.kv_transfer.lifecycle import Failure
from radixmesh.daemons.worker.kv_transfer.page_scatter import (
    ScatteredPieces,
    Target,
    WrittenPart,
    begin_scatter,
    may_scatter,
)
from radixmesh.daemons.worker.kv_transfer.staging import STAMP_BYTES
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.plans.files.plan_dump import PlanDump
from radixmesh.daemons.worker.plans.plan_runner import PlanRunner
from radixmesh.daemons.worker.simulated.device import DeviceClock, DeviceRunner, TimedEnd
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.step_handle import StepHandle

PROMPT = list(range(3, 20))
STAMP = bytes(range(STAMP_BYTES))
# Of a copy: far more than a launch takes, on any machine.
COPY_US = 30_000.0


def executor_of(num_slots: int = 2) -> StepExecutor:
    """Steps take 1 ms, the copy of a prompt COPY_US."""
    runner = DeviceRunner(
        page_size=1, num_pages=128, vocab_size=VOCAB_SIZE, max_total_len=64, alphabet=ALPHABET, num_slots=num_slots,
        latency=LatencyModel(base=1000.0), clock=DeviceClock(), copied_token_us=COPY_US / 16,
    )  # fmt: skip
    return StepExecutor(runner, num_slots=num_slots, max_tokens_per_step=64)


def prompt_plan(step_id: int, epoch: int = 1) -> StepPlan:
    pages, chunks = grant(0, range(30)), (chunk(0, len(PROMPT)),)
    return StepPlan(epoch=epoch, step_id=step_id, admits=(admit(0, PROMPT),), grants=(pages,), chunks=chunks)


def scattering(executor: StepExecutor, kv: bytes, generation: int = 1) -> tuple[StepHandle[tuple[Failure, float]], int]:
    """A scatter of the prompt's first 16 tokens to pages 40 to 55, and the address of its region."""
    device = executor.runner.kv_device
    assert device is not None
    body = STAMP + kv + STAMP
    address = device.allocate(len(body))
    device.write(address, body)
    target = Target(
        pages=as_ints(range(40, 56)), generations=as_ints([generation] * 16), previous_page=-1,
        ids=as_ints(PROMPT[:16]), namespace="",
    )  # fmt: skip
    part = WrittenPart(device.open(device.handle(address)), STAMP, WHOLE_KV)
    return begin_scatter(executor, target, [part], 0, may_be_named=True), part.memory.address


def named_plan(step_id: int) -> StepPlan:
    cached = {"cached_len": 16, "cached_pages": as_ints(range(40, 56)), "cached_page_generations": as_ints([1] * 16)}
    admits = (admit(1, PROMPT, **cached),)
    return StepPlan(epoch=1, step_id=step_id, admits=admits, grants=(grant(1, [60, 61]),), chunks=(chunk(1, 1),))


@pytest.mark.parametrize("lag", [1, 3])
def test_outputs_are_those_of_a_simulated_worker(lag: int) -> None:
    """Of random prompts, whatever is retracted and aborted meanwhile."""
    runner_class = partial(DeviceRunner, num_slots=6, copied_token_us=0.0)
    world = LaggingWorld(lag=lag, page_size=4, num_pages=20, num_slots=6, runner_class=runner_class)
    rng = np.random.default_rng(lag)
    records = [world.submit(rng.integers(2, 60, int(rng.integers(1, 30))).tolist()) for _ in range(12)]
    world.run(depth=lag)
    assert all(record.tokens == world.expected(record.submission) for record in records)
    world.check_clean()


def test_a_step_that_reads_what_is_scattered_waits_for_it_and_others_do_not() -> None:
    executor = executor_of()
    executor.begin_epoch(1)
    first = executor.launch(prompt_plan(1)).result()
    kv = executor.runner.read_kv(as_ints(range(16))).tobytes()
    handle, _ = scattering(executor, kv)
    assert isinstance(handle.event, TimedEnd) and not handle.is_done
    beside = executor.launch(StepPlan(epoch=1, step_id=2, decode_set=as_ints([0]))).result()
    assert beside.device_end_ns < handle.event.end_ns, "it has nothing to do with these pages"
    behind = executor.launch(named_plan(3)).result()
    assert behind.device_start_ns >= handle.event.end_ns
    # A row of the other slot, and the token that the same prompt had there.
    assert behind.ids.tolist()[-1] == first.ids[0] and len(behind.ids) == 2
    assert executor.arriving.is_empty and handle.result()[0] is Failure.NONE


def test_a_scatter_to_pages_that_another_one_still_writes_to_waits_for_that() -> None:
    """The request that the first was for has left; its pages are another's before the copy was looked at."""
    executor = executor_of()
    executor.begin_epoch(1)
    executor.launch(prompt_plan(1)).result()
    kv = executor.runner.read_kv(as_ints(range(16))).tobytes()
    first, _ = scattering(executor, kv)
    assert not first.is_done
    second, _ = scattering(executor, kv, generation=2)
    assert first.is_done and first.result()[0] is Failure.NONE
    assert second.result()[0] is Failure.NONE and executor.arriving.error is None and executor.arriving.is_empty


@pytest.mark.parametrize("generation", [1, 2])
def test_a_scatter_that_may_not_be_is_known_ahead_and_ends_the_epoch_if_it_was_promised(generation: int) -> None:
    executor = executor_of()
    executor.begin_epoch(1)
    target = Target(
        pages=as_ints(range(40, 56)), generations=as_ints([generation] * 16), previous_page=-1,
        ids=as_ints(PROMPT[:16]), namespace="",
    )  # fmt: skip
    assert may_scatter(executor, target, [WHOLE_KV]) is (generation == 1)
    assert not may_scatter(executor, replace(target, pages=as_ints([40] * 16)), [WHOLE_KV])
    assert not may_scatter(executor, replace(target, ids=target.ids[:15]), [WHOLE_KV])
    assert not may_scatter(executor, replace(target, ids=target.ids - 100), [WHOLE_KV])
    assert not may_scatter(executor, target, [])
    handle, _ = scattering(executor, bytes(16 * executor.runner.kv_token_bytes), generation)
    if generation == 1:
        assert handle.result()[0] is Failure.NONE and executor.arriving.error is None
        return
    assert handle.is_done and handle.result()[0] is Failure.PAGES
    with pytest.raises(MeshError) as refused:
        executor.launch(prompt_plan(1))
    assert refused.value.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED
    executor.begin_epoch(2)
    executor.launch(prompt_plan(1, epoch=2)).result()


def pieces_of(executor: StepExecutor, kv: bytes) -> tuple[ScatteredPieces, Target, WrittenPart]:
    """Of a transfer of the prompt's first 16 tokens to pages 40 to 55, none of them copied yet."""
    device = executor.runner.kv_device
    assert device is not None
    address = device.allocate(len(kv) + 2 * STAMP_BYTES)
    device.write(address, STAMP + kv + STAMP)
    target = Target(
        pages=as_ints(range(40, 56)), generations=as_ints([1] * 16), previous_page=-1, ids=as_ints(PROMPT[:16]),
        namespace="",
    )  # fmt: skip
    part = WrittenPart(device.open(device.handle(address)), STAMP, WHOLE_KV)
    return ScatteredPieces(executor, target, [WHOLE_KV], 1, 0), target, part


def test_pieces_that_are_copied_ahead_are_named_behind_the_last_one() -> None:
    executor = executor_of()
    executor.begin_epoch(1)
    first = executor.launch(prompt_plan(1)).result()
    kv = executor.runner.read_kv(as_ints(range(16))).tobytes()
    pieces, target, part = pieces_of(executor, kv)
    assert pieces.copy(0, part.memory, 4) and pieces.copy(0, part.memory, 12)
    assert not executor.records.filled[40:56].any(), "nobody may read them"
    with pytest.raises(MeshError):
        executor.launch(named_plan(2))
    rest = begin_scatter(executor, target, [part], 0, may_be_named=True, pieces=pieces)
    behind = executor.launch(named_plan(2)).result()
    assert behind.device_start_ns >= rest.event.end_ns and behind.ids.tolist()[-1] == first.ids[0]
    assert executor.runner.read_kv(target.pages).tobytes() == kv and executor.arriving.is_empty
    failure, seconds = rest.result()
    assert failure is Failure.NONE and seconds == pytest.approx(COPY_US * 1e-6), "of all pieces"


def test_copies_are_over_when_what_follows_them_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of()
    executor.begin_epoch(1)
    pieces, target, part = pieces_of(executor, bytes(16 * executor.runner.kv_token_bytes))
    copied: list[Copied] = []
    scatter = executor.runner.kv_device.scatter

    def noted(*args: object) -> Copied:
        copied.append(scatter(*args))
        return copied[-1]

    def broken(*args: object) -> Fetched:
        assert not copied[-1].event.is_done
        raise RuntimeError("no launch")

    monkeypatch.setattr(executor.runner.kv_device, "scatter", noted)
    monkeypatch.setattr(executor.runner.kv_device, "fetch", broken)
    with pytest.raises(RuntimeError, match="no launch"):
        begin_scatter(executor, target, [part], 0, pieces=pieces)
    assert len(copied) == 1 and copied[0].event.is_done


@pytest.mark.parametrize("how", ["granted", "epoch"])
def test_pages_that_are_another_s_wait_for_a_piece_and_take_no_more(how: str) -> None:
    executor = executor_of()
    executor.begin_epoch(1)
    pieces, target, part = pieces_of(executor, bytes(16 * executor.runner.kv_token_bytes))
    assert pieces.copy(0, part.memory, 8)
    [copied] = pieces.copies
    assert not copied.event.is_done
    if how == "epoch":
        executor.begin_epoch(2)
    else:
        plan = StepPlan(
            epoch=1, step_id=1, admits=(admit(0, PROMPT),), grants=(grant(0, range(40, 60)),), chunks=(chunk(0, 17),)
        )
        executor.launch(plan)
    assert copied.event.is_done and executor.arriving.is_empty
    executor.finish_all()
    before = executor.runner.read_kv(target.pages).tobytes()
    assert not pieces.copy(0, part.memory, 16)
    # It was not promised to anybody.
    assert begin_scatter(executor, target, [part], 0, pieces=pieces).result() == (Failure.PAGES, 0.0)
    assert executor.runner.read_kv(target.pages).tobytes() == before and executor.arriving.error is None


@pytest.mark.parametrize("has_next", [False, True])
def test_no_result_of_a_step_that_has_read_unsound_kv_leaves(tmp_path: Path, has_next: bool) -> None:
    executor = executor_of()
    runner = PlanRunner(executor, PlanDump(tmp_path, "instance"), lambda: None)
    runner.begin_epoch(1, 0)

    def launch(plan: StepPlan):
        message = plan_to_proto(plan)
        return runner.launch(message, 0, None)

    assert launch(prompt_plan(1)).result().result is not None
    handle, address = scattering(executor, executor.runner.read_kv(as_ints(range(16))).tobytes())
    steps = [launch(named_plan(2))]
    if has_next:
        steps.append(launch(StepPlan(epoch=1, step_id=3, decode_set=as_ints([0, 1]))))
    device = executor.runner.kv_device
    assert device is not None and not handle.is_done, "a machine that stood still for as long as a copy takes"
    device.write(address, b"another")
    answer, *later = [step.result() for step in steps]
    assert answer.refusal is not None and answer.refusal.reason == ErrorReason.ERROR_REASON_TRANSFER_FAILED
    assert answer.result is None and answer.died is None
    assert all(one.result is None and one.response is None for one in later)
    assert not executor.records.filled[40:56].any() and executor.records.filled[:16].all()
    # Whoever comes next has a sound worker.
    runner.begin_epoch(2, 0)
    message = plan_to_proto(prompt_plan(1, epoch=2))
    assert runner.launch(message, 0, None).result().result is not None


def test_it_takes_real_time_and_a_token_a_row() -> None:
    for fields in (
        {"simulated_time": "virtual"},
        {"simulated_max_tokens_per_row": 2},
        {"simulated_copied_token_us": -1},
    ):
        with pytest.raises(ValueError, match="simulated"):
            WorkerSettings(backend="simulated", simulated_device=True, **fields)
