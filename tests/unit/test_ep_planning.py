"""Plans of ranks that share experts, for any number of ranks and any requests: one shape for all, nobody left out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner_world import VOCAB_SIZE
from unit.test_dp_ranks import DpWorld

from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.steps.step import DispatchMode
from radixmesh.daemons.scheduler.planning.experts.dispatch import DispatchChoice

MAX_TOKENS = 3
requests = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
"""Length of the prompt, most tokens, and steps until the next one comes."""


def ep_world(num_ranks: int, choice: DispatchChoice, **choices: object) -> DpWorld:
    world = DpWorld(num_ranks, num_pages=40, dispatch=choice, **choices)
    world.group = replace(world.group, ep_size=num_ranks)
    world.begin_epoch()
    return world


@settings(deadline=None, max_examples=25)
@given(
    num_ranks=st.integers(2, 6),
    wanted=st.lists(requests, min_size=1, max_size=16),
    mode=st.sampled_from([None, DispatchMode.NORMAL, DispatchMode.LOW_LATENCY]),
    depth=st.integers(0, 2),
    align_steps=st.sampled_from([0, 1, 5]),
)
def test_one_shape_for_all_ranks_whatever_is_asked(
    num_ranks: int, wanted: list[tuple[int, int, int]], mode: DispatchMode | None, depth: int, align_steps: int
) -> None:
    world = ep_world(num_ranks, DispatchChoice(mode=mode, max_tokens=MAX_TOKENS), prefill_align_steps=align_steps)
    for index, (length, max_tokens, pause) in enumerate(wanted):
        world.submit([2 + (7 * index + token) % (VOCAB_SIZE - 2) for token in range(length)], max_tokens)
        for _ in range(pause):
            if world.planner.num_in_flight <= depth:
                world.step()
            if world.results:
                world.process()
    world.run(depth)
    world.check()
    decode_sets: list[list[int]] = [[] for _ in range(num_ranks)]
    num_forwards = 0
    for shape, sections in zip(world.shapes, world.sections, strict=True):
        tokens = []
        for rank, section in enumerate(sections):
            if section.decode_set is not None:
                decode_sets[rank] = section.decode_set.tolist()
            tokens.append(len(decode_sets[rank]) + sum(chunk.length for chunk in section.chunks))
        # No rank is told anything else, and all take part or none does.
        assert len({(s.dispatch, s.max_tokens_per_rank, s.has_forward, s.step_id) for s in sections}) == 1
        if not sections[0].has_forward:
            continue
        num_forwards += 1
        assert max(tokens) > 0, "a forward of nobody"
        assert shape.max_tokens_per_rank == max(tokens) <= world.group.max_tokens_per_step
        assert unpack_ints(shape.idle_ranks, "idle_ranks").tolist() == [r for r, num in enumerate(tokens) if not num]
        has_chunks = any(section.chunks for section in sections)
        if mode is None:
            # The prompt of one rank takes all out of low latency; so does the rank with most rows.
            is_low = not has_chunks and max(tokens) <= MAX_TOKENS
            assert sections[0].dispatch is (DispatchMode.LOW_LATENCY if is_low else DispatchMode.NORMAL)
        else:
            assert sections[0].dispatch is mode
    assert num_forwards
