"""The time that a token adds to a step, learned from steps: right where there is something to learn from."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.scheduler.planning.timing.token_time import TokenTime


@pytest.mark.parametrize("token_us", [9.0, 200.0])
def test_it_finds_the_slope_whatever_a_step_costs_at_least(token_us: float) -> None:
    time, chance = TokenTime(), random.Random(1)
    for _ in range(200):
        num_tokens = chance.choice([1, 12, 64, 512, 2048])
        time.observe(num_tokens, 35_000 + token_us * num_tokens * chance.uniform(0.95, 1.05), 0)
    assert time.us == pytest.approx(token_us, rel=0.05)


def test_steps_of_one_size_tell_nothing_and_what_was_known_stays() -> None:
    time = TokenTime()
    for _ in range(100):
        time.observe(12, 38_000, 38_000)
    assert time.us == 0.0
    for num_tokens in (12, 512) * 50:
        time.observe(num_tokens, 35_000 + 100 * num_tokens, 0)
    known = time.us
    for _ in range(1000):
        time.observe(12, 36_200, 36_200)
    assert known == pytest.approx(100, rel=0.02) and time.us == pytest.approx(known, rel=0.1)


def test_a_step_that_compiles_is_no_sign_of_a_slow_device() -> None:
    time = TokenTime()
    for num_tokens in (12, 512) * 50:
        time.observe(num_tokens, 35_000 + 100 * num_tokens, 40_000)
    known = time.us
    time.observe(512, 20_000_000, 86_200)
    assert time.us == known


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0.001, 1e9)), max_size=60))
def test_it_is_a_number_that_no_steps_make_negative(steps: list[tuple[int, float]]) -> None:
    time = TokenTime()
    for num_tokens, device_us in steps:
        time.observe(num_tokens, device_us, 0)
        assert math.isfinite(time.us) and time.us >= 0.0
