"""Hours of virtual time with faults, aborts and too little memory: every output is the oracle's, nothing leaks."""

from __future__ import annotations

import pytest
from support.chaos_hour import FAULTS, ChaosConfig, ChaosHour


@pytest.mark.parametrize(("policy", "seed"), [("fcfs", 1), ("lpm", 2), ("dfs-weight", 3), ("priority", 4)])
def test_minutes_of_chaos(policy: str, seed: int) -> None:
    hour = ChaosHour(ChaosConfig(seconds=80.0, seed=seed, policy=policy, fault_rate=0.012))
    hour.run()
    _check_that_faults_happened(hour, least_steps=400)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("policy", "seed"), [("fcfs", 11), ("lpm", 12)])
def test_an_hour_of_chaos(policy: str, seed: int) -> None:
    hour = ChaosHour(ChaosConfig(seconds=3600.0, seed=seed, policy=policy))
    hour.run()
    _check_that_faults_happened(hour, least_steps=20_000)
    assert hour.ends["length"] + hour.ends["stop"] > 5_000


def _check_that_faults_happened(hour: ChaosHour, least_steps: int) -> None:
    """Chaos that spared the scheduler proves nothing."""
    counters, counts, ends = hour.world.planner.counters, hour.counts, hour.ends
    assert counters.num_page_violations == 0
    assert hour.num_steps >= least_steps, hour.num_steps
    assert all(counts[kind] for kind in FAULTS), counts
    assert counts["diverged"] and counts["adopted_tokens"], counts
    assert counters.num_retracted, "memory sufficed"
    assert counters.cached_tokens, "nothing was shared"
    assert all(ends[name] for name in ("stop", "length", "abort", "deadline_exceeded", "overloaded")), ends
