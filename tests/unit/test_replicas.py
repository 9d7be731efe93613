"""Columns of loads: what was sent counts until the scheduler's own figures include it, and never after."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.placement.replicas import ReplicaLoad, Replicas


def load(sequence: int, *, running: int = 0, waiting: int = 0, tokens: int = 0, token_us: float = 0.0) -> ReplicaLoad:
    return ReplicaLoad(
        submit_sequence=sequence,
        num_running=running,
        num_waiting=waiting,
        waiting_tokens=tokens,
        free_tokens=100,
        cached_tokens=10,
        token_us=token_us,
    )


def slowness_of(speeds: list[float]) -> list[float] | None:
    replicas = Replicas()
    for row, token_us in enumerate(speeds):
        replicas.add(f"s{row}")
        replicas.take_load(row, load(0, token_us=token_us))
    replicas.compare_speeds()
    column = replicas.slowness(np.arange(len(speeds)))
    return None if column is None else column.tolist()


def figures(replicas: Replicas, row: int) -> tuple[int, int]:
    return int(replicas.num_outputs[row]), int(replicas.queued_tokens[row])


def test_what_was_sent_counts_until_a_load_includes_it() -> None:
    replicas = Replicas()
    row = replicas.add("a")
    replicas.take_sent(row, 1, 500, 500)
    replicas.take_sent(row, 2, 300, 300)
    assert figures(replicas, row) == (2, 800)
    replicas.take_load(row, load(1, waiting=1, tokens=500))
    assert figures(replicas, row) == (2, 800)
    replicas.take_first_token(row, 1)
    replicas.take_load(row, load(2, running=1, waiting=1, tokens=300))
    assert figures(replicas, row) == (2, 300)


def test_what_is_cached_of_own_prompts_is_not_queued_though_the_scheduler_counts_it() -> None:
    replicas = Replicas()
    row = replicas.add("a")
    replicas.take_sent(row, 1, 500, 20)
    replicas.take_load(row, load(1, running=3, waiting=2, tokens=500 + 70))
    assert figures(replicas, row) == (5, 20 + 70), "four outputs and 70 tokens are of others"


def test_first_tokens_and_ends_count_before_the_next_load() -> None:
    replicas = Replicas()
    row = replicas.add("a")
    replicas.take_sent(row, 1, 500, 500)
    replicas.take_first_token(row, 1)
    assert figures(replicas, row) == (1, 0)
    replicas.take_left(row, 1)
    assert figures(replicas, row) == (0, 0)
    replicas.take_load(row, load(0))
    assert figures(replicas, row) == (0, 0), "it is over, though no load has included it"
    replicas.take_left(row, 1)
    assert figures(replicas, row) == (0, 0)


def test_a_new_stream_and_a_new_replica_begin_with_nothing() -> None:
    replicas = Replicas()
    row = replicas.add("a")
    replicas.take_sent(row, 1, 500, 500)
    replicas.restart(row)
    assert figures(replicas, row) == (0, 0) and replicas.num_own[row] == 0
    replicas.take_sent(row, 1, 500, 500)
    replicas.remove(row)
    assert replicas.add("b") == row and figures(replicas, row) == (0, 0) and replicas.num_own[row] == 0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 1000)),
            st.tuples(st.sampled_from(["first", "left"]), st.integers(1, 30)),
            st.tuples(st.just("load"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
def test_credits_never_leak(steps: list[tuple[str, int]]) -> None:
    """Once every output has left and a load has included all, nothing is counted."""
    replicas = Replicas()
    row = replicas.add("a")
    sent = 0
    for what, number in steps:
        match what:
            case "send":
                sent += 1
                replicas.take_sent(row, sent, number, number)
            case "first":
                replicas.take_first_token(row, number)
            case "left":
                replicas.take_left(row, number)
            case _:
                replicas.take_load(row, load(min(number, sent)))
        assert min(figures(replicas, row)) >= 0 and 0 <= replicas.num_credits(row) <= replicas.num_own[row]
    for sequence in range(1, sent + 1):
        replicas.take_left(row, sequence)
    assert replicas.num_own[row] == 0 and replicas.num_credits(row) == 0
    replicas.take_load(row, load(sent))
    assert figures(replicas, row) == (0, 0)


def test_an_output_is_a_credit_until_a_load_includes_it() -> None:
    replicas = Replicas()
    row = replicas.add("a")
    for sequence in (1, 2, 3):
        replicas.take_sent(row, sequence, 100, 100)
    assert replicas.num_credits(row) == 3
    replicas.take_load(row, load(2, running=2))
    assert replicas.num_credits(row) == 1
    replicas.take_left(row, 3)
    assert replicas.num_credits(row) == 0
    replicas.restart(row)
    replicas.take_sent(row, 1, 100, 100)
    assert replicas.num_credits(row) == 1, "sequences begin anew with each stream"


def test_replicas_about_as_fast_count_as_equal_and_an_unknown_one_as_one_in_the_middle() -> None:
    assert slowness_of([]) is None and slowness_of([10.0, 0.0]) is None and slowness_of([10.0, 12.0, 0.0]) is None
    assert slowness_of([10.0, 11.0, 40.0, 20.0, 0.0]) == [1.0, 1.0, 4.0, 2.0, 1.55]
    # One that measured nonsense still gets some work.
    assert slowness_of([1e-30, 10.0, 10.0]) == [1.0, 32.0, 32.0]


def test_the_speed_of_a_replica_that_is_gone_says_nothing_of_the_next_one_in_its_row() -> None:
    replicas = Replicas()
    rows = [replicas.add(name) for name in "abc"]
    for row, token_us in zip(rows, (10.0, 10.0, 80.0), strict=True):
        replicas.take_load(row, load(0, token_us=token_us))
    replicas.compare_speeds()
    assert replicas.slowness(np.array(rows)) is not None
    replicas.remove(rows[2])
    assert replicas.add("d") == rows[2]
    replicas.compare_speeds()
    assert replicas.slowness(np.array(rows)) is None
    # Rows that are added before the next look have no speed yet.
    for number in range(100):
        replicas.add(f"s{number}")
    assert replicas.slowness(np.arange(len(replicas))) is None
