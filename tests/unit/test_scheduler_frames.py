"""Frames to routers and plans to workers end long before a message may: what is more goes into the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import as_ints, unpack_ints
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.rpc.frames import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import Admit, StepPlan, Task, TokenLogprobs
from radixmesh.daemons.runtime.steps.step_codec import admit_bytes, encode_plan
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs, PromptLogprobs, TokenRow, rows_of
from radixmesh.daemons.scheduler.routers.outbox import RouterOutbox
from radixmesh.scheduler.v1 import scheduler_pb2

NUM_TOP = 64


def logprobs_of(first: int, count: int) -> TokenLogprobs:
    own = np.arange(first, first + count, dtype=np.float32)
    top = np.repeat(own, NUM_TOP).reshape(count, NUM_TOP)
    return TokenLogprobs(own=own, num_top=NUM_TOP, top_ids=top.astype(np.int32), top=top)


def frames_of(outbox: RouterOutbox) -> list[scheduler_pb2.ServeResponse]:
    frames = []
    while (frame := outbox.take(1)).ByteSize():
        frames.append(frame)
    return frames


def test_frames_to_a_router_are_bounded_and_keep_the_order() -> None:
    """64 outputs with 64 alternatives, a reader that is away, then their ends: 12 MiB in frames of four."""
    outbox, num_steps, num_outputs = RouterOutbox(7), 350, 64
    for step in range(num_steps):
        rows = [TokenRow(7, handle, 0, step, as_ints([step]), logprobs_of(step, 1)) for handle in range(num_outputs)]
        outbox.add(Outputs(rows=[rows_of(rows)]))
    prompt = PromptLogprobs(owner=7, handle=1, first_position=1, logprobs=logprobs_of(1, 4000))
    ends = [
        Finished(owner=7, handle=handle, attempt=0, reason=FinishReason.LENGTH, num_output=num_steps)
        for handle in range(num_outputs)
    ]
    outbox.add(Outputs(prompt_logprobs=[prompt], finished=ends))
    assert not outbox.is_overfull
    frames = frames_of(outbox)
    assert len(frames) > 2
    assert max(frame.ByteSize() for frame in frames) < 1.5 * MAX_FRAME_BYTES
    lengths, has_ended = dict.fromkeys(range(num_outputs), 0), set()
    for frame in frames:
        handles, counts, firsts = (
            unpack_ints(data, "").tolist()
            for data in (frame.tokens.handles, frame.tokens.counts, frame.tokens.first_output_indexes)
        )
        for row, (handle, count, first) in enumerate(zip(handles, counts, firsts, strict=True)):
            assert first == lengths[handle] and handle not in has_ended
            values = np.frombuffer(frame.tokens.logprobs[row].logprobs.token_logprobs, "<f4")
            assert np.array_equal(values, np.arange(first, first + count))
            lengths[handle] += count
        has_ended |= {finished.handle for finished in frame.finished}
    assert set(lengths.values()) == {num_steps} and len(has_ended) == num_outputs
    assert sum(len(frame.prompt_logprobs) for frame in frames) == 1


def test_frames_to_a_router_are_bounded_in_entries() -> None:
    outbox = RouterOutbox(7)
    for first in range(0, 20_000, 1000):
        ends = [
            Finished(owner=7, handle=first + i, attempt=0, reason=FinishReason.ABORT, num_output=0) for i in range(1000)
        ]
        outbox.add(Outputs(finished=ends))
    frames = frames_of(outbox)
    assert max(len(frame.finished) for frame in frames) <= MAX_FRAME_ENTRIES
    assert [end.handle for frame in frames for end in frame.finished] == list(range(20_000))


def test_an_overfull_outbox_has_nothing_to_say() -> None:
    outbox = RouterOutbox(7, most_values=2_000_000)
    for step in range(700):
        rows = [TokenRow(7, handle, 0, step, as_ints([step]), logprobs_of(step, 1)) for handle in range(64)]
        outbox.add(Outputs(rows=[rows_of(rows)]))
    assert outbox.is_overfull and not outbox.take(1).ByteSize()


def admits_of(world: World) -> list[Admit]:
    admits: list[Admit] = []
    while world.planner.num_waiting:
        assert world.plan()
        plan = world.log[-1]
        assert len(encode_plan(plan)) < MAX_FRAME_BYTES + 400_000  # One admit more than fits.
        admits += plan.admits
    return admits


def test_a_plan_that_could_admit_many_long_cached_prompts_is_several() -> None:
    prompt = [2 + i % 50 for i in range(20_000)]
    num = 200
    world = World(
        num_pages=60_000,
        num_slots=num,
        max_total_len=30_000,
        chunk_tokens=20_000,
        max_tokens_per_step=30_000,
        eos_rate=0.0,
    )
    world.submit(prompt, stop=Stop(max_tokens=1))
    world.run()
    world.log.clear()
    for _ in range(num):
        world.submit(prompt, stop=Stop(max_tokens=2))
    assert len(admits_of(world)) == num
    assert len(world.log) > 8


def test_logprobs_of_a_long_prompt_come_in_results_that_a_message_holds() -> None:
    num_prompt = 20_000
    world = World(num_pages=50_000, max_total_len=30_000, chunk_tokens=30_000, max_tokens_per_step=30_000)
    sampling = Sampling(temperature=0.0, prompt_logprobs=True, num_top_logprobs=NUM_TOP)
    world.submit([2 + i % 50 for i in range(num_prompt)], sampling=sampling, stop=Stop(max_tokens=1), logprobs_start=1)
    other = world.submit([2, 3, 4], stop=Stop(max_tokens=1))
    while world.plan():
        plan = world.log[-1]
        lengths = {chunk.slot: chunk.length for chunk in plan.chunks}
        assert lengths.get(0, 0) * (4 + 8 * NUM_TOP) <= MAX_FRAME_BYTES
    assert sum(chunk.length for plan in world.log for chunk in plan.chunks if chunk.slot == 0) == num_prompt
    assert other.rejected is None


@given(st.integers(0, 300), st.integers(0, 50), st.integers(0, 1024), st.text(max_size=80), st.integers(0, 257))
def test_an_admit_is_never_larger_than_estimated(
    num_ids: int, num_pages: int, num_biases: int, name: str, num_suppressed: int
) -> None:
    admit = Admit(
        slot=2**31 - 1,
        generation=2**31 - 1,
        request_id=name,
        index=127,
        task=Task.GENERATE,
        prompt_ids=as_ints(range(num_ids)),
        output_ids=as_ints(range(num_ids)),
        cached_len=num_ids,
        cached_pages=as_ints(range(num_pages)),
        cached_page_generations=as_ints(range(num_pages)),
        max_total_len=2**31 - 1,
        sampling=Sampling(seed=2**64 - 1, logit_bias=tuple((i, 1.5) for i in range(num_biases)), num_top_logprobs=64),
        min_tokens=5,
        suppressed_ids=as_ints(range(num_suppressed)),
        logprobs_start=2**31 - 1,
        cache_namespace=name,
        adapter=name,
        trace_context=name,
    )
    empty = StepPlan(epoch=1, step_id=1)
    assert len(encode_plan(replace(empty, admits=(admit,)))) - len(encode_plan(empty)) <= admit_bytes(admit)
